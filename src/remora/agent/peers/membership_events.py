"""MembershipEvents of who joined, left or died, passed on to the program's listeners in the order in which it happened.

Listeners are called on a thread of the pool, one call at a time, and never under a lock of ours: they may make calls,
wait for them, subscribe and unsubscribe. One that raises is reported in the log and called again for the next event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.serial_queue import SerialQueue
from remora.protocol.member_rules import MembershipEvent

log = logging.getLogger("remora")

Responder = Callable[[MembershipEvent], object]


class Subscription:
    """A listener that hears news until `cancel` is called, or the `with` block ends."""

    def __init__(self, among: dict[Subscription, None], listener: Responder) -> None:
        self._among = among
        self.listener = listener

    def cancel(self) -> None:
        """Hear no more. An event that is being passed on may still arrive. Harmless if done twice."""
        self._among.pop(self, None)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class MembershipEvents:
    """The listeners of one worker, and what they have yet to hear. No lock: a destructor may cancel a subscription wherever
    the garbage collector runs it."""

    def __init__(self, pool: WorkerPool) -> None:
        self._subscriptions: dict[Subscription, None] = {}  # in the order in which they came
        self._waiting = SerialQueue(pool.submit_system)  # events are passed on one at a time

    def subscribe(self, listener: Responder) -> Subscription:
        """Have `listener` called with every event from now on."""
        subscription = Subscription(self._subscriptions, listener)
        self._subscriptions[subscription] = None
        return subscription

    def publish(self, event: MembershipEvent) -> None:
        """Tell the listeners that something happened. Does not wait, and calls no listener itself."""
        if self._subscriptions:
            self._waiting.post_later(self._tell, event)

    def _tell(self, event: MembershipEvent) -> None:
        for subscription in self._subscriptions.copy():
            try:
                subscription.listener(event)
            except BaseException:
                log.exception("a listener failed on %r", event)
