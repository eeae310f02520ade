"""A queue of steps of a shared machine. Any thread runs them, one at a time and in order, and no thread ever waits.

A thread may be in the midst of a step when it wants to run another: the garbage collector runs a destructor there, or a
signal handler interrupts it, and either may do anything, such as making a reference. A lock would wait for a frame that
cannot go on. So a step is put into a queue. If no step is under way, it runs at once; otherwise when that one ends.

A signal handler may raise an exception in the midst of a step. Then the step stays in the queue, another thread is asked to
go on, and the step runs once more, from its beginning.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from remora.agent.runtime.try_lock import TryLock, may_be_struck

log = logging.getLogger("remora")


class SerialQueue:
    """The queue. `later` makes another thread call a function soon, and may be called anywhere. If a step returns something,
    `then` is called with it, as a part of the step."""

    __slots__ = ("_later", "_queue", "_then", "_turn")

    def __init__(
        self, later: Callable[[Callable[[], None]], None], then: Callable[[Any], object] = lambda result: None
    ) -> None:
        self._later = later
        self._then = then
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._turn = TryLock(needed=True)  # guards: the steps; the thread that has it takes them in order

    def __bool__(self) -> bool:
        """Return True if a step has yet to end."""
        return bool(self._queue)

    def mine(self) -> bool:
        """Return True if a step of the current thread is under way. It does not end before the current frame returns."""
        return self._turn.mine()

    def post(self, step: Callable[..., object], *args: Any) -> None:
        """Run `step(*args)`: now, or after the steps that were posted before. This runs all steps, unless a frame of some
        thread does so already. The thread that ends looks once more, so none is left."""
        queue, turn = self._queue, self._turn
        try:
            queue.append((step, args))
            while queue:
                if not turn.take():
                    return
                try:
                    while queue:
                        step, args = queue[0]
                        try:
                            result = step(*args)
                            if result:
                                self._then(result)
                        except Exception:
                            if may_be_struck():
                                raise  # of a signal handler, perhaps: else it fails again on another thread
                            log.exception("a step failed: %s", step)
                        queue.popleft()  # now: had the step been interrupted, it would be taken again
                finally:
                    turn.free[0] = True
        except BaseException:  # of a signal handler
            self._later(self.go_on)
            raise

    def go_on(self) -> None:
        self.post(lambda: None)

    def post_later(self, step: Callable[..., object], *args: Any) -> None:
        """Post a step that another thread runs later."""
        self._queue.append((step, args))
        if len(self._queue) == 1:  # else another one is in the queue, and the thread that takes it out looks once more
            self._later(self.go_on)
