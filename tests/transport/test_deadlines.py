"""Waiting with a deadline."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from remora.transport import deadlines
from remora.transport.deadlines import in_time


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def refuse() -> None:
    raise ConnectionRefusedError("nobody is listening")


def test_it_tries_until_it_succeeds_and_looks_meanwhile() -> None:
    outcomes, looks = iter([refuse, refuse, lambda: "there"]), []
    assert deadlines.until(lambda: next(outcomes)(), soon(), lambda: looks.append("look")) == "there"
    assert looks == ["look", "look"]


def test_at_the_deadline_it_says_what_was_wrong() -> None:
    start = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        deadlines.until(refuse, start + 0.3)
    assert time.monotonic() - start < 2


def test_an_unknown_name_is_tried_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def unknown(*arguments: object, **options: object) -> None:
        nonlocal tries
        tries += 1
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(socket.gaierror):
        deadlines.until_resolved("not-yet-there", soon(0.2))
    assert tries > 2


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
