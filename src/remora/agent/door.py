"""Where peers come in: listening sockets, and strangers who must prove themselves before anything they send is read.

A stranger gets a bounded time and may send a bounded number of bytes; nothing of theirs is unpickled. Handshakes wait at
the poller like everything else, so that a thousand silent strangers cost no thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from remora.agent.introduction import CHUNK, Introduction
from remora.errors import AuthenticationError, ProtocolError
from remora.options import Settings
from remora.protocol.handshake import Hello, Home, Identity, Listener
from remora.rendezvous.record import WorkerRecord
from remora.transport import addresses, dial
from remora.transport.poller import Poller
from remora.transport.stream import StreamLink

if TYPE_CHECKING:
    from remora.agent.peers import Peers

log = logging.getLogger("remora")

MAX_STRANGERS = 256


class Door:
    """The listening sockets of a worker, and the strangers before them."""

    def __init__(self, peers: Peers, poller: Poller, introduction: Introduction, settings: Settings) -> None:
        self.peers = peers
        self.poller = poller
        self.introduction = introduction
        self.settings = settings
        self._bells: list[_Bell] = []
        self._room: str | None = None
        self._lock = threading.RLock()  # guards _strangers and _closed
        self._strangers: dict[_Stranger, None] = {}  # in the order in which they came
        self._closed = False

    def listen(self, bind_host: str) -> list[str]:
        """Open the sockets; nobody is let in before `open`. The addresses to publish, best first."""
        wanted = self.settings.transports or ("inproc", "unix", "tcp")
        token = f"{self.introduction.incarnation}"
        found: list[str] = []
        for kind in wanted:
            if kind == "inproc":
                self._room = token
                found.append(str(dial.listen_inproc(token, self._let_in)))
            elif kind == "unix":
                try:
                    self._hang(found, *dial.listen_unix(token))
                except (OSError, AttributeError) as error:  # no Unix sockets here: TCP does it
                    log.info("not listening on a Unix socket: %s", error)
            else:
                sock, bound = dial.listen_tcp(bind_host, addresses.parse_ports(self.settings.port))
                self._hang(found, sock, replace(bound, host=addresses.advertised_host(bind_host)))
        log.info("%s listens at %s", self.introduction.me.name, ", ".join(found))
        return found

    def _hang(self, found: list[str], sock: socket.socket, address: addresses.Address) -> None:
        sock.setblocking(False)
        self._bells.append(_Bell(self, sock))
        found.append(str(address))

    def open(self) -> None:
        """Let peers in."""
        for bell in self._bells:
            self.poller.add(bell)
            self.poller.arm(bell)

    def _let_in(self, sock: socket.socket) -> None:
        stranger = _Stranger(self, sock)
        with self._lock:
            if self._closed:  # it was accepted a moment before
                sock.close()
                return
            try:
                self.poller.add(stranger)  # here, so that the thread that closes the door finds it there
            except OSError:
                sock.close()
                raise
            crowd = list(islice(self._strangers, max(len(self._strangers) - MAX_STRANGERS + 1, 0)))
            self._strangers[stranger] = None
        for oldest in crowd:  # whoever proves itself quickly gets in, however many stand there in silence
            oldest.leave()
        self.poller.arm(stranger)

    def forget(self, stranger: _Stranger) -> bool:
        """Whether the stranger was still there."""
        with self._lock:
            if stranger not in self._strangers:
                return False
            del self._strangers[stranger]
        self.poller.remove(stranger, stranger.fileno())
        return True

    def tick(self, now: float) -> None:
        """Called about twice a second: listen again after a lack of descriptors, and throw out strangers whose time is
        over. A stranger is not to blame if we have not read what it said."""
        for bell in list(self._bells):
            bell.tick()
        limit, since = self.settings.connect_timeout, self.introduction.own_time.since
        with self._lock:
            late = list(takewhile(lambda each: since(each.came, now) > limit, self._strangers))
        for stranger in late:
            if not stranger.has_spoken():
                stranger.leave()

    def close(self) -> None:
        """Nobody comes in any more."""
        if self._room is not None:
            dial.close_inproc(self._room)
        for bell in self._bells:
            self.poller.remove(bell, bell.fileno())
            bell.sock.close()
        self._bells.clear()
        with self._lock:
            self._closed = True
            strangers = list(self._strangers)
        for stranger in strangers:
            stranger.leave()

    def descriptors(self) -> list[socket.socket]:
        """Every socket at the door, to be closed in a forked child."""
        return [bell.sock for bell in self._bells] + [stranger.sock for stranger in list(self._strangers)]


class _Bell:
    """A listening socket."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self.door = door
        self.sock = sock
        self._at_rest = False  # we lack descriptors or memory: callers wait in the kernel until the next tick

    def fileno(self) -> int:
        return self.sock.fileno()

    def tick(self) -> None:
        """Try again."""
        if self._at_rest:
            self.door.poller.arm(self)

    def ready(self, events: int) -> None:
        try:
            while True:
                sock, _ = self.sock.accept()
                self.door._let_in(sock)
                self._at_rest = False
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            if self.sock.fileno() < 0:  # closed
                return
            if not self._at_rest:
                log.warning("cannot accept connections for now (they wait): %s", error)
            self._at_rest = True
            return  # else the poller would say at once that there is a caller
        self.door.poller.arm(self)


