"""Prints what functions raise where they ran, too. Hundreds that raise the same at the same line are one traceback and
a count.

The first is printed at once. Repeats are counted; the tick has the count printed after half a second, and while there
are more, after twice the time, up to a minute. When a time has passed without any, the next is printed in full again. The
callers get every error, so nothing is lost.

Threads of the pool call `show`, the tick calls `due`, one thread at a time `report`. An entry is made by one `setdefault`,
and repeats are counted by `append`: both are atomic.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from types import CodeType

Key = tuple[type[BaseException], CodeType | None, int]

SOON = 0.5  # seconds after which repeats are first reported
MOST = 60.0  # … and at most
KEPT = 256  # errors of which repeats are counted


class _Repeats:
    """One error, and how often it came again."""

    def __init__(self, error: BaseException, key: Key) -> None:
        code = key[1]
        self.what = type(error).__qualname__
        self.where = "" if code is None else f" ({code.co_filename}:{key[2]}, in {code.co_name})"
        self.more: deque[None] = deque()
        self.pause = SOON
        self.report_at = time.monotonic() + SOON


class Raised:
    """The errors that functions of one worker have raised of late."""

    def __init__(self) -> None:
        self._of_late: dict[Key, _Repeats] = {}

    def show(self, error: BaseException) -> None:
        """Print what a function raised, or count it if it was printed a moment ago."""
        try:
            key = _key(error)
            known = self._of_late.get(key)
            if known is None and len(self._of_late) < KEPT:
                mine = _Repeats(error, key)
                known = self._of_late.setdefault(key, mine)
                if known is mine:
                    known = None
            if known is not None:
                known.more.append(None)
                return
            sys.stderr.write("".join(traceback.format_exception(error)))
        except Exception:
            pass  # of the program: the text of its error, or what it put in the place of stderr

    @property
    def due(self) -> bool:
        """Return True if there is anything to report."""
        if not self._of_late:
            return False
        now = time.monotonic()
        return any(each.report_at <= now for each in list(self._of_late.values()))

    def report(self, at_once: bool = False) -> None:
        """Print how often each error came again."""
        now = time.monotonic()
        for key, each in list(self._of_late.items()):
            if each.report_at > now and not at_once:
                continue
            each.pause = min(2 * each.pause, MOST)
            each.report_at = now + each.pause
            n = len(each.more)
            if not n:
                self._of_late.pop(key, None)  # (a thread that has found it already counts in vain)
                continue
            for _ in range(n):
                each.more.popleft()
            try:
                sys.stderr.write(f"{each.what}: raised {n} more time{'s' if n > 1 else ''}{each.where}\n")
            except Exception:
                pass


def _key(error: BaseException) -> Key:
    """The type of an error, and the line where it was raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return (type(error), None, 0) if at is None else (type(error), at.tb_frame.f_code, at.tb_lineno)
