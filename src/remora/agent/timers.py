"""One thread that calls functions at given times. It never shares a pool, so timeouts fire however busy the worker is."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

from remora.clock import SYSTEM, Clock

log = logging.getLogger("remora")

_COMPACT_ABOVE = 1024


class Timer:
    """A promise to call `action` at `when` (by the worker's clock). Clear `action` to cancel."""

    __slots__ = ("action", "owner", "when")

    def __init__(self, when: float, action: Callable[[], None], owner: Timers) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action
        self.owner = owner

    def cancel(self) -> None:
        """Never call it. Costs nothing now; the entry goes away later."""
        if self.action is not None:
            self.action = None
            self.owner.cancelled += 1


class Timers:
    """A heap of timers and the thread that serves it."""

    def __init__(self, name: str, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._changed = threading.Condition(threading.Lock())  # guards _heap, _next, _stopped
        self._next = float("inf")  # when the thread will look again
        self._stopped = False
        self.cancelled = 0
        self._thread = threading.Thread(target=self._run, name=f"remora-{name}-timers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` at `when`, on the timer thread; it must not block."""
        timer = Timer(when, action, self)
        with self._changed:
            heapq.heappush(self._heap, (when, next(self._order), timer))
            if self.cancelled > _COMPACT_ABOVE and self.cancelled * 2 > len(self._heap):
                self._compact()
            if when < self._next:
                self._changed.notify()
        return timer

    def soon(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Call `action` in a moment, which is our own patience and nobody's deadline."""
        return self.at(self.clock.soon(seconds), action)

    @property
    def idle(self) -> bool:
        """Whether nothing is due."""
        with self._changed:
            served = not self._heap or self._heap[0][0] >= self._next
            return self._stopped or (self._next > self.clock.now() and served)

    def _nudge(self) -> None:
        with self._changed:
            self._changed.notify()

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].action is not None]
        heapq.heapify(self._heap)
        self.cancelled = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._due()
                while not due and not self._stopped:
                    self._next = self._heap[0][0] if self._heap else float("inf")
                    self.clock.block(self._changed.wait, self._next, self._nudge)
                    due = self._due()
                self._next = 0.0  # awake: nobody needs to notify
                if self._stopped:
                    return
            for timer in due:
                action, timer.action = timer.action, None
                if action is not None:
                    try:
                        action()
                    except BaseException:
                        log.exception("a timer failed")

    def _due(self) -> list[Timer]:
        due: list[Timer] = []
        now = self.clock.now()
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][2].action is None):
            due.append(heapq.heappop(heap)[2])
        return due

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(1.0)
