"""Reports failures that the program never saw: their future was dropped, and no thread had looked at it."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any

from remora.agent.calls.error_copies import fresh
from remora.clock import NEVER

log = logging.getLogger("remora")

TOGETHER = 0.5  # seconds in which failures are collected for one line of the log

Origin = tuple[CodeType, int]  # the place where something was started: a function, and how far it had come


class UnseenFailures:
    """Failures at which no thread looked, collected for a moment: hundreds that are dropped together are one line of the
    log.

    Destructors add to it, on any thread and under any lock, so `add` is one `append`. A worker calls `report` when `due`,
    on a thread of its pool. Where no worker runs that would, `add` reports the first at once, and those that come within a
    moment of it go with a later one, or are reported when the program ends.
    """

    def __init__(self) -> None:
        self._failures: deque[tuple[str, Origin | None, BaseException]] = deque()
        self._since = NEVER  # when the oldest of them was added, in real time
        self._alone = -NEVER  # when `add` last reported
        self.reporters = 0  # workers that run (changed by their own threads alone, one at a time each)

    def add(self, what: str, origin: Origin | None, error: BaseException) -> None:
        """No thread will ever look at this one."""
        if not self._failures:
            self._since = time.monotonic()
        self._failures.append((what, origin, error))
        if not self.reporters and time.monotonic() - self._alone >= TOGETHER:
            self._alone = time.monotonic()
            self.report()

    def __len__(self) -> int:
        """Return how many failures wait to be reported."""
        return len(self._failures)

    @property
    def due(self) -> bool:
        """Return True if it is time to report: failures within a moment of the first are reported together."""
        return bool(self._failures) and time.monotonic() - self._since >= TOGETHER

    def report(self) -> None:
        """Say in one line what has been collected. Two threads that report at once share what there is."""
        count, first = 0, None
        while self._failures:
            try:
                failure = self._failures.popleft()
            except IndexError:
                break  # another thread had the last one
            count, first = count + 1, first or failure
        if first is not None:
            what, origin, error = first
            where = "an unknown place" if origin is None else "{}:{}".format(*_place(origin))
            calls = "call" if count == 2 else "calls"
            others = f" ({count - 1} more {calls} failed unseen; this was the first)" if count > 1 else ""
            log.error("%s, started at %s, failed unseen: %r%s", what, where, error, others)


unseen_failures = UnseenFailures()
atexit.register(unseen_failures.report)


class Failure:
    """The error of a future, and whether the program saw it. It ends with the future, and tells if the program did not.
    Apart from the future: torch holds it in a way that the garbage collector cannot follow, so it must not lead back to
    the future."""

    __slots__ = ("error", "origin", "seen", "what")

    def __init__(self, error: BaseException, what: str, origin: Origin | None) -> None:
        self.error = error
        self.what = what
        self.origin = origin
        self.seen = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.seen and not is_finalizing():  # (then there may be no globals any more, and no log)
            unseen_failures.add(self.what or "a call", self.origin, self.error)

    def show(self, _value: object = None) -> Any:
        """Raise the error. A copy of it: what is raised gets a traceback, with the frames and all variables of the
        thread that looked, and torch would keep those for ever."""
        self.seen = True
        raise fresh(self.error)


def _place(origin: Origin) -> tuple[str, int]:
    """File and line. Looked up when needed: most calls succeed."""
    code, at = origin
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return code.co_filename, next(lines, code.co_firstlineno)
