"""News of who joined, left or died, passed on to the program's listeners in the order in which it happened.

Listeners are called on a thread of the crew, one call at a time, and never under a lock of ours: they may make calls,
wait for them, subscribe and unsubscribe. One that raises is reported in the log and called again for the next event.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from remora.agent.crew import Crew
from remora.protocol.membership import MembershipEvent

log = logging.getLogger("remora")

Listener = Callable[[MembershipEvent], object]


class Subscription:
    """A listener that hears news until `cancel` is called, or the `with` block ends."""

    def __init__(self, news: News, listener: Listener) -> None:
        self._news = news
        self.listener = listener

    def cancel(self) -> None:
        """Hear no more. An event that is being passed on may still arrive. Harmless if done twice."""
        self._news.unsubscribe(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class News:
    """The listeners of one worker, and what they have yet to hear."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._lock = threading.Lock()  # guards the three below
        self._subscriptions: tuple[Subscription, ...] = ()
        self._waiting: deque[MembershipEvent] = deque()
        self._telling = False  # a thread is passing news on: whatever comes now, it sees to it

    def subscribe(self, listener: Listener) -> Subscription:
        """Have `listener` called with every event from now on."""
        subscription = Subscription(self, listener)
        with self._lock:
            self._subscriptions += (subscription,)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Undo `subscribe`."""
        with self._lock:
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)

    def publish(self, event: MembershipEvent) -> None:
        """Something happened. Does not wait, and calls nobody itself."""
        with self._lock:
            if not self._subscriptions:
                return
            self._waiting.append(event)
            if self._telling:
                return
            self._telling = True
        self._crew.serve(self._tell)

    def _tell(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._telling = False
                    return
                event, subscriptions = self._waiting.popleft(), self._subscriptions
            for subscription in subscriptions:
                try:
                    subscription.listener(event)
                except BaseException:
                    log.exception("a listener failed on %r", event)
