"""Waiting with a deadline."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from remora.transport import patience
from remora.transport.patience import in_time, until_listening


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_it_returns_when_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        until_listening("127.0.0.1", server.getsockname()[1], soon())


def test_it_waits_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        knocks = 0
        real = patience._knock

        def knock(host: str, port: int, timeout: float) -> None:
            nonlocal knocks
            knocks += 1
            if knocks == 3:
                server.listen()
            real(host, port, timeout)

        monkeypatch.setattr(patience, "_knock", knock)
        until_listening("127.0.0.1", server.getsockname()[1], soon())
        assert knocks == 3


def test_at_the_deadline_it_says_what_was_wrong() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        start = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            until_listening("127.0.0.1", server.getsockname()[1], start + 0.3)
        assert time.monotonic() - start < 2


def test_an_unknown_name_is_tried_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def unknown(*arguments: object, **options: object) -> None:
        nonlocal tries
        tries += 1
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(socket.gaierror):
        until_listening("not-yet-there", 1, soon(0.2))
    assert tries > 2


def test_a_port_that_answers_itself_is_nobody() -> None:
    """Binding to the port before connecting to it brings about what otherwise happens once in a while."""
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        assert itself.getsockname() == itself.getpeername()


def test_a_connection_to_oneself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: itself)
    with pytest.raises(ConnectionRefusedError):
        patience._knock("127.0.0.1", 1, 1.0)


def test_a_function_that_returns_in_time() -> None:
    assert in_time(lambda: 7, soon()) == 7
    assert in_time(lambda: None, soon()) is None


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(KeyError, match="lost"):
        in_time(lambda: {}["lost"], soon())


def test_one_that_does_not_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        in_time(release.wait, soon(0.05))
    release.set()


@pytest.mark.parametrize("deadline", [float("inf"), 1e18])
def test_waiting_can_be_for_ever(deadline: float) -> None:
    assert in_time(lambda: 7, deadline) == 7
    assert in_time(lambda: time.sleep(0.05) or 7, deadline) == 7  # also if it takes a while


def test_when_no_thread_can_be_started_it_is_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is when the interpreter ends, and a worker is shut down by `atexit`."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_time(lambda: 7, soon()) == 7
