"""Whether to look at a socket again and again for a moment before going to sleep on it. Decides by what came of it lately.

To sleep means to be woken: by another processor, and, if this one had nothing else to do, with cold caches. For an answer
that takes a few tens of microseconds that doubles the time. So whoever waits for a reply looks for it for a moment first,
for as long as that pays. If it does not (the callee takes its time, or needs this very processor), the next few waits
sleep at once: twice as many after each look in vain.
"""

from __future__ import annotations

import select
import time

MOMENT = 150e-6  # seconds
MOST_RESTS = 256


class Eagerness:
    """For one socket, and one thread at a time."""

    __slots__ = ("_poll", "_rests", "_rests_next")

    def __init__(self, fd: int) -> None:
        self._rests = 0  # waits that sleep at once
        self._rests_next = 1
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(fd, select.POLLIN)

    def watch(self) -> bool:
        """Look for a moment, if that is likely to pay. Whether there is something to read."""
        if self._rests or self._poll is None:
            self._rests -= 1
            return False
        look, clock = self._poll.poll, time.monotonic
        end = clock() + MOMENT
        while not look(0):
            if clock() > end:
                self._rests = self._rests_next
                self._rests_next = min(2 * self._rests_next, MOST_RESTS)
                return False
        self._rests_next = 1
        return True
