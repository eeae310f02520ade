"""Work done on somebody's behalf: they are told when all of it is done, or how it failed. No I/O of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Countdown(Generic[T]):
    """Counts what is under way. The report is given once: when nothing is left, or at the first failure."""

    def __init__(self, report: Callable[[T | None], None]) -> None:
        self._report: Callable[[T | None], None] | None = report
        self._under_way = 1  # whoever starts the errand; ends with `finish`
        self._lock = threading.RLock()  # guards: _under_way and _report

    def begin(self) -> None:
        """One more thing is under way."""
        with self._lock:
            self._under_way += 1

    def finish(self, failure: T | None = None) -> None:
        """One thing is done, or failed."""
        with self._lock:
            self._under_way -= 1
            if failure is None and self._under_way:
                return
            report, self._report = self._report, None
        if report is not None:
            report(failure)
