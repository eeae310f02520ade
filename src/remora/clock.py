"""The time a worker lives by, and how its threads wait for it. The system's clock is here; tests may bring another one.

A worker has one clock, from its settings. By it go deadlines, heartbeats and suspicion, back-off, retirement, and the
delays of a fault plan. What measures the machine itself (bursts of microseconds, connecting, the kernel's patience with a
large message) is real time whatever the clock.

A thread that waits says how (`wait`, which blocks for a number of seconds, or for ever) and until when. Under the system's
clock that is all there is to it. Another clock (`remora.testing.virtual_clock`) must know who waits until when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

NEVER = float("inf")


class Clock(Protocol):
    """What a worker needs of a clock."""

    def now(self) -> float:
        """Seconds since some moment. Never goes back."""

    def soon(self, seconds: float) -> float:
        """The end of a moment that something of ours may wait for company. A clock that stands still has no moments."""

    def block(
        self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None
    ) -> T:
        """What `wait(seconds)` returns, which blocks until something is there, but not beyond the deadline.

        It is false if nothing is there. Then `wait` may be called again and again: it looks each time whether it is there
        (to be notified is not enough), and no lock is held meanwhile. Threads of ours that do nothing but wait for the time
        give `wake`, which makes `wait` return, and are not asked twice.
        """


class SystemClock:
    """Time as it passes."""

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
