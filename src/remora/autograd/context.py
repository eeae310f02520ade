"""One context of distributed autograd on one worker: what was sent and received in it, and the gradients gathered in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from remora.autograd.graph import Reach
from remora.autograd.leaves import ByLeaf, Gathered
from remora.autograd.nodes import Recv, Send, receive
from remora.options import FAST_PATHS

if TYPE_CHECKING:
    from remora.agent.calls.call_context import Header
    from remora.agent.peers.manager import Peer
    from remora.autograd.backward_pass import Key, Pass

LOCAL_BITS = 48  # an id has the worker that made it above these bits


class Context:
    """A recording (see `remora.agent.calls.call_context`): calls made in it, and the functions that serve them,
    belong to it."""

    def __init__(self, id: int, next_message: Callable[[], int]) -> None:
        self.id = id
        self.sends: dict[int, Send] = {}
        self._latest: Send | None = None
        self.received_nodes: dict[int, Any] = {}
        self.known_workers: set[int] = set()  # who has a part of this context because of us
        self.heard_from: set[int] = set()  # of whom we have our part of it
        self.gradients = Gathered()
        self.passes: dict[Key, Pass] = {}
        self.ended: dict[Key, set[Peer]] = {}  # passes that are over here, and whom we had given a part in them
        self.released = False
        self.lock = threading.RLock()  # guards: passes and ended
        self._next_message = next_message

    @property
    def creator(self) -> int:
        """The id of the worker that made the context."""
        return self.id >> LOCAL_BITS

    # As calls see it.

    def outgoing(self, peer: Peer) -> tuple[Header, list[torch.Tensor] | None]:
        """See `CallContext`."""
        recording = torch.is_grad_enabled()
        self.known_workers.add(peer.id)
        if self.released:  # after that: whoever releases it meanwhile either sees this worker, or is seen here
            self.check()
        return (self.id, self._next_message(), recording), ([] if recording else None)

    def sent(self, peer: Peer, header: Header, links: list[torch.Tensor]) -> None:
        """See `CallContext`."""
        self._latest = self.sends[header[1]] = Send(header[1], peer, links)

    def look_ahead(self) -> None:
        """See `CallContext`: follow the graph behind what was sent last, which a backward pass would have to do."""
        latest, self._latest = self._latest, None
        if latest is not None and not self.released and FAST_PATHS.look_ahead:
            reach = Reach()
            try:
                reach.follow(latest.starts)
            except RuntimeError:  # what a pass would refuse
                return
            latest.ahead = reach

    def received(self, peer: Peer, header: Header, links: dict[int, torch.Tensor]) -> None:
        """See `CallContext`."""
        self.heard_from.add(peer.id)
        if not links:
            return
        if self.released:
            self.check()
        recv = Recv(header[1], peer)
        self.received_nodes[header[1]] = receive(recv, map(links.__getitem__, range(len(links))))

    def ready_gradients(self) -> ByLeaf:
        """The gradients, ready to be used on the current streams."""
        return self.gradients.ready()

    def check(self) -> None:
        """Raise if the context is gone."""
        if self.released:
            raise RuntimeError(
                f"Couldn't find autograd context data for current autograd context id {self.id}: it was released while "
                f"calls that belong to it were under way"
            )

    def release(self) -> None:
        """Let go of everything."""
        self.released = True
        self.sends.clear()
        self._latest = None
        self.received_nodes.clear()
        self.gradients.clear()

    # What PyTorch's tests look at.

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Send]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.received_nodes)

    def _known_worker_ids(self) -> set[int]:
        return set(self.known_workers)

    def __repr__(self) -> str:
        state = " released" if self.released else ""
        return f"<Context {self.id} sent={len(self.sends)} received={len(self.received_nodes)}{state}>"
