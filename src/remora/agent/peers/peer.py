"""One other worker as this one sees it, with the channels that lead there. It decides nothing itself."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from remora.agent.calls.peer_info import PeerInfo, Served, State
from remora.agent.channel.channel import Channel
from remora.agent.memory.routing import DeviceRouting
from remora.agent.memory.shared import SharedMemory
from remora.clock import Clock
from remora.errors import CallNotSent, RemoraError, WorkerLost
from remora.faults.worker_faults import WorkerFaults
from remora.recorder import CONNECTED, Recorder
from remora.rendezvous.record import WorkerRecord
from remora.transport.link import StreamLink
from remora.vocabulary.ids import WorkerInfo, WorkerKey
from remora.wire import code_by_value
from remora.wire.enclosed import Arrival
from remora.wire.frames import Body, Frame

ENDED = "its process ended"  # the reason, for people, of a peer whose `process_ended` is true

__all__ = ["ENDED", "Keeper", "Peer", "State"]


class Keeper(Protocol):
    """Acts on what happens on a peer's channels (`remora.agent.peers.manager`)."""

    clock: Clock
    device_routing: DeviceRouting
    faults: WorkerFaults
    my_name: str
    recorder: Recorder
    shared_memory: SharedMemory

    def served_until(self, deadline: float) -> Served | None: ...
    def request(self, caller: Peer, channel: Channel, frame: Frame) -> None: ...
    def arrive(self, peer: Peer, body: Body) -> tuple[Body, Arrival]: ...
    def control_message(self, peer: Peer, channel: Channel, frame: Frame) -> None: ...
    def lost(self, peer: Peer, channel: Channel, error: BaseException) -> None: ...
    def connect(self, peer: Peer) -> None: ...
    def make_channel(self, peer: Peer, session_id: str, dialled: bool) -> Channel: ...


class Peer(PeerInfo):
    """One other worker (or this one: calls to oneself take the same road)."""

    def __init__(self, record: WorkerRecord, keeper: Keeper) -> None:
        key = WorkerKey(record.id, record.incarnation)
        me, recorder = keeper.my_name, keeper.recorder
        super().__init__(
            WorkerInfo(record.name, record.id), key, me, keeper.clock, keeper.served_until, recorder, recorder.note
        )
        self._keeper = keeper
        self.shared_memory = keeper.shared_memory.with_peer(key, record.name)  # memory that it and we share
        self.learn(record)
        self.lock = threading.RLock()  # guards: state, suspicion, suspected_at, dialling and incoming
        self.suspected_at = 0.0
        # Single assignments by any thread, of which the last one counts. `expected` is replaced, never changed: the thread
        # that reads it has one or the other.
        self.unreachable_since: float | None = None  # when its host was last heard of, if it may not be there any more
        self.expected: Mapping[Channel, float] = {}  # where we expect a sign of life, from when on
        self.questioned_at = 0.0  # when another worker said last that it is dead
        # Written by the thread that dials it, one at a time, before `state` says that it is gone.
        self.gave_us_up = False  # it lives, but not for us
        self.process_ended = False  # nothing listens at its addresses, on this host
        # Set once, by any thread, and never reset.
        self.leaving = False  # it said goodbye, on one of its two channels at least
        self.greeted = False  # it called when it started, and was answered
        self.parted = False  # we said goodbye to it, behind our answers
        self.dialling = False  # set under `lock`; reset by the thread that dialled
        self.dialling_since = 0.0  # when we began to; while it waits for its turn: never
        self.ended = threading.Event()  # it is gone, and everything that came from it has been dealt with
        self.faults = keeper.faults  # on purpose: new links are led through a fault plan
        self.outgoing: Channel = keeper.make_channel(self, secrets.token_hex(8), True)
        self.incoming: Channel | None = None  # on which its calls come

    def learn(self, record: WorkerRecord) -> None:
        """Note what it says of itself: at first, or when more is known than that it called."""
        self.record = record
        self.shares_main = record.extra.get(code_by_value.MAIN) == code_by_value.identity()
        self._keeper.shared_memory.learn(self.shared_memory, record.extra)
        self.routes = self._keeper.device_routing.routes_to(record, self.shared_memory.device_exchange)

    @property
    def pid(self) -> int | None:
        """The number of its process on its host, if it has said so."""
        pid = self.record.extra.get("pid")
        return pid if isinstance(pid, int) else None

    @property
    def has_ended(self) -> bool:
        """Return True if its process is known to have ended."""
        return self.state == "dead" and self.process_ended

    def gone_error(self, what: str) -> RemoraError:
        """The error for a call to a peer that is known to be gone: it was not sent."""
        return CallNotSent(f"{what}: {self._fate()}")

    def lost_error(self, what: str) -> RemoraError:
        """The error for a call that waited for the peer when it went."""
        kind = WorkerLost if self.outgoing.ever_connected else CallNotSent
        return kind(f"{what}: {self._fate()}")

    def _fate(self) -> str:
        return f"{self.info} {'is gone' if self.state == 'dead' else 'has left'}: {self.reason}"

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

    def arrive(self, channel: Channel, body: Body) -> tuple[Body, Arrival]:
        """Take note of the references that came with a message."""
        return self._keeper.arrive(self, body)

    def requests_on(self, channel: Channel) -> Callable[[Frame], None]:
        """Return the function to call with each of its requests."""
        return partial(self._keeper.request, self, channel)

    def control_message(self, channel: Channel, frame: Frame) -> None:
        """It says something that wants no answer."""
        self._keeper.control_message(self, channel, frame)

    def lost(self, channel: Channel, error: BaseException) -> None:
        self._keeper.lost(self, channel, error)

    def connect(self, channel: Channel) -> None:
        """There is something to say on a channel we dialled, and no link."""
        self._keeper.connect(self)
