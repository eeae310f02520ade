"""Channels whose replies are read by the threads that wait for them, again and again: nobody else need look meanwhile.

A thread that keeps calls in flight waits for one, starts another, and so on. What comes in between, it reads when it waits
next, and what it leaves to be written (`Sending.send_lazily`), it writes then. To have the poller look after each wait and
a thread of the crew write each call would cost more than the calls. So an attended channel is left to those threads, and
here is who sees to it that nothing waits for long when they stay away.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING

from remora.agent.timers import Timer, Timers

if TYPE_CHECKING:
    from remora.agent.attending import Attending

ROUND = 0.004  # seconds from one look to the next: so long may a call wait to be written, if its caller does not come back
# Who has not come for so long is not counted on any more. (There may be much to do before it waits again.)
MEMORY = 0.0 if os.environ.get("REMORA_ATTEND") == "0" else 0.02


class Attendance:
    """The attended channels of a worker."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._attended: set[Attending] = set()
        self._timer: Timer | None = None  # looks at them; set after it runs, so one too many after a strike, never none

    def expect(self, channel: Attending) -> None:
        """A call was put on the list, and there will be a future of its value. If a thread was here to read a moment ago, it
        will come again; else have the poller look."""
        if monotonic() - channel.visited > MEMORY:
            channel.watch()
            return
        self._attended.add(channel)
        if self._timer is None or not self._timer.pending:
            self._timer = self._timers.soon(ROUND, self._look)
        channel.attended = True  # last: from here on, calls rely on the timer
        if channel not in self._attended:
            channel.desert()  # the timer looked in between, and gave it up

    def _look(self) -> None:
        for channel in list(self._attended):
            channel.flush()
            channel.pass_on()
            if monotonic() - channel.visited > MEMORY or channel.closed:
                self._attended.discard(channel)
                channel.desert()
        if self._attended and (self._timer is None or not self._timer.pending):
            self._timer = self._timers.soon(ROUND, self._look)
