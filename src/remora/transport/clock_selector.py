"""A selector whose timeouts follow a worker's clock, and that other threads can ask if it is idle. No sockets."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from remora.clock import NEVER, Clock


class ClockedSelector(selectors.DefaultSelector):
    """The selector of a thread that waits for descriptors and for the time. `wake` makes `select` return."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        super().__init__()
        self._clock = clock
        self._wake = wake
        self._rests_until: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, like every selector."""
        due = self._rests_until = NEVER if timeout is None else self._clock.now() + max(timeout, 0.0)
        try:
            return self._clock.block(super().select, due, self._wake)
        finally:
            self._rests_until = None

    @property
    def idle(self) -> bool:
        """Return True if its thread waits, nothing is ready, and no time is due. For any thread."""
        due = self._rests_until
        try:
            return due is not None and due > self._clock.now() and not super().select(0)
        except (OSError, ValueError):  # closed meanwhile
            return False
