"""A context of distributed autograd on one worker: the tensors sent and received in it, and the gradients gathered in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from remora.autograd.leaves import ByLeaf, Gathered
from remora.autograd.nodes import Recv, Send, receive

if TYPE_CHECKING:
    from remora.agent.calls.call_context import Header
    from remora.agent.peers.manager import Peer

LOCAL_BITS = 48  # an id has the worker that made it above these bits


class Context:
    """A call context (see `remora.agent.calls.call_context`): calls made in it, and the functions that serve them, belong to
    it."""

    def __init__(self, id: int, next_message: Callable[[], int]) -> None:
        self.id = id
        self.sends: dict[int, Send] = {}
        self.received_nodes: dict[int, Any] = {}
        self.known_workers: set[int] = set()  # those that have a part of this context because of us
        self.heard_from: set[int] = set()  # those because of which we have a part of it
        self.gradients = Gathered()
        self.released = False
        self.manager: weakref.ref[object] | None = None  # the `with` statement that leaves it, where it was made
        self._next_message = next_message

    @property
    def creator(self) -> int:
        """The id of the worker that made the context."""
        return self.id >> LOCAL_BITS

    @property
    def is_abandoned(self) -> bool:
        """Return True if it was made here, and nothing will leave it: an exception of a signal handler struck at the first
        instruction of `__exit__`."""
        return self.manager is not None and self.manager() is None

    # As calls see it.

    def outgoing(self, peer: Peer) -> tuple[Header, list[torch.Tensor] | None]:
        """See `CallContext`."""
        recording = torch.is_grad_enabled()
        self.known_workers.add(peer.id)
        if self.released:  # read after the line above: a thread that releases it meanwhile sees this worker, or is seen here
            self.check()
        return (self.id, self._next_message(), recording), ([] if recording else None)

    def sent(self, peer: Peer, header: Header, links: list[torch.Tensor]) -> None:
        """See `CallContext`."""
        self.sends[header[1]] = Send(header[1], peer, links)

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
