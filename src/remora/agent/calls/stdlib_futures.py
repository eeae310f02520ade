"""Gives our futures the attributes that `concurrent.futures.as_completed` and `wait` look for.

There is no public protocol for that. Both functions have used the same three attributes since Python 3.2: `_condition`,
held while they look and while they change the other two; `_state`; and `_waiters`, objects to be told of the outcome. So
a future of ours has them, from the first time it is asked for one, and nothing of this exists before.

A function that a worker runs keeps its place in the pool while it waits in there, as it does in any wait that is not ours:
with `num_worker_threads=1`, what it waits for must not need a place here. `future.wait()` and `await` give the place away.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

PENDING, FINISHED, CANCELLED = "PENDING", "FINISHED", "CANCELLED_AND_NOTIFIED"  # words of `concurrent.futures._base`


class Waiter(Protocol):
    """A thread in `as_completed` or `wait`."""

    def add_result(self, future: Any) -> None: ...
    def add_exception(self, future: Any) -> None: ...
    def add_cancelled(self, future: Any) -> None: ...


class Standing:
    """The state of one future. It does not lead back to the future: torch keeps what calls `tell`, where no collector
    can follow."""

    __slots__ = ("condition", "state", "waiters")

    def __init__(self) -> None:
        self.condition = threading.Condition()  # guards: state and waiters, as the standard library wants it
        self.state = PENDING
        self.waiters: list[Waiter] = []  # both are guarded by the condition

    def tell(self, future: Any, failed: bool) -> None:
        """The future is settled. Takes the lock that `as_completed` holds while it looks, so it is for a callback of the
        program's kind, which may wait, and not for a thread that reads messages."""
        cancelled: bool = future.cancelled()
        with self.condition:
            if self.state != PENDING:
                return
            self.state = CANCELLED if cancelled else FINISHED
            for waiter in self.waiters:
                add = waiter.add_cancelled if cancelled else waiter.add_exception if failed else waiter.add_result
                add(future)
            self.condition.notify_all()
