"""The listening sockets of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from remora.agent.peers import listener


def test_one_poll_accepts_a_bounded_number_of_connections() -> None:
    """More may come than can be accepted: the thread has other things to do."""
    listening: Any = SimpleNamespace(accept=lambda: (mock.Mock(), ("127.0.0.1", 1)), fileno=lambda: 3)
    at_the_door = mock.Mock()
    at_the_door._let_in.side_effect = [None] * listener.ACCEPTS  # and then an error: StopIteration
    listen_socket = listener._ListenSocket(at_the_door, listening)
    listen_socket.ready(0)
    assert at_the_door._let_in.call_count == listener.ACCEPTS <= 64
    at_the_door.arm.assert_called_once_with(listen_socket)  # for the rest
