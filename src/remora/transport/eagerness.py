"""Whether to look again and again for a moment before going to sleep. Decides by what came of it lately.

To sleep means to be woken: by another processor, and, if this one had nothing else to do, with cold caches. For an answer
that takes a few tens of microseconds that doubles the time. So whoever waits for something looks for it for a moment
first, for as long as that pays. It does not if nothing came, or if another one needed this very processor meanwhile: then
the next few waits sleep at once, twice as many each time; and half as many again for each look that paid.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")

MOMENT = 0.0 if os.environ.get("REMORA_LOOK") == "0" else 300e-6  # seconds
INTERRUPTION = 50e-6  # a look takes about one microsecond: after this many, somebody else had the processor in between
MOST_RESTS = 256


class Eagerness(Generic[T]):
    """For one thread at a time. `look` asks, without waiting, for what one waits for; None if there is no way to ask."""

    __slots__ = ("_look", "_rests", "_rests_next")

    def __init__(self, look: Callable[[], T] | None) -> None:
        self._look = look
        self._rests = 0  # waits that sleep at once
        self._rests_next = 1

    def watch(self) -> T | None:
        """What came within a moment; None if nothing did, or if a look is not likely to pay."""
        if self._rests or self._look is None:
            self._rests -= 1
            return None
        look, clock = self._look, time.monotonic
        interrupted = False
        before = clock()
        end = before + MOMENT
        while not (found := look()):
            now = clock()
            interrupted = interrupted or now - before > INTERRUPTION
            if now > end:
                self._rest()
                return None
            before = now
        if interrupted or clock() - before > INTERRUPTION:
            self._rest()
        else:
            self._rests_next = max(self._rests_next // 2, 1)
        return found

    def _rest(self) -> None:
        self._rests = self._rests_next
        self._rests_next = min(2 * self._rests_next, MOST_RESTS)


def for_reading(fd: int) -> Eagerness[list[tuple[int, int]]]:
    """Look whether there is something to read."""
    if not hasattr(select, "poll"):
        return Eagerness(None)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return Eagerness(partial(poll.poll, 0))
