"""A link in the poller: what the poller was asked to watch for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remora.agent.runtime.try_lock import TryLock
from remora.protocol import reader
from remora.transport.link import StreamLink
from remora.transport.poller import READ, Poller


class Registration(reader.Registration):
    """A link in the poller. The fields of the base are shared by all threads, as it says."""

    __slots__ = ("arming", "fileno", "link", "ready")

    def __init__(self, link: StreamLink, on_ready: Callable[[Registration, int], None]) -> None:
        super().__init__()
        self.link = link
        self.fileno = link.fileno
        self.ready: Callable[[int], None] = partial(on_ready, self)
        # One for each link: a thread that finds it taken relies on its holder to look at `unsure`, which is of one link.
        self.arming = TryLock()  # to tell the poller what to watch for

    def ask(self, poller: Poller, events: int) -> None:
        """Have the poller watch for `events`."""
        if events == READ and poller.lasts:
            poller.arm_to_last(self)
        else:
            poller.arm(self, events)
