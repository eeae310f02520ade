"""A clock for tests: it stands still until it is moved, and then goes from one deadline to the next, each at its own time.

    with World(3, clock="virtual") as world:
        future = world.run(0, rpc.rpc_async, "worker1", busy, timeout=60)
        world.clock.advance(61)                   # a minute passes, in a moment
        future.wait()                             # raises CallTimeout

Between two deadlines everything that can happen happens: `advance` goes on when the world is still (`testing.stillness`).
With `clock="auto"` the clock moves by itself: when all threads wait, and nothing can happen but that time passes, one of the
waiting threads moves it on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from remora.clock import NEVER

T = TypeVar("T")

MOMENT = 0.001  # real seconds for which a thread waits before it looks at the clock again
GRACE = 0.05  # real seconds after which a running function is assumed to wait for something unknown
SETTLE_LIMIT = 2.0  # real seconds for the world to become still; else time goes on without


class Still(Protocol):
    """The view of a world that a clock needs (`remora.testing.stillness`)."""

    def under_way(self) -> str:
        """Return what Remora does or could do now; empty if nothing."""

    def at_work(self, asleep: set[threading.Thread]) -> dict[str, int]:
        """Return the number of threads that run code of the program, or for it, by worker."""

    def messages(self) -> int:
        """Return the number of messages that have arrived; signs of life are none."""


class _Sleeper:
    """A thread that waits."""

    def __init__(self, now: float, deadline: float, wake: Callable[[], None] | None) -> None:
        self.since = now
        self.thread = threading.current_thread()
        self.deadline = deadline
        self.wake = wake
        self.looks = 0  # how often it looked in vain; a thread that can be woken does not look


class VirtualClock:
    """A clock that stands still until it is moved. It begins at 0."""

    def __init__(self, auto: bool = False) -> None:
        self.auto = auto
        self.limit = 3600.0  # if time passes by itself: virtual seconds after which a wait is taken to be endless
        self.still: Still | None = None
        self._now = 0.0
        self._lock = threading.Lock()  # guards _sleepers
        self._sleepers: dict[_Sleeper, None] = {}
        self._turning = threading.RLock()  # held by the thread that moves the time
        self._last = threading.local()  # what the thread waited for last, and since when
        self._tolerated: dict[str, int] = {}  # threads that were at work for so long that the clock does not wait for them
        self._last_seen: dict[str, int] = {}
        self._last_change = 0.0

    # The operations of a `Clock`.

    def now(self) -> float:
        """Return the virtual seconds since it was made."""
        return self._now

    def soon(self, seconds: float) -> float:
        """Return now: short delays do not exist here."""
        return self._now

    def block(
        self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None
    ) -> T:
        """Wait by virtual time, as `remora.clock.Clock` says."""
        sleeper = _Sleeper(self._now, deadline, wake)
        if self.auto and wake is None:
            sleeper.since = self._waits_since(wait, deadline)
        with self._asleep(sleeper):
            if wake is not None:
                return wait(None if self._now < deadline else 0.0)
            while True:
                over = self._now >= deadline
                found = wait(0.0 if over else MOMENT)
                if not found and not over:
                    sleeper.looks += 1
                    found = self._turn(wait, sleeper) if self.auto else found
                if found or over:
                    return found

    def _waits_since(self, wait: Callable[[float | None], T], deadline: float) -> float:
        """Return when the current thread began to wait for this. A sign of life wakes a thread that reads a link: it looks,
        and goes on with the same wait."""
        until = round(deadline, 6) if deadline < NEVER else NEVER
        kind = id(getattr(wait, "__self__", wait)), until, self.still.messages() if self.still is not None else 0
        if getattr(self._last, "kind", None) != kind:
            self._last.kind, self._last.since = kind, self._now
        since: float = self._last.since
        return since

    @contextmanager
    def _asleep(self, sleeper: _Sleeper) -> Iterator[None]:
        with self._lock:
            self._sleepers[sleeper] = None
        try:
            yield
        finally:
            with self._lock:
                del self._sleepers[sleeper]

    # Moving it.

    def advance(self, seconds: float) -> None:
        """Move the time from one deadline to the next, and wait at each until all that follows from it is done."""
        if seconds < 0:
            raise ValueError(f"advance takes a number of seconds that is not negative, got {seconds}")
        if not seconds < NEVER:  # there is always another heartbeat
            raise ValueError(f"advance takes a finite number of seconds, got {seconds}")
        with self._turning:
            end = self._now + seconds
            self._settle()
            while (due := self._next()) <= end:
                self._go_to(due)
                self._settle()
            self._now = end

    def have_read(self) -> None:
        """Have all links read on which something came. Replies that no thread waits for may be left to the next tick of a
        worker, and that does not come while the time stands still."""
        if self.still is not None:
            self.still.under_way()

    @contextmanager
    def going(self) -> Iterator[None]:
        """Let time pass by itself inside the block, whenever all threads wait."""
        before, self.auto = self.auto, True
        try:
            yield
        finally:
            self.auto = before

    def _turn(self, wait: Callable[[float | None], T], sleeper: _Sleeper) -> T:
        """Move the time on if there is nothing else to do. A waiting thread calls this; return what came for it, if
        anything."""
        found = wait(0.0)
        if found or not self._turning.acquire(False):
            return found
        try:
            if self._is_still(tolerant=False) and not (found := wait(0.0)) and (due := self._next()) != NEVER:
                if due > sleeper.since + self.limit:
                    raise TimeoutError(f"nothing has come for {self.limit:g} s of virtual time: this wait would never end")
                self._go_to(due)
        finally:
            self._turning.release()
        return found

    def _next(self) -> float:
        with self._lock:
            return min((sleeper.deadline for sleeper in self._sleepers), default=NEVER)

    def _go_to(self, due: float) -> None:
        """Set the time, and wake the threads that waited for it. They have noticed when this returns."""
        self._now = max(due, self._now)
        with self._lock:
            woken = [sleeper for sleeper in self._sleepers if sleeper.deadline <= self._now]
        for sleeper in woken:
            if sleeper.wake is not None:
                sleeper.wake()
        me, end = threading.current_thread(), time.monotonic() + SETTLE_LIMIT
        while any(sleeper in self._sleepers for sleeper in woken if sleeper.thread is not me) and time.monotonic() < end:
            time.sleep(0.0001)

    # Being still.

    def _settle(self) -> None:
        end = time.monotonic() + SETTLE_LIMIT
        while not self._is_still(tolerant=True) and time.monotonic() < end:
            time.sleep(0.0002)

    def _is_still(self, tolerant: bool) -> bool:
        """Return True if nothing can happen. Each waiting thread must have looked in vain since nothing was under way."""
        before = self._looks()
        if not self._nothing_happens(tolerant):
            return False
        while (seen := self._looks()).keys() == before.keys():
            if all(seen[sleeper] >= before[sleeper] + 2 for sleeper in seen):
                return self._nothing_happens(tolerant) and self._looks().keys() == before.keys()
            time.sleep(MOMENT / 4)
        return False

    def _looks(self) -> dict[_Sleeper, int]:
        """Return how often each polling thread has looked; without the current thread, which is not asleep."""
        me = threading.current_thread()
        with self._lock:
            return {each: each.looks for each in self._sleepers if each.wake is None and each.thread is not me}

    def _nothing_happens(self, tolerant: bool) -> bool:
        if self.still is None:
            return True
        with self._lock:
            asleep = {sleeper.thread for sleeper in self._sleepers} | {threading.current_thread()}
        working = {name: n for name, n in self.still.at_work(asleep).items() if n > 0}
        return not self.still.under_way() and (self._tolerates(working) if tolerant else not working)

    def _tolerates(self, working: dict[str, int]) -> bool:
        """Return True if the clock need not wait for the running functions: they have run for a while, and nothing else
        happened."""
        now = time.monotonic()
        if working != self._last_seen:
            self._last_seen, self._last_change = working, now
        self._tolerated = {name: min(n, working.get(name, 0)) for name, n in self._tolerated.items()}
        if now - self._last_change > GRACE:
            self._tolerated = dict(working)
        return all(n <= self._tolerated.get(name, 0) for name, n in working.items())

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now:.3f} s, {len(self._sleepers)} threads wait>"
