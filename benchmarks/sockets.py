"""Raw sockets and a Python process at the other end, for the floors; imports nothing large, so that it starts at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

END_TIMEOUT = 10.0

Pair = tuple[socket.socket, socket.socket]


@contextmanager
def partner(kind: str, way: str, size: int) -> Iterator[Callable[[], None]]:
    """A process that sends back what it gets, `size` bytes at a time; yields a function that does this once with it."""
    ours, theirs = PAIRS[kind]()
    code = f"from benchmarks.sockets import echo_all; echo_all({theirs.fileno()}, {way!r}, {size})"
    with ours, theirs, subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            yield _exchanger(ours, way, size)
            ours.shutdown(socket.SHUT_WR)
            process.wait(END_TIMEOUT)
        finally:
            process.kill()


def _exchanger(link: socket.socket, way: str, size: int) -> Callable[[], None]:
    buffer, receive = memoryview(bytearray(size)), WAYS[way]

    def exchange() -> None:
        link.sendall(buffer)
        receive(link, buffer)

    return exchange


def echo_all(descriptor: int, way: str, size: int) -> None:
    """The life of the partner."""
    buffer, receive = memoryview(bytearray(size)), WAYS[way]
    with socket.socket(fileno=descriptor) as link:
        while receive(link, buffer):
            link.sendall(buffer)


def unix_pair() -> Pair:
    return socket.socketpair()


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for link in (ours, theirs):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def receive_blocking(link: socket.socket, buffer: memoryview) -> int:
    """Fill the buffer; 0 when the other end has closed."""
    filled = 0
    while filled < len(buffer):
        received = link.recv_into(buffer[filled:])
        if not received:
            return 0
        filled += received
    return filled


def receive_polling(link: socket.socket, buffer: memoryview) -> int:
    """The same for a few bytes, never sleeping: no process has to be woken up, and both burn a core."""
    while True:
        try:
            return link.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass


PAIRS: dict[str, Callable[[], Pair]] = {"Unix": unix_pair, "TCP": tcp_pair}
WAYS: dict[str, Callable[[socket.socket, memoryview], int]] = {"blocking": receive_blocking, "polling": receive_polling}
