"""Channels whose replies are read by the threads that wait for them, again and again: nobody else need look meanwhile.

A thread that keeps calls in flight waits for one, starts another, and so on. What comes in between, it reads when it waits
next, and what it leaves to be written (`Outbox.send_batched`), it writes then. To have the poller look after each wait and
a thread of the pool write each call would cost more than the calls. So a waiter-owned channel is left to those threads, and
here is who sees to it that nothing waits for long when they stay away.
"""

from __future__ import annotations

from time import monotonic

from remora.agent.channel.channel import Channel
from remora.agent.runtime.timers import Timer, Timers
from remora.options import FAST_PATHS

ROUND = 0.004  # seconds from one look to the next: so long may a call wait to be written, if its caller does not come back
# Who has not come for so long is not counted on any more. (There may be much to do before it waits again.)
MEMORY = 0.02 if FAST_PATHS.waiter_owned else 0.0


class WaiterOwned:
    """The waiter_owned channels of a worker."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._owned: set[Channel] = set()
        self._timer: Timer | None = None  # looks at them; set after it runs, so one too many after a strike, never none

    def expect(self, channel: Channel) -> None:
        """A call was put on the list, and there will be a future of its value. If a thread was here to read a moment ago, it
        will come again; else have the poller look."""
        if monotonic() - channel.last_waiter_at > MEMORY:
            channel.watch()
            return
        self._owned.add(channel)
        if self._timer is None or not self._timer.pending:
            self._timer = self._timers.soon(ROUND, self._look)
        channel.own_by_waiters()  # last: from here on, calls rely on the timer
        if channel not in self._owned:
            channel.give_back_to_poller()  # the timer looked in between, and gave it up

    def _look(self) -> None:
        for channel in list(self._owned):
            channel.flush()
            channel.pass_on()
            if monotonic() - channel.last_waiter_at > MEMORY or channel.closed:
                self._owned.discard(channel)
                channel.give_back_to_poller()
        if self._owned and (self._timer is None or not self._timer.pending):
            self._timer = self._timers.soon(ROUND, self._look)
