"""One other worker as this one sees it, with the channels that lead there. It decides nothing itself."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from remora.agent.calls.peer_info import PeerInfo, Served, State
from remora.agent.channel.channel import Channel
from remora.agent.memory.shared import PeerSharedMemory
from remora.clock import Clock
from remora.errors import CallNotSent, RemoraError, WorkerLost
from remora.recorder import CONNECTED, Recorder
from remora.rendezvous.record import WorkerRecord
from remora.transport.link import StreamLink
from remora.vocabulary.ids import WorkerInfo, WorkerKey
from remora.wire import code_by_value
from remora.wire.frames import Frame

ENDED = "its process ended"  # the reason, for people, of a peer whose `process_ended` is true


__all__ = ["ENDED", "Keeper", "Peer", "State"]


class Keeper(Protocol):
    """Acts on what happens on a peer's channels (`remora.agent.peers.manager`)."""

    clock: Clock
    my_name: str
    recorder: Recorder

    def served_until(self, deadline: float) -> Served | None: ...
    def requests_on(self, peer: Peer, channel: Channel) -> Callable[[Frame], None]: ...
    def arrive(self, peer: Peer, frame: Frame) -> Any: ...
    def word(self, peer: Peer, channel: Channel, frame: Frame) -> None: ...
    def lost(self, peer: Peer, channel: Channel, error: BaseException) -> None: ...
    def connect(self, peer: Peer) -> None: ...
    def make_channel(self, peer: Peer, session_id: str, dialled: bool) -> Channel: ...


class Peer(PeerInfo):
    """One other worker (or this one: calls to oneself take the same road)."""

    def __init__(self, record: WorkerRecord, keeper: Keeper) -> None:
        key = WorkerKey(record.id, record.incarnation)
        me, recorder = keeper.my_name, keeper.recorder
        super().__init__(
            WorkerInfo(record.name, record.id), key, me, keeper.clock, keeper.served_until, recorder.remember, recorder.note
        )
        self.learn(record)
        self.doubted_at = 0.0
        self.unreachable_since: float | None = None  # when its host was last heard of, if we wonder whether it is there
        self.expected: Mapping[Channel, float] = {}  # where we expect a sign of life, from when on (never changed, replaced)
        self.questioned_at = 0.0  # when another worker said last that it is dead
        self.dialling = False
        self.dialling_since = 0.0  # when we began to; while it waits for its turn: never
        self.gave_us_up = False  # it lives, but not for us
        self.process_ended = False  # nothing listens at its addresses, on this host; set before its state is
        self.leaving = False  # it said goodbye, on one of its two channels at least
        self.greeted = False  # it called when it started, and was answered
        self.parted = False  # we said goodbye to it, behind our answers
        self.lock = threading.RLock()  # guards: state, doubt, dialling and incoming
        self.ended = threading.Event()  # it is gone, and everything that came from it has been dealt with
        self.sharing: PeerSharedMemory | None = None  # memory that it and we share
        self._keeper = keeper
        self.outgoing: Channel = keeper.make_channel(self, secrets.token_hex(8), True)
        self.incoming: Channel | None = None

    def learn(self, record: WorkerRecord) -> None:
        """What it says of itself: at first, or when more is known than that it called."""
        self.record = record
        self.shares_main = record.extra.get(code_by_value.MAIN) == code_by_value.identity()

    @property
    def pid(self) -> int | None:
        """The number of its process on its host, if it has said so."""
        pid = self.record.extra.get("pid")
        return pid if isinstance(pid, int) else None

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.state == "dead" and self.process_ended

    @property
    def resting(self) -> bool:
        """Whether nothing is expected of it."""
        return not self.expected

    def gone_error(self, what: str) -> RemoraError:
        """The error for a call to a peer that is known to be gone: it was not sent."""
        return CallNotSent(f"{what}: {self._fate()}")

    def lost_error(self, what: str) -> RemoraError:
        """The error for a call that waited for the peer when it went."""
        kind = WorkerLost if self.outgoing.ever_connected else CallNotSent
        return kind(f"{what}: {self._fate()}")

    def _fate(self) -> str:
        return f"{self.info} {'is gone' if self.state == 'dead' else 'has left'}: {self.reason}"

    def accept(self, channel: Channel) -> None:
        """Its calls come on this channel from now on. Under `lock`."""
        self.incoming = channel

    def channels(self) -> list[Channel]:
        """The one or two that there are."""
        return [self.outgoing] if self.incoming is None else [self.outgoing, self.incoming]

    def give_back(self) -> None:
        """Return the shared memory that we do not use any more."""
        for channel in self.channels():
            if channel.link is not None:
                channel.give_back()

    def __repr__(self) -> str:
        return f"<Peer {self.name} id={self.id} {self.condition}>"

    def note_link(self, link: StreamLink) -> None:
        """There is a new connection."""
        self._keeper.recorder.note(CONNECTED, self.name, link.where)

    # What its channels tell: passed on, together with whose they are.

    def arrive(self, channel: Channel, frame: Frame) -> Any:
        """References came with a message."""
        return self._keeper.arrive(self, frame)

    def requests_on(self, channel: Channel) -> Callable[[Frame], None]:
        """What to call with each of its requests."""
        return self._keeper.requests_on(self, channel)

    def word(self, channel: Channel, frame: Frame) -> None:
        """It says something that wants no answer."""
        self._keeper.word(self, channel, frame)

    def lost(self, channel: Channel, error: BaseException) -> None:
        """A link broke."""
        self._keeper.lost(self, channel, error)

    def connect(self, channel: Channel) -> None:
        """There is something to say on a channel we dialled, and no link."""
        self._keeper.connect(self)
