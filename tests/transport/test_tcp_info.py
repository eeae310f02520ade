"""What the kernel says of the other end. That it says the right thing of a host that is cut off is tested with real cuts,
in `tests/processes/test_detection.py`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from remora.transport import tcp_info


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def test_a_host_that_acknowledges_is_there_whatever_its_process_does(pair: tuple[socket.socket, socket.socket]) -> None:
    """Nobody reads at the other end, until its buffers are full and its kernel says so, again and again."""
    ours, _ = pair
    assert tcp_info.unanswered(ours) == 0.0
    fill(ours)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        assert tcp_info.unanswered(ours) < 1.0
        time.sleep(0.05)


def fill(sock: socket.socket) -> None:
    sock.setblocking(False)
    try:
        while True:
            sock.send(bytes(1 << 16))
    except BlockingIOError:
        pass


def test_where_nobody_can_tell_it_says_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = socket.socketpair()
    with a, b:
        assert tcp_info.unanswered(a) == 0.0
    closed = socket.socket()
    closed.close()
    assert tcp_info.unanswered(closed) == 0.0
