"""Accepts connections. A stranger must prove that it knows the secret before anything else it sends is read.

A stranger gets a bounded time and may send a bounded number of bytes; nothing of theirs is unpickled. Handshakes wait at
the poller like everything else, so that a thousand silent strangers cost no thread. How many wait, and who makes room, is in
`remora.agent.peers.pending_connections`. What strangers cost is bounded, too: few connections are accepted at each
poll, a greeting that is
not whole costs one read, and when strangers have had a quarter of a processor for a moment, they wait for the rest of it.

On a Unix socket, with the secret of this user of this host, the connections of other users are closed before anything is
read: the kernel says whose they are.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from remora.agent.peers.admission import Admission
from remora.agent.peers.handshake_client import CHUNK, HandshakeClient
from remora.agent.peers.pending_connections import BEGUN, GREETED, SILENT, PendingTable
from remora.agent.peers.refusal_log import RefusalLog
from remora.agent.runtime.timers import Timers
from remora.errors import AuthenticationError, ProtocolError
from remora.options import Settings
from remora.protocol.conversation import is_unfinished
from remora.protocol.handshake import Hello, Home, Identity, Refused, Responder
from remora.recorder import Recorder
from remora.rendezvous.record import WorkerRecord
from remora.transport import addresses, sockets
from remora.transport.link import StreamLink
from remora.transport.poller import Poller, Source

try:
    import resource
except ImportError:  # there is none on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("remora")

MAX_STRANGERS = 4096  # or a quarter of the descriptors that this process may have
ACCEPTS = 16  # connections at each poll
READS = 64  # in how many pieces a greeting may come
WINDOW, SHARE = 0.05, 0.25  # of each so many seconds, strangers get this part of a processor


def _most_pending() -> int:
    if resource is None:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_STRANGERS if soft == resource.RLIM_INFINITY else max(min(soft // 4, MAX_STRANGERS), 16)


class Listener:
    """The listening sockets of a worker, and the strangers before them."""

    def __init__(
        self,
        admission: Admission,
        poller: Poller,
        handshake_client: HandshakeClient,
        settings: Settings,
        timers: Timers,
        recorder: Recorder,
    ) -> None:
        self.admission = admission
        self.poller = poller
        self.handshake_client = handshake_client
        self.settings = settings
        self.refusals = RefusalLog(str(handshake_client.me), recorder)
        self._timers = timers
        self._sockets: list[_ListenSocket] = []
        self._room: str | None = None
        self._lock = threading.RLock()  # guards: _pending and _closed
        self._pending: PendingTable[_PendingConnection] = PendingTable(_most_pending())
        self._closed = False
        # What strangers have cost of late. Two threads may count at the same moment: it is a brake, and no account.
        self._window = 0.0
        self._spent = 0.0
        self._resting = False
        self._held: deque[Source] = deque()  # to be armed when the rest is over

    def listen(self, bind_host: str) -> list[str]:
        """Open the sockets; no caller is let in before `open`. The addresses to publish, best first."""
        wanted = self.settings.transports or ("inproc", "unix", "tcp")
        token = f"{self.handshake_client.incarnation}"
        found: list[str] = []
        for kind in wanted:
            if kind == "inproc":
                self._room = token
                found.append(str(sockets.listen_inproc(token, self._let_in)))
            elif kind == "unix":
                try:
                    self._hang(found, *sockets.listen_unix(token))
                except (OSError, AttributeError) as error:  # no Unix sockets here: TCP does it
                    log.info("not listening on a Unix socket: %s", error)
            else:
                sock, bound = sockets.listen_tcp(bind_host, addresses.parse_ports(self.settings.port))
                self._hang(found, sock, replace(bound, host=addresses.advertised_host(bind_host)))
        log.info("%s listens at %s", self.handshake_client.me.name, ", ".join(found))
        return found

    def _hang(self, found: list[str], sock: socket.socket, address: addresses.Address) -> None:
        sock.setblocking(False)
        self._sockets.append(_ListenSocket(self, sock))
        found.append(str(address))

    def open(self) -> None:
        """Let peers in."""
        for listening in self._sockets:
            self.poller.add(listening)
            self.poller.arm(listening)

    def _let_in(self, sock: socket.socket, host: str = "") -> None:
        process = sockets.peer_process(sock)
        if process is not None and self.handshake_client.secret_is_of_user and process[0] not in (os.getuid(), os.geteuid()):
            sock.close()
            self.refusals.refused("another user", f"it is of user {process[0]}, who cannot have the secret of this one")
            return
        connection = _PendingConnection(self, sock, host if process is None else process)
        with self._lock:
            if self._closed:  # it was accepted a moment before
                sock.close()
                return
            crowded_out = self._pending.add(connection)
        self._make_room(crowded_out)
        if connection.begin():  # what it has to say is often there, and then the poller is spared
            self._watch(connection)

    def _watch(self, connection: _PendingConnection) -> None:
        with self._lock:
            if connection not in self._pending:  # the listener was closed meanwhile, or the place was needed
                return
            try:
                self.poller.add(connection)  # here, so that the thread that closes the listener finds it there
            except OSError:
                self._pending.remove(connection)
                connection.sock.close()
                raise
        self.arm(connection)

    def _make_room(self, crowded_out: _PendingConnection | None) -> None:
        if crowded_out is not None:
            self.refusals.count("closed to make room")
            crowded_out.leave()

    def advance(self, connection: _PendingConnection, stage: int) -> None:
        """A stranger has come to another stage of its handshake."""
        with self._lock:
            crowded_out = self._pending.advance(connection, stage)
        self._make_room(crowded_out)

    def greeted(self, connection: _PendingConnection, greeting: bytes) -> None:
        """A stranger has sent a HELLO with a valid seal. One that came before may be a replay, and proves nothing."""
        with self._lock:
            is_new = self._pending.is_new(greeting)
        if is_new or connection.stage == SILENT:
            self.advance(connection, GREETED if is_new else BEGUN)

    def arm(self, source: Source) -> None:
        """Have the poller tell of the next thing that a stranger, or a listening socket, has; after the rest, if there
        is one."""
        if not self._resting:
            self.poller.arm(source)
            return
        self._held.append(source)
        if not self._resting:  # it ended in between
            self._end_rest()

    def account(self, started: float) -> None:
        """A thread has seen to strangers since its processor time was that."""
        now, spent = time.monotonic(), time.thread_time() - started
        if now - self._window > WINDOW:
            self._window, self._spent = now, spent
            return
        self._spent += spent
        if self._spent > SHARE * WINDOW and not self._resting:
            self._resting = True
            self._timers.soon(max(self._window + WINDOW - now, 0.001), self._end_rest)

    def _end_rest(self) -> None:
        self._resting = False
        while self._held:
            try:
                self.poller.arm(self._held.popleft())
            except IndexError:  # another thread took the last one
                return

    def forget(self, connection: _PendingConnection) -> bool:
        """Return True if the stranger was still there."""
        with self._lock:
            if not self._pending.remove(connection):
                return False
        self.poller.remove(connection, connection.fileno())
        return True

    def tick(self, now: float) -> None:
        """Called about twice a second: listen again after a lack of descriptors, and throw out strangers whose time is
        over. A stranger is not to blame if we have not read what it said."""
        self.refusals.tick(now)
        self._end_rest()  # (it has, unless the timer was late)
        for listening in list(self._sockets):
            if listening.at_rest:
                self.poller.arm(listening)
        limit, since = self.settings.connect_timeout, self.handshake_client.own_time.since
        with self._lock:
            late = [each for each in self._pending if since(each.came, now) > limit]
        for connection in late:
            if not connection.has_spoken():
                connection.leave()

    def close(self) -> None:
        """Let no caller in any more."""
        if self._room is not None:
            sockets.close_inproc(self._room)
        for listening in self._sockets:
            self.poller.remove(listening, listening.fileno())
            listening.sock.close()
        self._sockets.clear()
        with self._lock:
            self._closed = True
            connections = list(self._pending)
        for connection in connections:
            connection.leave()

    def descriptors(self) -> list[socket.socket]:
        """Return every socket at the listener, to be closed in a forked child."""
        return [listening.sock for listening in self._sockets] + [connection.sock for connection in list(self._pending)]


class _ListenSocket:
    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self.listener = listener
        self.sock = sock
        self.fileno = sock.fileno
        self.at_rest = False  # we lack descriptors or memory: callers wait in the kernel until the next tick

    def ready(self, events: int) -> None:
        started = time.thread_time()
        try:
            for _ in range(ACCEPTS):  # not all that are there: others have something to say as well
                sock, address = self.sock.accept()
                self.listener._let_in(sock, address[0] if isinstance(address, tuple) else "")
                self.at_rest = False
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            if self.sock.fileno() < 0:  # closed
                return
            if not self.at_rest:
                log.warning("cannot accept connections for now (they wait): %s", error)
            self.at_rest = True
            return  # else the poller would say at once that there is a caller
        self.listener.account(started)
        self.listener.arm(self)


class _PendingConnection:
    """A connection that has not proven itself yet."""

    __slots__ = ("_buffer", "_fd", "_reads", "_turn", "came", "listener", "machine", "sock", "source", "stage")

    def __init__(self, listener: Listener, sock: socket.socket, source: Hashable) -> None:
        self.listener = listener
        self.sock = sock
        self.source = source
        self.stage = SILENT
        self.came = listener.settings.clock.now()
        self.machine: Responder | None = None  # made when the first message is whole
        self._fd = sock.fileno()
        self._buffer = b""  # of the first message
        self._reads = 0
        self._turn = threading.Lock()  # guards: the handshake; one thread at a time takes part in it
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._fd

    def has_spoken(self) -> bool:
        """Return True if it has said something that we have not read."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:  # it has not, or it is gone
            return False

    def begin(self) -> bool:
        """Hear what it has to say at once. Whether more is to come."""
        with self._turn:
            return self._listen()

    def ready(self, events: int) -> None:
        started = time.thread_time()
        with self._turn:
            goes_on = (self.machine is None or self.machine.result is None) and self._listen()
        self.listener.account(started)
        if goes_on:
            self.listener.arm(self)

    def _listen(self) -> bool:
        """Read once. Whether more is to come."""
        try:
            data = self.sock.recv(CHUNK)
            if not data:
                self.leave()
                return False
            answer = self._hear(data)
            if answer:
                self.sock.sendall(answer)
        except (BlockingIOError, InterruptedError):
            return True
        except (AuthenticationError, ProtocolError) as error:
            assert self.machine is not None
            assert self.machine.why is not None
            self.listener.refusals.refused(self.machine.why.value, str(error))
            self.listener.handshake_client.refused = str(error)
            self._refuse(self.machine)
            return False
        except OSError:
            self.leave()
            return False
        if self.machine is None or self.machine.result is None:
            return True
        self._enter(self.machine)
        return False

    def _hear(self, data: bytes) -> bytes:
        if self.machine is None:
            self._buffer += data
            self._reads += 1
            if is_unfinished(self._buffer) and self._reads <= READS:
                if self.stage == SILENT:
                    self.listener.advance(self, BEGUN)
                return b""
            data, self._buffer = self._buffer, b""
            self.machine = self._make_machine()
        had_greeted = bool(self.machine.greeting)
        answer = self.machine.receive(data)
        if self._reads > READS:
            raise ConnectionAbortedError("its greeting came in too many pieces")
        if self.machine.greeting and not had_greeted:
            self.listener.greeted(self, self.machine.greeting)
        return answer

    def _make_machine(self) -> Responder:
        handshake_client = self.listener.handshake_client
        # Not a method of ours: what has left is gone without the collector.
        authorize = partial(_authorize, self.listener.admission)
        return Responder(handshake_client.identity, authorize, handshake_client.secret, insecure=handshake_client.insecure)

    def _refuse(self, machine: Responder) -> None:
        try:
            if machine.refusal:
                self.sock.send(machine.refusal)
        except OSError:
            pass
        self.leave()

    def _enter(self, machine: Responder) -> None:
        accepted = machine.result
        assert accepted is not None
        if not self.listener.forget(self):
            return
        settings = self.listener.settings
        record = _record(accepted.peer, accepted.home)
        try:
            link = StreamLink(self.sock, f"{accepted.peer.name} (caller)", settings.reconnect_timeout, settings.clock)
            self.listener.admission.attach_incoming(record, accepted.session, link, accepted.received, machine.leftover)
        except OSError as error:  # we lack descriptors or memory for it, or it has hung up: it will come again
            log.warning("cannot use a connection of %s: %s", accepted.peer.name, error)
            self.sock.close()

    def leave(self) -> None:
        """Close the connection, unless it has become a link."""
        if self.listener.forget(self):
            self.sock.close()


def _authorize(admission: Admission, hello: Hello) -> int | Refused:
    return admission.authorize(_record(hello.peer, hello.home), hello.session)


def _record(caller: Identity, home: Home) -> WorkerRecord:
    """Return what a caller says of itself: enough to call it back, whatever the rendezvous knows."""
    return WorkerRecord(caller.name, caller.id, caller.incarnation, home.host, home.addresses, {})
