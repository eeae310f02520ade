"""Looks after the channels whose replies are read by the threads that wait for them, again and again.

A thread that keeps calls in flight waits for one, starts another, and so on. What comes in between, it reads when it waits
next, and what it leaves to be written (`Outbox.send_batched`), it writes then. To have the poller look after each wait and
a thread of the pool write each call would cost more than the calls. So a waiter-owned channel is left to those threads. A
timer sees to it that nothing waits for long when they stay away. `remora.protocol.reader` decides when that is.
"""

from __future__ import annotations

from time import monotonic

from remora.agent.channel.channel import Channel
from remora.agent.runtime.timers import Timer, Timers
from remora.protocol.reader import ROUND


class WaiterOwned:
    """The waiter-owned channels of a worker."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._owned: set[Channel] = set()  # those the timer looks at; any thread adds, the timer removes
        self._timer: Timer | None = None  # looks at them; set after it runs, so one too many after a strike, never none

    def expect(self, channel: Channel) -> None:
        """A call was put on the list, and there will be a future of its value. Have a thread read the reply: one that will
        come again, or the pool."""
        reader = channel.reader
        effects = reader.sent_async(monotonic())
        if not effects:  # (most calls find it so)
            return
        if ROUND not in effects:
            channel.waiter_reads.perform(effects)
            return
        self._owned.add(channel)
        self._start(channel)
        channel.waiter_reads.perform(reader.owned())  # last: from here on, calls rely on the timer

    def _start(self, channel: Channel) -> None:
        if self._timer is None or not self._timer.pending:
            self._timer = self._timers.soon(channel.reader.thresholds.round, self._look)

    def _look(self) -> None:
        for channel in list(self._owned):
            channel.flush()
            channel.deferred.pass_on()
            # Off the list first: a thread that counts on the timer meanwhile puts the channel there again.
            self._owned.discard(channel)
            if channel.reader.is_deserted(monotonic(), channel.closed):
                channel.give_back_to_poller()
            else:
                self._owned.add(channel)
                self._start(channel)
