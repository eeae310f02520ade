"""Decides if a thread looks again and again for a moment before it goes to sleep, by the results of earlier looks.

To sleep means to be woken: by another processor, and, if this one had nothing else to do, with cold caches. For an answer
that takes a few tens of microseconds that doubles the time. So a thread that waits for something looks for it for a moment
first, for as long as that pays. It does not if nothing came: then the next few waits sleep at once, twice as many each time;
and half as many again for each look that paid. Nor if another one had this very processor for long: then as many as ever do.

A thread that looks yields the processor every few glances. The thread whose answer it waits for may need this very one:
the kernel likes to put those on one processor that wake each other, and leaves them there for as long as one of them sleeps.
If both want to run, it moves one of them to another processor soon.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial

from remora.options import FAST_PATHS

MOMENT = 300e-6 if FAST_PATHS.spin else 0.0  # seconds
INTERRUPTION = 1e-3  # seconds: another thread has the processor, and does not give it back soon
GLANCES = range(4)  # in between, we make way
MOST_RESTS = 256

make_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Looks whether there is something to read from a descriptor. For one thread at a time."""

    __slots__ = ("_look", "_rests", "_rests_next")

    def __init__(self, fd: int) -> None:
        self._look: Callable[[], list[tuple[int, int]]] | None = None  # there may be no way to look without waiting
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            self._look = partial(poll.poll, 0)
        self._rests = 0  # waits that sleep at once
        self._rests_next = 1

    def watch(self) -> bool:
        """Return True if something came within a moment; False if nothing did, or if a look is not likely to pay."""
        if self._rests or self._look is None:
            self._rests -= 1
            return False
        look, clock = self._look, time.monotonic
        interrupted = False
        before = clock()
        end = before + MOMENT
        while True:
            for _ in GLANCES:
                if look():
                    if interrupted or clock() - before > INTERRUPTION:
                        self._rests = MOST_RESTS
                    elif self._rests_next > 1:
                        self._rests_next //= 2
                    return True
            now = clock()
            interrupted = interrupted or now - before > INTERRUPTION
            if now > end:
                self._rests = MOST_RESTS if interrupted else self._rests_next
                self._rests_next = min(2 * self._rests_next, MOST_RESTS)
                return False
            before = now
            make_way()
