"""Delays low-priority messages by up to 2 ms so that they share a write. A timer flushes them."""

from __future__ import annotations

from remora.agent.channel.channel import Channel
from remora.agent.runtime.timers import Timer, Timers
from remora.options import FAST_PATHS

PATIENCE = 0.002  # seconds
ROUND = 0.01  # … from one look to the next, while messages are put aside all the time


class DelayedFlush:
    """Channels on which something was put aside. Whatever is sent next on one of them takes it along; else, we do."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._waiting: set[Channel] = set()
        self._timer: Timer | None = None  # looks at them; set after it runs, so one too many after a strike, never none
        self._more = False  # some came since it last did

    def expect(self, channel: Channel) -> None:
        """Have what was put aside on this channel sent in a moment."""
        if not FAST_PATHS.delayed_flush:
            channel.flush()
            return
        self._waiting.add(channel)
        self._more = True
        if self._timer is None or not self._timer.pending:
            self._timer = self._timers.soon(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Flush, and look again while messages come: to set a timer wakes a thread, which is what this saves."""
        if self._more:
            self._more = False
            self._timer = self._timers.soon(ROUND, self._give_up)
        while self._waiting:
            self._waiting.pop().flush()
