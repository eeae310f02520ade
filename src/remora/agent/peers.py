"""The other workers: how to reach each, whether it lives, and what happens to its calls when it does not.

A peer is *alive* until it says goodbye (*left*) or is given up (*dead*). A broken connection is restored in silence; a
peer is given up when nobody listens at its address any more (its process is gone), when its connection cannot be
restored in time, or when it is silent for too long. Then every call that waits for it fails at once, by name.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from remora.agent.calls import NEVER, Call
from remora.agent.channel import Channel
from remora.agent.crew import Crew
from remora.agent.dispatch import Dispatch
from remora.agent.introduction import Introduction, PeerRefused
from remora.agent.timers import Timers
from remora.errors import (
    AuthenticationError,
    CallNotSent,
    CallOutcomeUnknown,
    ProtocolError,
    RemoraError,
    WorkerLost,
    WorkerNotFound,
)  # fmt: skip
from remora.options import Settings
from remora.rendezvous.record import WorkerRecord
from remora.transport.poller import Poller
from remora.transport.stream import StreamLink
from remora.vocabulary.ids import WorkerInfo, WorkerKey
from remora.vocabulary.messages import MessageType
from remora.wire.frames import Frame

log = logging.getLogger("remora")

ACK, PING = int(MessageType.ACK), int(MessageType.PING)
GRACE = 0.25  # how long a caller may take to come back before we look whether it lives

LEFT = "it left the group"

State = Literal["alive", "left", "dead"]


class Peer:
    """One other worker (or this one: calls to oneself take the same road)."""

    def __init__(self, record: WorkerRecord, outgoing: Channel) -> None:
        self.info = WorkerInfo(record.name, record.id)
        self.name = record.name
        self.id = record.id
        self.record = record
        self.state: State = "alive"
        self.reason = ""
        self.key = WorkerKey(record.id, record.incarnation)
        self.outgoing = outgoing
        self.incoming: Channel | None = None
        self.dialling = False
        self.leaving = False  # it said goodbye, on one of its two channels at least
        self.lock = threading.Lock()  # guards state, dialling and incoming
        self.ended = threading.Event()  # it is gone, and everything that came from it has been dealt with

    def __repr__(self) -> str:
        return f"<Peer {self.name} id={self.id} {self.state}>"


Obituary = Callable[[Peer], None]


class Peers:
    """All peers of one worker."""

    def __init__(
        self,
        crew: Crew,
        poller: Poller,
        timers: Timers,
        dispatch: Dispatch,
        settings: Settings,
        introduction: Introduction,
    ) -> None:
        self._crew = crew
        self._poller = poller
        self._timers = timers
        self._dispatch = dispatch
        self._settings = settings
        self._introduction = introduction
        self._lock = threading.Lock()  # guards the three tables
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._of_channel: dict[str, Peer] = {}  # by session id
        self._stopping = threading.Event()
        self.arrivals: Callable[[Peer, Frame], Any] | None = None  # takes note of the references in a message
        self.me: Peer  # this worker as its own peer
        self.obituaries: list[Obituary] = []  # called when a peer left or died, on a thread of the crew

    # Who is there.

    def add(self, record: WorkerRecord) -> Peer:
        """Know a worker. A worker that comes back under the same name is a new one: the old one is given up."""
        with self._lock:
            known = self._by_name.get(record.name)
            if known is not None and known.record.incarnation == record.incarnation:
                if record.addresses:
                    known.record = record
                return known
            channel = Channel(record.name, secrets.token_hex(8), True, self, self._crew, self._poller)
            peer = Peer(record, channel)
            self._by_name[record.name] = self._by_id[record.id] = peer
            self._of_channel[channel.session_id] = peer
        if known is not None:
            self.give_up(known, "another worker of the same name took its place")
        return peer

    def add_unless_known(self, record: WorkerRecord) -> None:
        """Know a worker that somebody mentions; what we know of its name already is not changed by hearsay."""
        if record.name not in self._by_name:
            self.add(record)

    def find(self, key: str | int) -> Peer:
        """The peer of that name or id."""
        peer = self._by_name.get(key) if isinstance(key, str) else self._by_id.get(key)
        if peer is None:
            names = ", ".join(sorted(self._by_name)[:8])
            raise WorkerNotFound(f"could not find destination {key!r} among {len(self._by_name)} workers ({names} …)")
        return peer

    def by_key(self, key: WorkerKey) -> Peer | None:
        """That very worker, if it is not gone."""
        peer = self._by_id.get(key.id)
        return peer if peer is not None and peer.key == key and peer.state == "alive" else None

    def known(self, key: WorkerKey) -> Peer | None:
        """That very worker, gone or not, if it was ever known."""
        return next((peer for peer in list(self._of_channel.values()) if peer.key == key), None)

    def all(self) -> list[Peer]:
        with self._lock:
            return list(self._by_name.values())

    def remove(self, name: str, state: State, reason: str) -> None:
        """A worker left: forget it, after its calls failed."""
        with self._lock:
            peer = self._by_name.get(name)
        if peer is not None:
            self.give_up(peer, reason, state)

    # What channels tell us.

    def arrive(self, channel: Channel, frame: Frame) -> Any:
        if self.arrivals is None:
            raise ProtocolError(f"{channel.peer} sent references to a worker that keeps none")
        return self.arrivals(self._of_channel[channel.session_id], frame)

    def request(self, channel: Channel, frame: Frame) -> None:
        self._dispatch.request(self._of_channel[channel.session_id], channel, frame)

    def word(self, channel: Channel, frame: Frame) -> None:
        peer = self._of_channel[channel.session_id]
        if frame.kind == MessageType.CANCEL:
            self._dispatch.cancel(channel, frame.call)
        elif frame.kind == MessageType.GOODBYE:
            # It says so on both channels. Only on the one we dialled do its last replies come before.
            peer.leaving = True
            if channel.dialled or peer.outgoing.link is None:
                self._crew.serve(lambda: self.give_up(peer, LEFT, "left"))
        elif frame.kind == MessageType.VOID and channel.dialled:
            call = channel.take(frame.call)
            if call is not None:
                call.fail(
                    CallOutcomeUnknown(
                        f"{call.what}: the result was changed on {peer.name} before it could be sent again after a broken "
                        f"connection"
                    )
                )
                call.settle(self._crew.serve)

    def lost(self, channel: Channel, error: BaseException) -> None:
        """The link of a channel broke."""
        peer = self._of_channel.get(channel.session_id)
        if peer is None or peer.state != "alive" or self._stopping.is_set():
            return
        log.debug("link with %s broke: %s", peer.name, error)
        if isinstance(error, ProtocolError):
            self.give_up(peer, str(error))
        elif channel.dialled and peer.leaving:
            self.give_up(peer, LEFT, "left")
        elif channel.dialled:
            self.connect(channel)
        else:
            self._timers.at(time.monotonic() + GRACE, lambda: self._crew.serve(lambda: self._look_after(peer, channel)))

    def _look_after(self, peer: Peer, channel: Channel) -> None:
        """A caller's link broke a moment ago. If it did not come back, see whether it lives by calling it."""
        if channel.link is None and peer.state == "alive" and peer.incoming is channel:
            self.connect(peer.outgoing)
            limit = time.monotonic() + self._settings.reconnect_timeout
            self._timers.at(limit, lambda: self._crew.serve(lambda: self._drop_if_away(peer, channel)))

    def _drop_if_away(self, peer: Peer, channel: Channel) -> None:
        away = time.monotonic() - channel.lost_at
        if channel.link is None and peer.incoming is channel and away >= self._settings.reconnect_timeout - 0.01:
            channel.close()
            self._dispatch.forget(channel)

    # Connecting.

    def probe(self, names: Iterable[str]) -> None:
        """Connect to those of these peers that we have no link with: whoever is gone is found out."""
        for name in names:
            peer = self._by_name.get(name)
            if peer is not None and peer.state == "alive" and peer.outgoing.link is None:
                self.connect(peer.outgoing)

    def connect(self, channel: Channel) -> None:
        """Give a dialled channel a link, soon."""
        peer = self._of_channel.get(channel.session_id)
        if peer is None:
            return
        with peer.lock:
            if peer.state == "alive" and (peer.dialling or channel.link is not None):
                return
            peer.dialling = peer.state == "alive"
        if peer.dialling:
            self._crew.serve(lambda: self._dial(peer))
        else:
            channel.fail_pending(lambda call: self._epitaph(peer, call))

    def _dial(self, peer: Peer) -> None:
        deadline = time.monotonic() + self._settings.reconnect_timeout
        pause = 0.01
        try:
            while not self._stopping.is_set() and peer.state == "alive":
                try:
                    link, arrived, leftover = self._introduction.to(peer.record, peer.outgoing)
                except (AuthenticationError, ProtocolError) as error:
                    peer.outgoing.fail_pending(lambda call, error=error: type(error)(f"{call.what}: {error}"))  # type: ignore[misc]
                    return
                except PeerRefused as error:
                    self.give_up(peer, str(error))
                    return
                except (ConnectionRefusedError, FileNotFoundError) as error:
                    if peer.leaving:
                        self.give_up(peer, LEFT, "left")
                    self.give_up(peer, f"nobody listens at its address any more (Connection closed by peer: {error})")
                    return
                except OSError as error:
                    if time.monotonic() + pause > deadline:
                        self.give_up(peer, f"it cannot be reached: {error}")
                        return
                    self._stopping.wait(pause)
                    pause = min(pause * 2, 0.5)
                else:
                    if self._stopping.is_set():
                        link.close()
                    else:
                        peer.outgoing.attach(link, arrived, leftover)
                    return
        finally:
            peer.dialling = False
            if (
                peer.outgoing.link is None
                and peer.state == "alive"
                and peer.outgoing.pending
                and not self._stopping.is_set()
            ):
                self.connect(peer.outgoing)  # messages came after we had given up

    def admit(self, record: WorkerRecord, session_id: str) -> int | str:
        """A proven caller asks for a session: how much of it we have, or why not."""
        if self._stopping.is_set():
            return "this worker is shutting down"
        known = self._by_name.get(record.name)
        if known is not None and known.record.incarnation == record.incarnation and known.state == "dead":
            return f"{record.name} was given up ({known.reason}); it must join again as a new worker"
        incoming = None if known is None else known.incoming
        if incoming is None or incoming.session_id != session_id:
            return 0
        if incoming.closed:
            return "this session was given up"
        return incoming.received_for_good()

    def welcome(self, record: WorkerRecord, session_id: str, link: StreamLink, arrived: int, leftover: bytes) -> None:
        """A caller's connection is ready to be used."""
        peer = self.add(record)
        with peer.lock:
            channel = peer.incoming
            if peer.state == "dead":
                channel = None  # given up while it was being admitted: nothing more is read from it
            elif channel is None or channel.session_id != session_id:
                channel = Channel(record.name, session_id, False, self, self._crew, self._poller)
                self._of_channel[session_id] = peer
                peer.incoming = channel
        if channel is None:
            link.close()
            return
        try:
            channel.attach(link, arrived, leftover)
        except ProtocolError as error:
            link.close()
            self.give_up(peer, str(error))

    # The end of a peer.

    def give_up(self, peer: Peer, reason: str, state: State = "dead") -> None:
        """Nothing more will come from this peer. Idempotent."""
        with peer.lock:
            if peer.state != "alive":
                return
            peer.state = state
            peer.reason = reason
        if state == "dead":
            log.warning("%s lost %s: %s", self._dispatch.me, peer.info, reason)
        peer.outgoing.fail_pending(lambda call: self._epitaph(peer, call))
        peer.outgoing.close()
        if peer.incoming is not None:
            peer.incoming.close()
            self._dispatch.forget(peer.incoming)
        for obituary in self.obituaries:
            obituary(peer)
        peer.ended.set()

    def _epitaph(self, peer: Peer, call: Call) -> RemoraError:
        kind = WorkerLost if peer.outgoing.ever_connected else CallNotSent
        return kind(f"{call.what}: {peer.info} {'is gone' if peer.state == 'dead' else 'has left'}: {peer.reason}")

    def epitaph(self, peer: Peer, what: str) -> RemoraError:
        """The error for a call to a peer that is known to be gone: it was not sent."""
        return CallNotSent(f"{what}: {peer.info} {'is gone' if peer.state == 'dead' else 'has left'}: {peer.reason}")

    # Now and then.

    def tick(self, now: float) -> None:
        """Called about twice a second: ask silent peers for a sign of life, give up the mute, expire what is due."""
        for peer in self.all():
            if peer.state != "alive":
                continue
            for channel in (peer.outgoing, peer.incoming):
                link = None if channel is None else channel.link
                if channel is None or link is None:
                    continue
                channel.watch(again=True)
                silence = now - link.last_heard
                if channel.paused:  # it is not silent, we do not listen; and it must hear that we live
                    self._crew.serve_quickly(partial(channel.say, ACK))
                elif silence > self._settings.silence_limit:
                    reason = f"it has been silent for {silence:.0f} s"
                    self._crew.serve(lambda peer=peer, reason=reason: self.give_up(peer, reason))  # type: ignore[misc]
                elif channel.dialled and silence > self._settings.heartbeat:
                    self._crew.serve_quickly(partial(channel.say, PING))

    def due(self, before: float) -> Iterable[tuple[Channel, Call]]:
        """Asynchronous calls whose deadline comes before the given time."""
        for peer in self.all():
            for call in list(peer.outgoing.pending.values()):
                if call.asynchronous and call.deadline != NEVER and call.deadline < before:
                    yield peer.outgoing, call

    def watch_all(self) -> None:
        """Look for every reply that is due, also for those nobody was in a hurry for."""
        for peer in self.all():
            peer.outgoing.watch()

    def active_calls(self) -> int:
        """Calls of ours that wait for an answer."""
        return sum(len(peer.outgoing.pending) for peer in self.all())

    def say_goodbye(self, patience: float) -> None:
        """Tell everybody that we leave of our own will, and wait a moment until they have heard it."""
        self._stopping.set()
        channels = [channel for peer in self.all() for channel in (peer.outgoing, peer.incoming)]
        talking = [channel for channel in channels if channel is not None and channel.link is not None]
        for channel in talking:
            channel.send(int(MessageType.GOODBYE), 0, b"")
        end = time.monotonic() + patience
        for channel in talking:
            channel.linger(end)

    def stop(self, make_error: Callable[[Call], BaseException]) -> None:
        """Fail what waits and close every channel."""
        self._stopping.set()
        for peer in self.all():
            peer.outgoing.fail_pending(make_error)
            peer.outgoing.close()
            if peer.incoming is not None:
                peer.incoming.close()

    def descriptors(self) -> list[socket.socket]:
        """The sockets of all links, to be closed in a forked child."""
        channels = [channel for peer in self._by_name.values() for channel in (peer.outgoing, peer.incoming)]
        return [channel.link.sock for channel in channels if channel is not None and channel.link is not None]
