"""A link in the poller: what the poller was asked to watch for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remora.agent.runtime.try_lock import TryLock
from remora.transport.link import StreamLink
from remora.transport.poller import READ, Poller

UNDECIDED = -1


class Registration:
    """What is known of a link in the poller.

    `armed` is written by the thread that decides, one at a time (`PoolReads.update`). `again` and `unsure` are written by
    any thread; each write says that something is to be done once more, so none is lost.
    """

    __slots__ = ("again", "armed", "arming", "fileno", "link", "ready", "unsure")

    def __init__(self, link: StreamLink, on_ready: Callable[[Registration, int], None]) -> None:
        self.link = link
        self.fileno = link.fileno
        self.ready: Callable[[int], None] = partial(on_ready, self)
        self.armed = 0  # what the poller was asked to watch for, or UNDECIDED
        self.again = False  # the poller is asked again in any case: what it said was its last word, or was not made use of
        self.unsure = False  # what the poller should watch for is to be decided again
        # One for each link: a thread that finds it taken relies on its holder to look at `unsure`, which is of one link.
        self.arming = TryLock()  # to tell the poller what to watch for

    def decide(self) -> int:
        """A thread begins to decide what to watch for. What it is now."""
        armed, self.armed = self.armed, UNDECIDED
        return armed

    def ask(self, poller: Poller, events: int, armed: int) -> None:
        """Ask for `events`, unless the poller watches for just them (`armed`) and tells of all that comes."""
        if events != armed or self.again or self.link.unread:
            self.again = False
            if events == READ and poller.lasts:
                poller.arm_to_last(self)
            else:
                poller.arm(self, events)
