"""One other worker as this one sees it: who it is, how to reach it, and whether it lives. It decides nothing itself.

A peer is *alive* until it says goodbye (*left*) or is given up (*dead*). While it is alive it may be *suspected*: it does
not answer, and nobody knows why.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

from remora.agent.channel.channel import Channel
from remora.agent.memory.routing import Ways
from remora.agent.memory.shared import PeerSharedMemory
from remora.agent.serving.dispatch import Dispatch
from remora.clock import Clock
from remora.rendezvous.record import WorkerRecord
from remora.vocabulary.ids import WorkerInfo, WorkerKey
from remora.wire import code_by_value
from remora.wire.frames import Frame

State = Literal["alive", "left", "dead"]

ENDED = "its process ended"  # why a worker is dead: nobody listens on its host any more, which is ours


class Keeper(Protocol):
    """Who is told what happens on a peer's channels (`agent.peers`)."""

    dispatch: Dispatch
    clock: Clock

    def arrive(self, peer: Peer, frame: Frame) -> Any: ...
    def word(self, peer: Peer, channel: Channel, frame: Frame) -> None: ...
    def lost(self, peer: Peer, channel: Channel, error: BaseException) -> None: ...
    def connect(self, peer: Peer) -> None: ...
    def make_channel(self, peer: Peer, session_id: str, dialled: bool) -> Channel: ...


class Peer:
    """One other worker (or this one: calls to oneself take the same road)."""

    def __init__(self, record: WorkerRecord, keeper: Keeper) -> None:
        self.info = WorkerInfo(record.name, record.id)
        self.name = record.name
        self.id = record.id
        self.learn(record)
        self.key = WorkerKey(record.id, record.incarnation)
        self.state: State = "alive"
        self.reason = ""  # why it is not alive
        self.doubt = ""  # why it is suspected, if it is
        self.doubted_at = 0.0
        self.unreachable_since: float | None = None  # when its host was last heard of, if we wonder whether it is there
        self.expected: Mapping[Channel, float] = {}  # where we expect a sign of life, from when on (never changed, replaced)
        self.questioned_at = 0.0  # when another worker said last that it is dead
        self.dialling = False
        self.dialling_since = 0.0  # when we began to; while it waits for its turn: never
        self.gave_us_up = False  # it lives, but not for us
        self.leaving = False  # it said goodbye, on one of its two channels at least
        self.greeted = False  # it called when it started, and was answered
        self.parted = False  # we said goodbye to it, behind our answers
        self.lock = threading.RLock()  # guards: state, doubt, dialling and incoming
        self.ended = threading.Event()  # it is gone, and everything that came from it has been dealt with
        self.sharing: PeerSharedMemory | None = None  # memory that it and we share
        self.clock = keeper.clock
        self.now = keeper.clock.now
        self.ways: Ways  # of tensors on devices; known when there is a channel
        self._keeper = keeper
        self._dispatch = keeper.dispatch
        self.outgoing: Channel = keeper.make_channel(self, secrets.token_hex(8), True)
        self.incoming: Channel | None = None

    def learn(self, record: WorkerRecord) -> None:
        """What it says of itself: at first, or when more is known than that it called."""
        self.record = record
        self.shares_main = record.extra.get(code_by_value.MAIN) == code_by_value.identity()

    @property
    def me(self) -> str:
        """The name of this worker, for messages to people."""
        return self._dispatch.me.name

    @property
    def gone(self) -> bool:
        """Whether it left or died."""
        return self.state != "alive"

    @property
    def pid(self) -> int | None:
        """The number of its process on its host, if it has said so."""
        pid = self.record.extra.get("pid")
        return pid if isinstance(pid, int) else None

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.state == "dead" and self.reason == ENDED

    @property
    def resting(self) -> bool:
        """Whether nothing is expected of it."""
        return not self.expected

    @property
    def condition(self) -> str:
        """In one word: alive, suspected, left or dead."""
        return "suspected" if self.doubt and self.state == "alive" else self.state

    def channels(self) -> list[Channel]:
        """The one or two that there are."""
        return [self.outgoing] if self.incoming is None else [self.outgoing, self.incoming]

    def give_back(self) -> None:
        """Return the shared memory that we do not use any more."""
        for channel in self.channels():
            if channel.link is not None:
                channel.give_back()

    def served_until(self, deadline: float) -> tuple[object, str, float] | None:
        """What this worker runs, for whom, and what its caller allowed, of the request with exactly this deadline: calls
        that it makes have the same one."""
        for request in list(self._dispatch.serving.values()):
            if request.deadline == deadline and request.function is not None:
                return request.function, request.caller.name, request.frame.timeout
        return None

    def __repr__(self) -> str:
        return f"<Peer {self.name} id={self.id} {self.condition}>"

    # What its channels tell: passed on, together with whose they are.

    def arrive(self, channel: Channel, frame: Frame) -> Any:
        """References came with a message."""
        return self._keeper.arrive(self, frame)

    def requests_on(self, channel: Channel) -> Callable[[Frame], None]:
        """Who is to be told what it asks for."""
        return partial(self._dispatch.request, self, channel)

    def word(self, channel: Channel, frame: Frame) -> None:
        """It says something that wants no answer."""
        self._keeper.word(self, channel, frame)

    def lost(self, channel: Channel, error: BaseException) -> None:
        """A link broke."""
        self._keeper.lost(self, channel, error)

    def connect(self, channel: Channel) -> None:
        """There is something to say on a channel we dialled, and no link."""
        self._keeper.connect(self)