class _Stranger:
    """A connection that has not proven itself yet."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self.door = door
        self.sock = sock
        self._fd = sock.fileno()
        self.came = door.settings.clock.now()
        self._turn = threading.Lock()  # one thread at a time listens to it
        sock.setblocking(False)
        introduction = door.introduction
        admit = partial(_admit, door.peers)  # not a method of ours: what has left is gone at once, without the collector
        self.machine = Listener(introduction.identity, admit, introduction.secret, insecure=introduction.insecure)

    def fileno(self) -> int:
        return self._fd

    def has_spoken(self) -> bool:
        """Whether it has said something that we have not read."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:  # it has not, or it is gone
            return False

    def ready(self, events: int) -> None:
        with self._turn:
            if self.machine.result is None:
                self._listen()

    def _listen(self) -> None:
        try:
            data = self.sock.recv(CHUNK)
            if not data:
                self.leave()
                return
            answer = self.machine.receive(data)
            if answer:
                self.sock.sendall(answer)
        except (BlockingIOError, InterruptedError):
            pass
        except (AuthenticationError, ProtocolError) as error:
            log.warning("%s refused a connection: %s", self.door.introduction.me, error)
            self.door.introduction.refused = str(error)
            self._refuse()
            return
        except OSError:
            self.leave()
            return
        if self.machine.result is None:
            self.door.poller.arm(self)
        else:
            self._enter()

    def _refuse(self) -> None:
        try:
            if self.machine.refusal:
                self.sock.send(self.machine.refusal)
        except OSError:
            pass
        self.leave()

    def _enter(self) -> None:
        accepted = self.machine.result
        assert accepted is not None
        if not self.door.forget(self):
            return
        settings = self.door.settings
        record = _record(accepted.peer, accepted.home)
        try:
            link = StreamLink(self.sock, f"{accepted.peer.name} (caller)", settings.reconnect_timeout, settings.clock)
            self.door.peers.welcome(record, accepted.session, link, accepted.received, self.machine.leftover)
        except OSError as error:  # we lack descriptors or memory for it, or it has hung up: it will come again
            log.warning("cannot use a connection of %s: %s", accepted.peer.name, error)
            self.sock.close()

    def leave(self) -> None:
        """Close the connection, unless it has become a link."""
        if self.door.forget(self):
            self.sock.close()


def _admit(peers: Peers, hello: Hello) -> int | str:
    return peers.admit(_record(hello.peer, hello.home), hello.session)


def _record(caller: Identity, home: Home) -> WorkerRecord:
    """What a caller says of itself: enough to call it back, whatever the rendezvous knows."""
    return WorkerRecord(caller.name, caller.id, caller.incarnation, home.host, home.addresses, {})
