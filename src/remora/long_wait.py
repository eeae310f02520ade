"""Reports in the log what a thread still waits for: after 10 seconds, then after 20, 40, 80 and so on.

A thread that waits makes one `LongWait` and calls `look` whenever it is awake, or waits by `block`. Nothing is reported, and
`describe` is not called, before the first 10 seconds have passed. There is no thread and no lock: each wait belongs to one
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from remora.clock import SYSTEM, Clock

log = logging.getLogger("remora")

T = TypeVar("T")

FIRST = 10.0  # seconds before the first report; each later one comes after twice the time


class LongWait:
    """One wait. `describe` returns what the thread waits for, and for which worker; it is called when a report is due. An
    empty description means that it has come meanwhile."""

    def __init__(self, describe: Callable[[], str], clock: Clock = SYSTEM) -> None:
        self._describe = describe
        self._clock = clock
        self._began = clock.now()
        self._after = FIRST  # seconds from the beginning to the next report

    def look(self) -> None:
        """Report, if a report is due."""
        waited = self._clock.now() - self._began
        if waited < self._after:
            return
        while self._after <= waited:
            self._after *= 2
        text = self._describe()
        if text:
            log.warning("%s, %.0f s", text, waited)

    def block(self, wait: Callable[[float | None], T], deadline: float) -> T:
        """Do what `Clock.block` does, with reports meanwhile."""
        while True:
            found = self._clock.block(wait, min(deadline, self._began + self._after))
            if found or self._clock.now() >= deadline:
                return found
            self.look()


def listed(names: list[str], shown: int = 8) -> str:
    """Return the first few names of a list, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
