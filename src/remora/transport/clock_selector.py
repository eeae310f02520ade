"""A selector whose timeouts go by a worker's clock, and of which another thread can tell whether it rests. No sockets."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from remora.clock import NEVER, Clock


class ClockedSelector(selectors.DefaultSelector):
    """For a thread of ours that waits for descriptors and for the time. `wake` makes `select` return."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        super().__init__()
        self._clock = clock
        self._wake = wake
        self._rests_until: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, as ever."""
        due = self._rests_until = NEVER if timeout is None else self._clock.now() + max(timeout, 0.0)
        try:
            return self._clock.block(super().select, due, self._wake)
        finally:
            self._rests_until = None

    @property
    def idle(self) -> bool:
        """Whether its thread waits, and for good reason: nothing is ready, and it is not time. For any thread."""
        due = self._rests_until
        try:
            return due is not None and due > self._clock.now() and not super().select(0)
        except (OSError, ValueError):  # closed meanwhile
            return False
