"""Waits for the network with a deadline, and reacts to Ctrl-C, whatever the wait is for.

Native code (a c10d store, say) that blocks in a system call does neither.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25


def until(attempt: Callable[[], T], deadline: float, look: Callable[[], None] = lambda: None) -> T:
    """Repeat `attempt` until it raises no OSError, and return its result; at the deadline, raise the last error. Calls
    `look` now and then meanwhile."""
    pause = _FIRST_PAUSE
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        look()
        pause = min(2 * pause, _LONGEST_PAUSE)


def until_resolved(host: str, deadline: float, look: Callable[[], None] = lambda: None) -> None:
    """Return as soon as the name of a host is known here; at the deadline, raise the last OSError."""

    def resolve() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a name that cannot be one
            raise OSError(str(error)) from None

    until(resolve, deadline, look)


def in_time(function: Callable[[], T], deadline: float) -> T:
    """Run a blocking function in a thread of its own; raise TimeoutError if it has not returned by the deadline.

    Such a thread runs until the function returns, because it cannot be interrupted. It is a daemon.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    try:
        threading.Thread(target=run, name="remora-waits", daemon=True).start()
    except RuntimeError:  # at the end of the interpreter none can be started any more
        run()
    if not done.wait(min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)):  # it knows no infinity
        raise TimeoutError
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class BoundedCalls:
    """Asks something that may not answer, such as a store whose host is frozen or cut off, and waits `seconds` at most.

    While a question is overdue no other is asked, as it would have to wait behind that one: TimeoutError at once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._answered = threading.Event()  # to the question that was overdue last
        self._answered.set()

    def ask(self, question: Callable[[], T]) -> T:
        """Return the result of the blocking function; TimeoutError if it does not return in time."""
        if not self._answered.is_set():
            raise TimeoutError
        answered = threading.Event()

        def ask() -> T:
            try:
                return question()
            finally:
                answered.set()

        try:
            return in_time(ask, time.monotonic() + self.seconds)
        except TimeoutError:
            self._answered = answered
            raise
