"""The other workers: who is there, how to reach each, and what happens to its calls when it is gone.

A broken connection is restored in silence (`remora.agent.peers.reconnect`). A peer is given up when that fails, when
its process
or its host is gone, or when it is silent for too long (`remora.agent.peers.failure_detector`). Then every call that
waits for it fails at
once, by name. Whoever is gone is remembered for a while, so that calls to it can say what became of it.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from remora.agent.calls.call import NEVER, Call
from remora.agent.channel.channel import Channel
from remora.agent.channel.function_table import LONGEST
from remora.agent.memory.device import tidy
from remora.agent.memory.routing import DeviceRouting
from remora.agent.memory.shared import SharedMemory
from remora.agent.peers.failure_detector import FailureDetector, HostSilent
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.membership_events import MembershipEvents
from remora.agent.peers.peer import Peer, State
from remora.agent.peers.peer_table import PeerTable
from remora.agent.peers.reconnect import LEAVING, LEFT, DialQueue, Reconnector
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.timers import Timers
from remora.agent.runtime.try_lock import may_be_struck
from remora.agent.serving.dispatch import BEGUN, Dispatch
from remora.devices import streams
from remora.errors import CallNotSent, CallOutcomeUnknown, ProtocolError, RemoraError, WorkerLost
from remora.options import Settings
from remora.protocol.membership import (
    Died,
    Farewell,
    Joined,
    Left,
    Parting,
    Recovered,
    Suspected,
    on_farewell,
)
from remora.rendezvous.record import WorkerRecord
from remora.transport.link import StreamLink, keep_alive_limit
from remora.transport.poller import Poller
from remora.vocabulary.ids import WorkerKey
from remora.vocabulary.messages import MessageType
from remora.wire.frames import Frame

log = logging.getLogger("remora")

ACK, GOODBYE = int(MessageType.ACK), int(MessageType.GOODBYE)
GRACE = 0.25  # how long a caller may take to come back before we look whether it lives
GOODBYE_PATIENCE = 0.5  # seconds in which a peer takes nothing of our last words before we hang up
ANSWER_PATIENCE = 5.0  # … if we leave gracefully, and answers are among them
RETURN_PATIENCE = 1.0  # … if it has lost the link over which they come, and has to dial
GOODBYE_LIMIT = 2.0  # seconds for all of it, if we do not leave gracefully
FIRST_LOOK, LONGEST_LOOK = 0.001, 0.02  # seconds between two looks whether those we leave have hung up

Obituary = Callable[[Peer], None]

__all__ = ["Peer", "PeerManager", "State"]


class PeerManager(PeerTable):
    """All peers of one worker."""

    def __init__(
        self,
        pool: WorkerPool,
        poller: Poller,
        timers: Timers,
        dispatch: Dispatch,
        settings: Settings,
        introduction: HandshakeClient,
        places: DeviceRouting,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._poller = poller
        self._timers = timers
        self.dispatch = dispatch
        self._settings = settings
        self.clock = settings.clock
        self.arrivals: Callable[[Peer, Frame], Any] | None = None  # takes note of the references in a message
        self.me: Peer  # this worker as its own peer
        self.parting = False  # we have begun to tell the others that we leave: who has heard it hangs up
        self.listed: Callable[[WorkerRecord], bool] = lambda record: True  # whether the group's list has it
        self.on_gone: list[Obituary] = []  # called when a peer left or died, on a thread of the pool
        self.events = MembershipEvents(pool)
        self.bulk = SharedMemory(settings.shared_memory, settings.device_memory, settings.clock.now, pool.submit_final)
        self.places = places
        self._own_time = introduction.own_time
        self.failure_detector = FailureDetector(self, pool, settings, self._own_time)
        self._dialling = Reconnector(self, introduction, settings)
        self._dials = DialQueue(pool.submit_system)

    # Who is there.

    def add(self, record: WorkerRecord) -> Peer:
        """Know a worker. A worker that comes back under the same name is a new one: the old one is given up."""
        peer, predecessor, is_new = self.enter(record, lambda: Peer(record, self))
        if predecessor is not None:
            self.give_up(predecessor, "another worker of the same name took its place")
        if is_new:
            self.events.publish(Joined(peer.info))
        elif record.extra and peer.record is record and peer.sharing is not None:
            self.bulk.learn(peer.sharing, record.extra)  # until now it was known by its call alone
            peer.ways = self.places.ways_to(record, peer.sharing.handover)
        return peer

    def make_channel(self, peer: Peer, session_id: str, dialled: bool) -> Channel:
        """One direction of talking with a peer."""
        channel = Channel(peer.name, session_id, dialled, peer, self._pool, self._poller)
        if peer.sharing is None:
            peer.sharing = self.bulk.with_peer(peer.key, peer.name)
            self.bulk.learn(peer.sharing, peer.record.extra)
            peer.ways = self.places.ways_to(peer.record, peer.sharing.handover)
        channel.sharing = peer.sharing
        return channel

    def add_unless_known(self, record: WorkerRecord) -> None:
        """Know a worker that somebody mentions; what we know of its name already is not changed by hearsay."""
        if not self.has_name(record.name):
            self.add(record)

    def is_stale(self, record: WorkerRecord) -> bool:
        """Whether it has the name or the id of another worker that is there, and is not on the group's list: it was given
        up before we came, others have its place by now, and it does not know."""
        holders = (self.by_name.get(record.name), self.of_id(record.id))
        rivals = [each for each in holders if each and not each.gone and each.key.incarnation != record.incarnation]
        return bool(rivals) and not self.listed(record)

    # What channels tell us.

    def arrive(self, peer: Peer, frame: Frame) -> Any:
        """References came with a message."""
        if self.arrivals is None:
            raise ProtocolError(f"{peer.name} sent references to a worker that keeps none")
        return self.arrivals(peer, frame)

    def word(self, peer: Peer, channel: Channel, frame: Frame) -> None:
        """A peer says something that wants no answer."""
        if frame.kind == MessageType.CANCEL:
            self.dispatch.cancel(channel, frame.call)
        elif frame.kind == MessageType.GIVE_BACK and peer.sharing is not None:
            peer.sharing.take_back(frame.body)
        elif frame.kind == MessageType.FUNCTION:
            channel.heard.listen(frame.call, bytes(frame.body[: LONGEST + 1]))
        elif frame.kind == MessageType.PROGRESS:
            waiting = channel.pending.get(frame.call)
            if waiting is not None:
                waiting.progress = frame.body == BEGUN, self.clock.now()
        elif frame.kind == MessageType.GOODBYE:
            self._pool.submit_system(partial(self.hear_farewell, peer, channel.dialled))
        elif frame.kind == MessageType.VOID and channel.dialled:
            call = channel.take(frame.call)
            if call is not None:
                call.fail(
                    CallOutcomeUnknown(
                        f"{call.what}: the result was changed on {peer.name} before it could be sent again after a broken "
                        f"connection"
                    )
                )
                call.settle(self._pool.submit_system)

    def hear_farewell(self, peer: Peer, behind_answers: bool) -> None:
        """A peer leaves: what it answered before comes first (`remora.protocol.membership`, F1)."""
        peer.leaving = True
        outgoing = peer.outgoing
        match on_farewell(behind_answers, bool(outgoing.pending), outgoing.link is not None):
            case Parting.HANG_UP:
                outgoing.send_unsequenced(ACK)  # it waits until we have its answers, or come back for them
                self.give_up(peer, LEFT, "left")
            case Parting.REDIAL:
                self.connect(peer)
            case Parting.AWAIT_ANSWERS:
                outgoing.watch()  # no thread may be reading

    def lost(self, peer: Peer, channel: Channel, error: BaseException) -> None:
        """The link of a channel broke."""
        if peer.gone or self.stopping:
            return
        log.debug("link with %s broke: %s", peer.name, error)
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT and peer.unreachable_since is None:
            silent = keep_alive_limit(self._settings.reconnect_timeout)  # the link was at rest: its kernel says so
            peer.unreachable_since = self.clock.now() - silent
            self.failure_detector.host_is_silent(peer, silent)
        if isinstance(error, ProtocolError):
            self.give_up(peer, str(error))
        elif channel.dialled and peer.leaving and not channel.pending:
            self.give_up(peer, LEFT, "left")
        elif channel.dialled:
            self.connect(peer)
        else:
            wait = 0.0 if isinstance(error, HostSilent) or peer.unreachable_since is not None else GRACE
            self._later(wait, lambda: self._look_after(peer, channel))

    def _look_after(self, peer: Peer, channel: Channel) -> None:
        """A caller's link broke a moment ago. If it did not come back, see whether it lives by calling it."""
        if channel.link is None and not peer.gone and peer.incoming is channel:
            self.connect(peer)
            self._later(self._settings.silence_limit, lambda: self._drop_if_away(peer, channel))

    def _drop_if_away(self, peer: Peer, channel: Channel) -> None:
        """It lives, or we would have given it up, but it does not call any more: its session is of no use."""
        away = self._own_time.since(channel.lost_at, self.clock.now())
        if channel.link is None and peer.incoming is channel and away >= self._settings.silence_limit - 0.01:
            channel.close()
            self.dispatch.forget(channel)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.at(self.clock.now() + seconds, lambda: self._pool.submit_system(action))

    # Connecting.

    @property
    def stopping(self) -> bool:
        """Whether we are about to leave."""
        return self._dialling.stopping.is_set()

    def probe(self, names: Iterable[str]) -> None:
        """Connect to those of these peers that we have no link with: whoever is gone is found out."""
        for name in names:
            peer = self.find(name) if self.has_name(name) else None
            if peer is not None and not peer.gone and peer.outgoing.link is None:
                self.connect(peer)

    def connect(self, peer: Peer) -> None:
        """Give the channel to a peer a link, soon."""
        if may_be_struck():
            self._pool.submit_final(partial(self._connect, peer))  # else a strike between the steps could leave it undialled
        else:
            self._connect(peer)

    def _connect(self, peer: Peer) -> None:
        if self.parting and not peer.gone and not peer.outgoing.pending:
            return  # it has answered our farewell: that its link is gone is no reason to wonder whether it lives
        with peer.lock:
            if not peer.gone and (peer.dialling or peer.outgoing.link is not None):
                return
            peer.dialling = not peer.gone
            peer.dialling_since = NEVER  # it waits for its turn, which is no fault of the peer
        if peer.dialling:
            self._dials.submit(partial(self._dial, peer))
        else:
            peer.outgoing.fail_pending(lambda call: self._gone_error(peer, call), answered_too=False)

    def _dial(self, peer: Peer, make_room: Callable[[], None]) -> None:
        peer.dialling_since = self.clock.now()
        try:
            self._dialling.dial(peer, make_room)
        finally:
            peer.dialling = False
            if peer.outgoing.link is None and not peer.gone and peer.outgoing.pending and not self.stopping:
                self.connect(peer)  # messages came after we had given up

    def admit(self, record: WorkerRecord, session_id: str) -> int | str:
        """A proven caller asks for a session: how much of it we have, or why not."""
        known = self.known(WorkerKey(record.id, record.incarnation))
        if self.stopping and not self._resumes(known, session_id):
            return LEAVING
        if known is not None and known.state == "dead":
            return f"{record.name} was given up ({known.reason}); it must join again as a new worker"
        if known is None and self.is_stale(record):
            return f"another worker took the place of {record.name}; it must join again as a new worker"
        incoming = None if known is None else known.incoming
        if incoming is None or incoming.session_id != session_id:
            return 0
        if incoming.closed:
            return "this session was given up"
        return incoming.received_for_good()

    def _resumes(self, peer: Peer | None, session_id: str) -> bool:
        """Whether a caller goes on with a session: it may fetch its last answers while we leave."""
        channel = None if peer is None else peer.incoming
        return channel is not None and channel.session_id == session_id and not channel.closed

    def attach_incoming(
        self, record: WorkerRecord, session_id: str, link: StreamLink, arrived: int, leftover: bytes
    ) -> None:
        """A caller's connection is ready to be used."""
        peer = self.add(record)
        with peer.lock:
            channel = peer.incoming
            if peer.state == "dead" or (self.stopping and not self._resumes(peer, session_id)):
                channel = None  # given up while it was being admitted, or we leave: nothing more is read from it
            elif channel is None or channel.session_id != session_id:
                channel = peer.incoming = self.make_channel(peer, session_id, False)
        if channel is None:
            link.close()
            return
        try:
            channel.attach(link, arrived, leftover)
        except ProtocolError as error:
            link.close()
            self.give_up(peer, str(error))

    # What becomes of a peer.

    def suspect(self, peer: Peer, reason: str) -> None:
        """A peer does not answer. Its calls wait on; whoever asks or listens may know."""
        with peer.lock:
            news = not peer.gone and not peer.doubt
            peer.doubt, peer.doubted_at = reason, self.clock.now()
        if news:
            log.info("%s suspects %s: %s", self.dispatch.me, peer.info, reason)
            self.events.publish(Suspected(peer.info, reason))

    def trust(self, peer: Peer) -> None:
        """A peer answers (again)."""
        with peer.lock:
            news, peer.doubt, peer.unreachable_since = bool(peer.doubt), "", None
        if news and not peer.gone:
            self.events.publish(Recovered(peer.info))

    def give_up(self, peer: Peer, reason: str, state: State = "dead") -> None:
        """Nothing more will come from this peer. Idempotent."""
        with peer.lock:
            if peer.gone:
                return
            peer.state = state
            peer.reason = reason
        self.mark_departed(peer)
        if state == "dead":
            log.warning("%s%s is gone: %s", peer.name, f" (pid {peer.pid})" if peer.pid else "", reason)
            log.debug("%s lost %s, which listened at %s", self.dispatch.me, peer.info, ", ".join(peer.record.addresses))
        else:
            log.info("%s left", peer.name)
        peer.outgoing.fail_pending(lambda call: self._gone_error(peer, call), answered_too=False)
        peer.outgoing.close()
        if peer.incoming is not None:
            peer.incoming.close()
            self.dispatch.forget(peer.incoming)
        if peer.sharing is not None:
            peer.sharing.forget()
        for obituary in list(self.on_gone):
            try:
                obituary(peer)
            except Exception:  # the others must know, and whoever waits for the end of this peer must not wait for ever
                log.exception("not everybody could be told that %s is gone", peer.info)
        peer.ended.set()
        self.events.publish(Left(peer.info) if state == "left" else Died(peer.info, reason))

    def _gone_error(self, peer: Peer, call: Call) -> RemoraError:
        kind = WorkerLost if peer.outgoing.ever_connected else CallNotSent
        return kind(f"{call.what}: {peer.info} {'is gone' if peer.state == 'dead' else 'has left'}: {peer.reason}")

    def gone_error(self, peer: Peer, what: str) -> RemoraError:
        """The error for a call to a peer that is known to be gone: it was not sent."""
        return CallNotSent(f"{what}: {peer.info} {'is gone' if peer.state == 'dead' else 'has left'}: {peer.reason}")

    # Now and then, and in the end.

    def tick(self, now: float) -> None:
        """Called about twice a second."""
        self.failure_detector.tick(now)
        peers = self.all()
        shared = [peer.sharing for peer in peers if peer.sharing is not None]
        self.bulk.tick(now, shared)
        if streams.watched:
            self._pool.submit_system(partial(tidy, [each.handover for each in shared], now))
        for peer in peers:
            if peer.sharing is not None and peer.sharing.unused:
                self._pool.call_soon(peer.give_back)

    def due(self, before: float) -> Iterable[tuple[Channel, Call]]:
        """Asynchronous calls whose deadline comes before the given time."""
        for peer in self.all():
            for call in list(peer.outgoing.pending.values()):
                if call.asynchronous and call.deadline != NEVER and call.deadline < before:
                    yield peer.outgoing, call

    def watch_all(self) -> None:
        """Look for every reply that is due, also for those nobody was in a hurry for."""
        for peer in self.all():
            if peer.outgoing.waiter_owned:
                peer.outgoing.give_back_to_poller()
            peer.outgoing.watch()

    def active_calls(self) -> int:
        """Calls of ours that wait for an answer."""
        return sum(len(peer.outgoing.pending) for peer in self.all())

    def dial_no_more(self) -> None:
        """We are about to leave: a link that breaks now stays broken, and nobody is suspected or given up."""
        self._dialling.stop()

    def part_from(self, peer: Peer) -> None:
        """Say farewell behind our answers to a peer, once: a session without a link keeps it for the next one."""
        channel = peer.incoming
        if channel is not None and not peer.parted and (channel.link is not None or channel.unheard()):
            peer.parted = True
            channel.send(GOODBYE, 0, b"")

    def say_goodbye(self, graceful: bool) -> None:
        """Tell every peer that we leave of our own will, and wait until it hangs up; in real seconds, whatever the clock of
        the worker says. If it is graceful, a peer that takes our last answers gets the time that it needs."""
        self.dial_no_more()
        now = time.monotonic()
        waiting: list[tuple[Peer, Channel, Farewell]] = []
        for peer in self.all():
            if peer.gone:
                continue
            for channel in peer.channels():
                answers = not channel.dialled and channel.unheard() > 0
                if graceful and answers and not peer.doubt and peer is not self.me:
                    farewell = Farewell(now, ANSWER_PATIENCE, RETURN_PATIENCE)
                else:
                    farewell = Farewell(now, GOODBYE_PATIENCE, GRACE)
                waiting.append((peer, channel, farewell))
            self.part_from(peer)
            if peer.outgoing.link is not None:
                peer.outgoing.send(GOODBYE, 0, b"")
        pause, end = FIRST_LOOK, float("inf") if graceful else now + GOODBYE_LIMIT
        while waiting and now < end:
            waiting = [each for each in waiting if self._hears(*each, now)]
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK)
                now = time.monotonic()

    def _hears(self, peer: Peer, channel: Channel, farewell: Farewell, now: float) -> bool:
        """Whether a peer may still hear what we have said on a channel."""
        unheard = 0 if channel.dialled else max(channel.unheard() - peer.parted, 0)  # the farewell itself does not count
        return not peer.gone and farewell.waits(channel.link is not None, unheard, now)

    def stop(self, make_error: Callable[[Call], BaseException]) -> None:
        """Fail what waits and close every channel."""
        self.dial_no_more()
        for peer in self.all():
            peer.outgoing.fail_pending(make_error)
            with peer.lock:  # who is welcomed at this moment has a channel before, or none at all
                channels = peer.channels()
            for channel in channels:
                channel.close()
            if peer.sharing is not None:
                peer.sharing.forget()

    def descriptors(self) -> list[socket.socket]:
        """The sockets of all links, to be closed in a forked child."""
        links = [channel.link for peer in self.all() for channel in peer.channels()]
        return [link.sock for link in links if link is not None]
