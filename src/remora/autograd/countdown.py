"""Counts tasks that are under way, and reports once: when all are done, or when the first one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Countdown(Generic[T]):
    """`report` is called once, with None when no task is left, or with the first failure."""

    def __init__(self, report: Callable[[T | None], None]) -> None:
        self._report: Callable[[T | None], None] | None = report
        self._under_way = 1  # the caller that starts the tasks; it ends with `finish`
        # Reentrant: a destructor that the collector runs meanwhile may finish a task.
        self._lock = threading.RLock()  # guards: _under_way and _report

    def begin(self) -> None:
        """One more task is under way."""
        with self._lock:
            self._under_way += 1

    def finish(self, failure: T | None = None) -> None:
        """One task is done, or failed."""
        with self._lock:
            self._under_way -= 1
            if failure is None and self._under_way:
                return
            report, self._report = self._report, None
        if report is not None:
            report(failure)
