"""Calls functions at given times, on a thread of its own. It shares no pool, so timeouts fire however busy the worker is."""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from remora.clock import SYSTEM, Clock

log = logging.getLogger("remora")

_COMPACT_ABOVE = 1024


@dataclass(eq=False, slots=True)
class Timer:
    """One call of `action` at `when` (by the worker's clock). Clear `action` to cancel."""

    when: float
    action: Callable[[], None] | None
    owner: Timers

    @property
    def pending(self) -> bool:
        """Return True if it will fire. False from before the action runs, so an event during the action sets another
        timer."""
        return self.action is not None

    def cancel(self) -> None:
        """Never call the action. The entry is removed later."""
        if self.action is not None:
            self.action = None
            self.owner.cancelled += 1


class Timers:
    """Timers, and the thread that serves them. Only that thread touches the heap. Other threads post entries and take no
    lock, since a destructor or a signal handler may set a timer anywhere."""

    def __init__(self, name: str, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._posted: deque[tuple[float, int, Timer]] = deque()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._alarm = threading.Lock()  # guards: nothing; it is released to wake the thread
        self._alarm.acquire()
        self._next = float("inf")  # when the thread will look again
        self._stopped = False  # set once; the thread looks at it after each sleep
        self.cancelled = 0  # entries to be removed, about: a lost addition only puts the tidying off
        self._thread = threading.Thread(target=self._run, name=f"remora-{name}-timers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` at `when`, on the timer thread; it must not block."""
        timer = Timer(when, action, self)
        self._posted.append((when, next(self._order), timer))
        if when < self._next:  # (after it was posted: the thread says when it will look, and then looks at what was posted)
            self._nudge()
        return timer

    def soon(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Call `action` after a short delay of Remora's own, which is no deadline of the program."""
        return self.at(self.clock.soon(seconds), action)

    @property
    def idle(self) -> bool:
        """Return True if nothing is due."""
        if self._stopped:
            return True
        return self._next > self.clock.now() and all(when >= self._next for when, _, _ in list(self._posted))

    def _nudge(self) -> None:
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # it is awake, or will be

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep. Return False if the time has passed and nothing else happened."""
        if self._posted or self._stopped:
            return True
        return self._alarm.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    def _run(self) -> None:
        while not self._stopped:
            due = self._due()
            if not due:
                self._next = self._heap[0][0] if self._heap else float("inf")
                self.clock.block(self._sleep, self._next, self._nudge)
                self._next = 0.0  # awake: no thread needs to wake it
                continue
            for timer in due:
                action, timer.action = timer.action, None
                if action is not None:
                    try:
                        action()
                    except BaseException:
                        log.exception("a timer failed")
            del due
        self._heap.clear()
        self._posted.clear()

    def _due(self) -> list[Timer]:
        heap = self._heap
        while self._posted:
            heapq.heappush(heap, self._posted.popleft())
        if self.cancelled > _COMPACT_ABOVE and self.cancelled * 2 > len(heap):
            self.cancelled = 0
            heap[:] = [entry for entry in heap if entry[2].action is not None]
            heapq.heapify(heap)
        due: list[Timer] = []
        now = self.clock.now()
        while heap and (heap[0][0] <= now or heap[0][2].action is None):
            due.append(heapq.heappop(heap)[2])
        return due

    def stop(self) -> None:
        self._stopped = True
        self._nudge()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(1.0)
