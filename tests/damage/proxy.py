"""A man in the middle of every connection that this process makes, on whatever road: sees each unit, and may damage one.

`installed()` replaces `sockets.connect`. A connection to a TCP or Unix address then leads to a socket of the same
family here,
and from there on to the address; one inside the process leads through a second pair of sockets. So the two workers have real
sockets of their road, and the proxy has the bytes of the handshake, too.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from remora.transport import sockets
from remora.transport.addresses import Address
from tests.damage.units import Cutter, Unit

CHUNK = 1 << 18
OUT, BACK = "out", "back"  # from the worker that dialled, and to it

PeerEvents = Callable[[str, Unit, Sequence[Unit]], bytes]
"""What arrives in the place of a unit, given where it goes and what came there before it on this connection."""


def pass_on(direction: str, unit: Unit, before: Sequence[Unit]) -> bytes:
    """Nothing is damaged."""
    return unit.data


@dataclass(eq=False)
class Proxy:
    """What sits in the middle. `judge` is asked about each unit and may be replaced at any time."""

    judge: PeerEvents = pass_on
    record: list[tuple[str, Unit]] | None = None  # everything that passes, while this is a list
    _threads: list[threading.Thread] = field(default_factory=list)
    _sockets: set[socket.socket] = field(default_factory=set)
    _connect: Callable[..., socket.socket] = sockets.connect
    closed: bool = False

    def connect(
        self, address: Address, timeout: float, opened: Callable[[socket.socket], None] = lambda _: None
    ) -> socket.socket:
        """In the place of `sockets.connect`."""
        far = self._connect(address, timeout)
        try:
            near, ours = _pair(address.kind, opened)
        except BaseException:
            far.close()
            raise
        for sock in (far, near):
            sock.settimeout(None)
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets |= {far, near}
        ended: list[str] = []
        for source, target, direction in ((near, far, OUT), (far, near, BACK)):
            thread = threading.Thread(
                target=self._carry, args=(source, target, direction, ended), name="damage-proxy", daemon=True
            )
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()
        return ours

    def _carry(self, source: socket.socket, target: socket.socket, direction: str, ended: list[str]) -> None:
        cutter = Cutter()
        before: list[Unit] = []
        try:
            while data := source.recv(CHUNK):
                for unit in cutter.feed(data):
                    record = self.record
                    if record is not None:
                        record.append((direction, unit))
                    said = self.judge(direction, unit, before)
                    if len(unit.data) < CHUNK:
                        before.append(unit)
                        del before[:-8]
                    if said:
                        target.sendall(said)
                    if len(said) < len(unit.data):
                        raise ConnectionError("bytes are lost")  # a stream delivers all of them, or it breaks
            target.shutdown(socket.SHUT_WR)
        except OSError:
            _end(source, target)
        ended.append(direction)
        if len(ended) == 2:  # (both may see that: to close twice does no harm)
            for sock in (source, target):
                self._sockets.discard(sock)
                sock.close()

    def close(self) -> None:
        """End all connections and threads."""
        self.closed = True
        for sock in list(self._sockets):
            _end(sock)
        for thread in self._threads:
            thread.join(10.0)
        for sock in list(self._sockets):
            sock.close()


def _end(*sockets: socket.socket) -> None:
    for sock in sockets:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _pair(kind: str, opened: Callable[[socket.socket], None]) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of a road: the proxy's, and the worker's."""
    if kind == "inproc":
        near, ours = socket.socketpair()
        opened(ours)
        return near, ours
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        place = f"\0damage-{os.getpid()}-{secrets.token_hex(8)}" if kind == "unix" else ("127.0.0.1", 0)
        listening.bind(place)
        listening.listen(1)
        ours = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened(ours)
            ours.connect(listening.getsockname())
        except BaseException:
            ours.close()
            raise
        return listening.accept()[0], ours


@contextmanager
def installed() -> Iterator[Proxy]:
    """Inside, every connection that is made passes the proxy."""
    proxy = Proxy()
    with mock.patch.object(sockets, "connect", proxy.connect):
        try:
            yield proxy
        finally:
            proxy.close()
