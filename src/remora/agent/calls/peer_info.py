"""The worker at the other end, as far as a call, a request and a message need to know it: data, and nothing that acts.

`remora.agent.peers.peer.Peer` adds the channels to it. Everything between the two knows a worker by this class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from remora.agent.memory.routing import PeerRoutes
from remora.clock import Clock
from remora.recorder import Recorder
from remora.vocabulary.ids import WorkerInfo, WorkerKey

State = Literal["alive", "left", "dead"]
Served = tuple[object, str, float]  # a function, the name of its caller, and how long the caller allowed it to take


class PeerInfo:
    """Name, identity, clock and state of a worker, as another one sees it.

    A worker is *alive* until it says goodbye (*left*) or is given up (*dead*). While it is alive it may be *suspected*: it
    does not answer, and the reason is not known.
    """

    routes: PeerRoutes  # of tensors on devices; known when there is a channel
    shares_main: bool  # whether its main module is the one of this process

    def __init__(
        self,
        info: WorkerInfo,
        key: WorkerKey,
        me: str,
        clock: Clock,
        served_until: Callable[[float], Served | None],
        recorder: Recorder | None = None,
        note: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self.info = info
        self.name = info.name
        self.id = info.id
        self.key = key
        self.me = me  # the name of this worker, for messages to people
        self.clock = clock
        self.now = clock.now
        self.served_until = served_until  # what this worker runs until exactly that deadline: its calls inherit it
        self.recorder = recorder if recorder is not None and recorder.size else None  # is told of calls that end
        self.note = note  # takes what else happens: a kind, a peer and a text
        self.state: State = "alive"  # (this and the next two are written under `Peer.lock`)
        self.reason = ""  # why it is not alive
        self.suspicion = ""  # why it is suspected, if it is

    @property
    def gone(self) -> bool:
        """Return True if it left or died."""
        return self.state != "alive"

    @property
    def condition(self) -> str:
        """In one word: alive, suspected, left or dead."""
        return "suspected" if self.suspicion and self.state == "alive" else self.state
