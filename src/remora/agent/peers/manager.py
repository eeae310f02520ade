"""The other workers of a group. This file makes peers and their channels, and passes on what the channels report.

A broken connection is restored in silence (`remora.agent.peers.connector`). A peer is given up
(`remora.agent.peers.lifecycle`) when that fails, when its process or its host is gone, or when it is silent for too long
(`remora.agent.peers.failure_detector`). The table remembers it for a while, so that calls to it can say what became of it.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial

from remora.agent.calls.call import NEVER, Call
from remora.agent.channel.channel import Channel
from remora.agent.channel.function_table import LONGEST
from remora.agent.hooks import Hooks
from remora.agent.memory.device import tidy
from remora.agent.memory.routing import DeviceRouting
from remora.agent.memory.shared import SharedMemory
from remora.agent.peers.connector import LEFT, Connector
from remora.agent.peers.failure_detector import FailureDetector, HostSilent
from remora.agent.peers.farewells import Farewells
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.lifecycle import PeerLifecycle
from remora.agent.peers.membership_events import MembershipEvents
from remora.agent.peers.peer import Peer
from remora.agent.peers.peer_table import PeerTable
from remora.agent.runtime.timers import Timers
from remora.agent.serving.dispatch import Dispatch
from remora.devices import streams
from remora.errors import CallOutcomeUnknown, ProtocolError
from remora.faults.worker_faults import WorkerFaults
from remora.options import Settings
from remora.protocol.member_rules import Joined
from remora.recorder import DISCONNECTED, JOINED, Recorder
from remora.rendezvous.record import WorkerRecord
from remora.transport.link import keep_alive_limit
from remora.transport.poller import Poller
from remora.vocabulary.messages import MESSAGES, MessageType
from remora.wire.frames import Frame
from remora.wire.message_codec import BEGUN

log = logging.getLogger("remora")

GRACE = 0.25  # seconds in which a caller whose link broke may come back before we look whether it lives

__all__ = ["Peer", "PeerManager"]


class PeerManager:
    """All peers of one worker: the table, what changes it, and what comes of it."""

    def __init__(
        self,
        poller: Poller,
        timers: Timers,
        dispatch: Dispatch,
        recorder: Recorder,
        settings: Settings,
        handshake_client: HandshakeClient,
        device_routing: DeviceRouting,
        faults: WorkerFaults,
        hooks: Hooks,
    ) -> None:
        self._pool = pool = dispatch.pool
        self._poller = poller
        self._timers = timers
        self.dispatch = dispatch
        self.recorder = recorder
        self.my_name = dispatch.me.name
        self.request = dispatch.request
        self.served_until = dispatch.served_until
        self._settings = settings
        self.clock = settings.clock
        self.arrive = hooks.arrived
        self.events = MembershipEvents(pool)
        now = settings.clock.now
        self.shared_memory = SharedMemory(settings.shared_memory, settings.device_memory, now, pool.submit_final)
        self.device_routing = device_routing
        self.faults = faults
        self.table = table = PeerTable()
        self.lifecycle = lifecycle = PeerLifecycle(table, dispatch, self.events, recorder)
        self.connector = connector = Connector(lifecycle, handshake_client, pool, settings)
        self.failure_detector = FailureDetector(connector, hooks.spread_loss)
        self.farewells = Farewells(connector)
        # What every layer above asks for.
        self.find, self.all, self.by_key = table.find, table.all, table.by_key
        self.known, self.of_id, self.by_name = table.known, table.of_id, table.by_name
        self.declare_gone, self.on_gone = lifecycle.declare_gone, lifecycle.on_gone
        self.connect, self.probe = connector.connect, connector.probe

    @property
    def me(self) -> Peer:
        return self.table.me

    # Who is there.

    def add(self, record: WorkerRecord) -> Peer:
        """Know a worker. A worker that comes back under the same name is a new one: the old one is given up."""
        peer, predecessor, is_new = self.table.enter(record, lambda: Peer(record, self))
        if predecessor is not None:
            self.declare_gone(predecessor, "another worker of the same name took its place")
        if is_new:
            self.recorder.note(JOINED, peer.name)
            self.events.publish(Joined(peer.info))
        return peer

    def add_me(self, record: WorkerRecord) -> None:
        """Know this worker as its own peer."""
        self.table.me = self.add(record)

    def make_channel(self, peer: Peer, session_id: str, dialled: bool) -> Channel:
        """Make a channel for one direction of talking with a peer."""
        return Channel(peer.name, session_id, dialled, peer, self._pool, self._poller, peer.shared_memory)

    def add_unless_known(self, record: WorkerRecord) -> None:
        """Know a worker that a peer mentions; what we know of its name already is not changed by hearsay."""
        if record.name not in self.by_name:
            self.add(record)

    # What channels tell us.

    def control_message(self, peer: Peer, channel: Channel, frame: Frame) -> None:
        """A peer says something that wants no answer."""
        if frame.kind == MessageType.CANCEL:
            self.dispatch.cancel(channel, frame.call)
        elif frame.kind == MessageType.GIVE_BACK:
            peer.shared_memory.take_back(frame.body)
        elif frame.kind == MessageType.FUNCTION:
            channel.heard.listen(frame.call, bytes(frame.body[: LONGEST + 1]))
        elif frame.kind == MessageType.PROGRESS:
            waiting = channel.pending.get(frame.call)
            if waiting is not None:
                waiting.progress = frame.body == BEGUN, self.clock.now()
        elif frame.kind == MessageType.GOODBYE:
            self._pool.submit_system(partial(self.farewells.hear, peer, channel.dialled))
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
        elif frame.kind not in MESSAGES:
            raise ValueError(f"{peer.name} sent a message of the unknown type {frame.kind:#x}")  # (which is logged)

    def lost(self, peer: Peer, channel: Channel, error: BaseException) -> None:
        """The link of a channel broke."""
        if peer.gone or self.connector.stopping.is_set():
            return
        self.recorder.note(DISCONNECTED, peer.name, str(error))
        log.debug("link with %s broke: %s", peer.name, error)
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT and peer.unreachable_since is None:
            # The link was at rest: its kernel says so.
            self.failure_detector.host_is_silent(peer, keep_alive_limit(self._settings.reconnect_timeout))
        if isinstance(error, ProtocolError):
            self.declare_gone(peer, str(error))
        elif channel.dialled and peer.leaving and not channel.pending:
            self.declare_gone(peer, LEFT, "left")
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
        away = self.connector.own_time.since(channel.lost_at, self.clock.now())
        if channel.link is None and peer.incoming is channel and away >= self._settings.silence_limit - 0.01:
            channel.close()
            self.dispatch.forget(channel)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.at(self.clock.now() + seconds, lambda: self._pool.submit_system(action))

    # Now and then, and in the end.

    def tick(self, now: float) -> None:
        """Look after peers and their memory. Called about twice a second."""
        self.failure_detector.tick(now)
        peers = self.all()
        shared = [peer.shared_memory for peer in peers]
        self.shared_memory.tick(now, shared)
        if streams.watched:
            self._pool.submit_system(partial(tidy, [each.device_exchange for each in shared], now))
        for peer in peers:
            if peer.shared_memory.unused:
                self._pool.call_soon(peer.give_back)

    def due(self, before: float) -> Iterable[tuple[Channel, Call]]:
        """Yield asynchronous calls whose deadline comes before the given time."""
        for peer in self.all():
            for call in list(peer.outgoing.pending.values()):
                if call.asynchronous and call.deadline != NEVER and call.deadline < before:
                    yield peer.outgoing, call

    def watch_all(self) -> None:
        """Look for every reply that is due, also for those of low priority."""
        for peer in self.all():
            if peer.outgoing.waiter_owned:
                peer.outgoing.give_back_to_poller()
            peer.outgoing.watch()

    def active_calls(self) -> int:
        """Return the number of our calls that wait for an answer."""
        return sum(len(peer.outgoing.pending) for peer in self.all())

    def stop(self, make_error: Callable[[Call], BaseException]) -> None:
        """Fail what waits and close every channel."""
        self.connector.stop()
        for peer in self.all():
            peer.outgoing.fail_pending(make_error)
            with peer.lock:  # who is welcomed at this moment has a channel before, or none at all
                channels = peer.channels()
            for channel in channels:
                channel.close()
            peer.outgoing.fail_pending(make_error)  # a call may have been put on the list before the channel was closed
            peer.shared_memory.forget()

    def descriptors(self) -> list[socket.socket]:
        """Return the sockets of all links, to be closed in a forked child."""
        links = [channel.link for peer in self.all() for channel in peer.channels()]
        return [link.sock for link in links if link is not None]
