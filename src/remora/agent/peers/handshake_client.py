"""Proves to a peer that it dials who this worker is: connects, shakes hands, hands over a link."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from remora.agent.channel.channel import Channel
from remora.errors import AuthenticationError, ProtocolError
from remora.faults.worker_faults import WorkerFaults
from remora.options import Settings
from remora.protocol.handshake import Home, Identity, Initiator, Why
from remora.protocol.member_rules import OwnTime
from remora.rendezvous.record import WorkerRecord
from remora.transport import sockets, tcp_info
from remora.transport.addresses import Address, host_identity, is_loopback
from remora.transport.link import StreamLink
from remora.vocabulary.ids import WorkerInfo

CHUNK = 4096
SOON = 1.0  # seconds
GLANCES = 4  # how often who waits for an answer to a handshake looks at the clock before its time is over


class PeerRefused(ConnectionRefusedError):
    """Another process listens there, not our peer."""


class GivenUp(PeerRefused):
    """Our peer listens there, and does not talk to us: it gave us up, or it is leaving."""


class PeerLeaving(GivenUp):
    """Our peer listens there, and says that it is leaving."""


class PeerSilent(OSError):
    """The host is there and took the connection, but the worker says nothing that it proves: it is busy, frozen, or a
    stranger answers in its place."""


class LocalTrouble(OSError):
    """This process could not make a connection: it lacks descriptors, memory, ports or the name service. The peer may be
    perfectly well."""


_ADVICE = {
    errno.EMFILE: "this process has no file descriptors left. Close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "this host has no file descriptors left. Raise fs.file-max",
    errno.ENOMEM: "there is no memory for a connection",
    errno.ENOBUFS: "there is no memory for a connection",
    errno.ENOSPC: "the poller can watch no more connections. Raise fs.epoll.max_user_watches",
    errno.EADDRNOTAVAIL: "this host has no ports left. Widen net.ipv4.ip_local_port_range",
}


def is_local(error: OSError) -> bool:
    """Return True if an error says something of this process and its host, and nothing of the peer."""
    return isinstance(error, socket.gaierror) or error.errno in _ADVICE


def _judge_refusal(machine: Initiator, error: Exception, known: bool) -> None:
    """Raise what a refused handshake says of the peer; return if it says nothing but that this call cannot be made.

    Only a proven answer counts. A peer with our secret seals what it says of itself (that it leaves, that it was restarted),
    so an unproven answer of that kind is not from it; nor is any unproven answer where it has proven itself before. A
    stranger may have sent it, at the peer's address or on the path: the peer is as good as silent, and is tried again.
    """
    if not machine.proven:
        if known or machine.why in (Why.ADMISSION, Why.LEAVING, Why.RESTARTED, Why.WORKER):
            raise PeerSilent(f"an answer that proves nothing: {error}") from error
    elif machine.why is Why.LEAVING:
        raise PeerLeaving(str(error)) from error
    elif machine.why is Why.ADMISSION:
        raise GivenUp(str(error)) from error
    elif machine.why in (Why.RESTARTED, Why.WORKER) or (known and machine.why is Why.GROUP):
        raise PeerRefused(str(error)) from error


class HandshakeClient:
    """This worker's identity and the group's secret."""

    def __init__(
        self,
        me: WorkerInfo,
        incarnation: str,
        settings: Settings,
        secret: bytes,
        secret_is_of_user: bool,
        faults: WorkerFaults,
    ) -> None:
        self.me = me
        self.incarnation = incarnation
        self._host = host_identity()  # now: it is read from files, which needs descriptors
        self.secret = secret
        self.secret_is_of_user = secret_is_of_user  # it was made for this user of this host: no other user has it
        self.insecure = settings.insecure
        self.group = ""  # known when we have joined
        self.refused = ""  # why a caller was refused, the last time
        self.home = Home()  # where we listen, so that a worker we call can call back
        self.own_time = OwnTime()  # for how long this worker has been running
        self._faults = faults
        self._settings = settings
        self._lock = threading.RLock()  # guards: _dialled and _stopped
        self._dialled: set[socket.socket] = set()  # not yet links
        self._stopped = False

    def joined(self, group: str, home: Home) -> None:
        """Note the group that we are a member of from now on, and where we listen."""
        self.group = group
        self.home = home

    @property
    def identity(self) -> Identity:
        return Identity(self.me.name, self.me.id, self.incarnation, self.group)

    def to(
        self, record: WorkerRecord, channel: Channel, until: float, takes_long: Callable[[], None] = lambda: None
    ) -> tuple[StreamLink, int, bytes]:
        """Dial a peer: (link, how many of our messages it has, bytes that came behind the handshake).

        Its host has until the given time to take the connection, and then the worker `connect_timeout` to answer.
        ConnectionRefusedError means that nothing listens at any of its addresses, PeerSilent that something does and does
        not answer; other OSErrors may pass. `takes_long` is called when the worker does not answer soon.
        """
        problems: list[OSError] = []
        found = self._reachable(record)
        if not found and record.addresses:
            listens = ", ".join(record.addresses)
            raise PeerRefused(f"no address of {record.name} works from here: it listens at {listens}, on another host")
        if self._faults.bar(record.name):
            raise OSError(f"cannot connect to {record.name}: a fault plan cut the link")
        for address in found:
            try:
                return self._through(address, record, channel, until, takes_long)
            except PeerRefused:
                raise
            except OSError as error:
                if is_local(error):
                    why = _ADVICE.get(error.errno or 0, f"the address cannot be looked up ({error})")
                    text = f"cannot connect to {record.name} at {address}: {why}; {record.name} is not to blame"
                    raise LocalTrouble(text) from error
                problems.append(type(error)(f"{address}: {error or type(error).__name__}"))
        text = f"cannot connect to {record.name} at "
        text += "; ".join(map(str, problems)) or "any address: it has none we can use"
        if any(isinstance(each, PeerSilent) for each in problems):
            raise PeerSilent(text)
        gone = all(isinstance(each, (ConnectionRefusedError, FileNotFoundError)) for each in problems)
        raise ConnectionRefusedError(text) if gone else OSError(text)

    def is_gone(self, record: WorkerRecord) -> bool:
        """Return True if that worker is to be taken for dead: at none of its addresses a connection can be made in
        time."""
        return not record.addresses or self._none_listens(record, self._settings.reconnect_timeout, or_reachable=True)

    def has_ended(self, record: WorkerRecord) -> bool:
        """Return True if that worker is dead for certain: nothing listens where it did. It is not if the network does
        not say so soon."""
        return self._none_listens(record, SOON, or_reachable=False)

    def _none_listens(self, record: WorkerRecord, seconds: float, or_reachable: bool) -> bool:
        """Return True if nothing listens at the addresses of a worker; with `or_reachable`, or its host does not answer."""
        found = self._reachable(record)
        for address in found:
            try:
                sockets.connect(address, seconds).close()
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as error:
                if or_reachable and address.kind == "tcp" and not is_local(error):
                    continue
            return False
        return bool(found)

    def is_here(self, record: WorkerRecord) -> bool:
        return record.host == self._host

    def _reachable(self, record: WorkerRecord) -> list[Address]:
        """The peer's addresses that may work from here, best first."""
        same_host = self.is_here(record)
        found = [Address.parse(text) for text in record.addresses]
        # Loopback of another host leads to our own, where another program may listen, or none.
        usable = [each for each in found if same_host or (each.kind == "tcp" and not is_loopback(each.host))]
        wanted = self._settings.transports
        if wanted:
            usable = sorted((a for a in usable if a.kind in wanted), key=lambda a: wanted.index(a.kind))
        return [address for address in usable if address.kind != "inproc" or sockets.listens_inproc(address.path)]

    def _through(
        self, address: Address, record: WorkerRecord, channel: Channel, until: float, takes_long: Callable[[], None]
    ) -> tuple[StreamLink, int, bytes]:
        with self._interruptible() as note:
            sock = self._connect(address, min(until - self._settings.clock.now(), self._settings.connect_timeout), note)
            try:
                machine = Initiator(
                    self.identity,
                    channel.session_id,
                    channel.session.received,
                    self.secret,
                    expected=Identity(record.name, record.id, record.incarnation, self.group),
                    insecure=self.insecure,
                    home=self.home,
                )
                self._shake(sock, machine, channel.ever_connected, takes_long)
                accepted = machine.result
                assert accepted is not None
                name, settings = f"{record.name} ({address})", self._settings
                link = StreamLink(sock, name, settings.reconnect_timeout, settings.clock)
                return link, accepted.received, machine.leftover
            except BaseException as error:
                sock.close()
                if isinstance(error, (ConnectionResetError, BrokenPipeError)):
                    # Its process, or its kernel, answers. If it has ended, no socket listens the next time.
                    raise PeerSilent(str(error)) from error
                raise

    def _connect(self, address: Address, seconds: float, note: Callable[[socket.socket], None]) -> socket.socket:
        try:
            return sockets.connect(address, max(seconds, 0.01), note)
        except (TimeoutError, BlockingIOError) as error:
            if address.kind == "tcp":
                raise
            raise PeerSilent("its listen backlog is full") from error  # (of a Unix socket: nothing can be cut there)

    @contextmanager
    def _interruptible(self) -> Iterator[Callable[[socket.socket], None]]:
        """Inside, `stop` ends the waits of the socket that is shown to what this yields."""
        noted: list[socket.socket] = []

        def note(sock: socket.socket) -> None:
            with self._lock:
                if self._stopped:
                    raise ConnectionAbortedError("this worker is shutting down")
                self._dialled.add(sock)
                noted.append(sock)

        try:
            yield note
        finally:
            with self._lock:
                self._dialled.difference_update(noted)

    def stop(self) -> None:
        """End every attempt to dial, and make no more."""
        with self._lock:
            self._stopped = True
            dialled = list(self._dialled)
        for sock in dialled:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _shake(self, sock: socket.socket, machine: Initiator, known: bool, takes_long: Callable[[], None]) -> None:
        """Shake hands. `known`: the peer has proven itself on an earlier connection of this session."""
        glance = min(self._settings.silence_limit, self._settings.connect_timeout) / GLANCES
        sock.settimeout(min(SOON, glance))
        started = self._settings.clock.now()
        sock.sendall(machine.start())
        while machine.result is None:
            try:
                data = sock.recv(CHUNK)
            except TimeoutError:
                sock.settimeout(glance)
                self._go_on_waiting(sock, started, takes_long)
                continue
            if not data:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            try:
                answer = machine.receive(data)
            except (AuthenticationError, ProtocolError) as error:
                if machine.refusal:
                    sock.sendall(machine.refusal)
                _judge_refusal(machine, error, known)
                raise
            if answer:
                sock.sendall(answer)
            elif machine.result is None:  # a part of a message is no sign of life: a stranger may say one byte now and then
                self._go_on_waiting(sock, started, takes_long)

    def _go_on_waiting(self, sock: socket.socket, started: float, takes_long: Callable[[], None]) -> None:
        """A worker takes long to answer. As long as its host acknowledges what it is sent we stay in line: who begins anew
        is the last again, and a worker with much to do would never come to the end of the line."""
        takes_long()
        waited, settings = self.own_time.since(started, self._settings.clock.now()), self._settings
        if waited > settings.silence_limit or (waited > settings.connect_timeout and tcp_info.unanswered(sock) > 0.0):
            raise PeerSilent(f"no answer for {waited:.0f} s")
