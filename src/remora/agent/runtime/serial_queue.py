"""SerialQueue of a shared machine: taken one at a time and in order, by whichever thread comes, and no thread ever waits.

A thread may find itself in the midst of a step when it wants to take another: the garbage collector runs a destructor
there, or a signal handler interrupts it, and either may do anything, like making a reference. A lock would wait for a frame
that cannot go on. So a step is put into a queue. If no step is under way it is taken at once; else when that one ends.

A signal handler may raise an exception in the midst of a step. Then the step stays in the queue, another thread is asked to
go on, and the step is taken once more, from its beginning.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from remora.agent.runtime.try_lock import TryLock, may_be_struck

log = logging.getLogger("remora")


class SerialQueue:
    """The queue. `later` has another thread call a function soon, and may be called anywhere. What a step returns, if it is
    anything, is passed to `then`, as a part of the step."""

    __slots__ = ("_later", "_queue", "_then", "_turn")

    def __init__(
        self, later: Callable[[Callable[[], None]], None], then: Callable[[Any], object] = lambda result: None
    ) -> None:
        self._later = later
        self._then = then
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._turn = TryLock(needed=True)  # guards: the steps; the thread that has it takes them in order

    def __bool__(self) -> bool:
        """Whether a step has yet to end."""
        return bool(self._queue)

    def mine(self) -> bool:
        """Whether a step of the current thread is under way, which does not end before the current frame returns."""
        return self._turn.mine()

    def post(self, step: Callable[..., object], *args: Any) -> None:
        """Have `step(*args)` done: now, or after those that were posted before. All steps are taken, if no frame of any
        thread is doing so already. The thread that ends looks once more, so none is left."""
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
        """Take those that are left."""
        self.post(_nothing)

    def post_later(self, step: Callable[..., object], *args: Any) -> None:
        """The same as `post`, but never now, nor on this thread."""
        self._queue.append((step, args))
        if len(self._queue) == 1:  # else another one is in the queue, and the thread that takes it out looks once more
            self._later(self.go_on)


def _nothing() -> None:
    """A step that is none."""
