"""Undoes what packing a message did. No pickling here."""

from __future__ import annotations

import sys
from collections.abc import Callable


class Undo(list[Callable[[], None]]):
    """Functions that undo what packing a message did, if it is never sent. Each may run twice: that is as good as once.

    While it is `armed`, no call is responsible for the message yet: if an exception of a signal handler interrupts, and the
    list is dropped with its frames, the destructor runs what is in it.
    """

    __slots__ = ("armed",)

    def __init__(self, armed: bool = False) -> None:
        self.armed = armed

    def run(self) -> None:
        """Run all of them, last first."""
        self.armed = True  # an exception in the midst of this leaves the rest to the destructor
        while self:
            self[-1]()
            self.pop()  # now: had it been interrupted, it would be run again

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "armed", False) and self and not is_finalizing():
            self.run()
