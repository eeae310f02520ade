"""The clock of a worker, and how its threads wait by it. The system's clock is here; tests may use another one.

A worker has one clock, from its settings. Deadlines, heartbeats and suspicion, back-off, retirement and the delays of a
fault plan follow it. Times that measure the machine itself (bursts of microseconds, connecting, waiting for the kernel to
take a large message) are real time whatever the clock.

A thread that waits passes a function (`wait`, which blocks for a number of seconds, or for ever) and a deadline. The
system's clock needs no more. Another clock (`remora.testing.virtual_clock`) must know which thread waits until when. """

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

NEVER = float("inf")


class Clock(Protocol):
    """The operations that a worker needs of a clock."""

    def now(self) -> float:
        """Return the seconds since some moment. Never goes back."""

    def soon(self, seconds: float) -> float:
        """Return the end of a short delay of Remora's own, such as a delayed flush. A clock that stands still has no
        delay."""

    def block(
        self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None
    ) -> T:
        """Call `wait(seconds)`, which blocks until something is there, but not beyond the deadline; return what it returned.

        A false result means that nothing is there. Then `wait` may be called again and again: it checks each time (to be
        notified is not enough), and no lock is held meanwhile. Threads of a worker that only wait for the time pass `wake`,
        which makes `wait` return, and are not asked twice.
        """


class SystemClock:
    """The real time."""

    now = staticmethod(time.monotonic)

    def soon(self, seconds: float) -> float:
        return time.monotonic() + seconds

    def block(
        self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None
    ) -> T:
        return wait(None if deadline == NEVER else max(deadline - time.monotonic(), 0.0))

    def __repr__(self) -> str:
        return "SystemClock()"


SYSTEM = SystemClock()
