"""Locks on which a thread does not wait unless it asks to, and that know the thread that holds them.

A thread may find a lock of ours held by itself: a signal handler interrupts the frame that holds it, or the garbage
collector runs a destructor inside the critical section. A plain lock would then wait for a frame that cannot go on. So
a thread *takes* a turn if it is free, and otherwise leaves what it wanted done with the holder (in a queue), or learns
that the holder is a frame of its own (`mine`).

An exception from a signal handler can interrupt the main thread after any call of a C function, at the start of a Python
function and at the end of a turn of a loop; nowhere else. Hence the form of a critical section:

    if turn.take():
        try:
            ...
        finally:
            turn.free[0] = True     # no call, so nothing can interrupt before it

`take` returns without a point where it can be interrupted, and `try` begins without one. (A method `release` has one at its
start.) """

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import TIMEOUT_MAX, Lock, get_ident, main_thread
from time import monotonic
from weakref import WeakSet

# Longest sleep of a thread that waits for another. An exception may stop the other after its release, before it wakes us.
RECHECK = 0.02  # seconds


_MAIN = main_thread().ident


def _note_main_thread() -> None:
    """Note, in a forked child, that the forking thread is its main thread."""
    global _MAIN
    _MAIN = get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)


def may_be_struck() -> bool:
    """Return True if signal handlers run on this thread: an exception from one can interrupt it anywhere."""
    return get_ident() == _MAIN


_needed: WeakSet[TryLock] = WeakSet()
GIVEN_UP_AFTER = 1.0  # seconds


def blocks_itself() -> bool:
    """Return True if a frame of the current thread holds a lock that an answer may need. Asked when a wait has lasted for
    `GIVEN_UP_AFTER`: only a signal handler or a destructor waits like that, and the frame below cannot go on meanwhile."""
    while True:
        try:
            return any(turn.mine() for turn in _needed)
        except RuntimeError:
            continue  # another thread made a channel meanwhile


def explain_block(what: str) -> str:
    """Return the text of the error for a wait that `blocks_itself`."""
    return (
        f"{what}: a signal handler or destructor waits for it and interrupts a step of Remora on the same thread. That step "
        f"cannot go on before the wait ends, and the answer may need it. The wait was given up after {GIVEN_UP_AFTER:g} s. "
        f"Use rpc_async there, or make the call on another thread."
    )


class TryLock:
    """A lock of one critical section. `free` has one entry while no thread has the turn. To take it is to delete that
    entry: one instruction, so one thread gets it, and no call, so nothing interrupts before the thread knows."""

    __slots__ = ("__weakref__", "_thread", "free", "waiters")

    def __init__(self, needed: bool = False) -> None:
        """Make a free lock. `needed`: other threads may need it to complete a call that waits (see `blocks_itself`)."""
        self.free: dict[int, bool] = {0: True}
        self._thread = 0  # the last that took it; the number is a new object each time
        self.waiters = Waiters()
        if needed:
            _needed.add(self)

    def take(self) -> bool:
        """Take the lock if it is free. Does not wait."""
        me = get_ident()
        try:
            del self.free[0]
        except KeyError:
            return False
        self._thread = me  # (no call since: neither an exception nor another thread comes in between)
        return True

    def mine(self) -> bool:
        """Return True if a frame of the current thread holds it."""
        return not self.free and self._thread == get_ident()

    def locked(self) -> bool:
        """Return True if some thread holds it."""
        return not self.free

    def holder(self) -> int | None:
        """Return the id of the thread that holds it. The identity of that object differs from one turn to the next."""
        return None if self.free else self._thread

    def renew(self) -> None:
        """For its holder: begin another turn, so that other threads see that it goes on."""
        self._thread = get_ident()

    def wait(self, seconds: float) -> bool:
        """Take it, waiting for another thread that holds it. Return False at the end of the time, and at once if a frame of
        this thread holds it, which cannot go on before this returns."""
        end = monotonic() + seconds
        while not self.take():
            if self.mine():
                return False
            left = end - monotonic()
            if left <= 0:
                return False
            self.waiters.wait(lambda: bool(self.free), min(left, RECHECK))
        return True

    def __enter__(self) -> None:
        """Wait for the lock. For threads that no signal handler interrupts."""
        if not self.wait(TIMEOUT_MAX):
            raise RuntimeError("this thread holds the lock already")

    def __exit__(self, *error: object) -> None:
        self.free[0] = True
        self.waiters.notify()


class Waiters:
    """Threads that wait for a condition. No lock is held while one notifies another. If an exception interrupts the
    notifying thread, the others wake late, not never (`RECHECK`)."""

    __slots__ = ("asleep",)

    def __init__(self) -> None:
        self.asleep: deque[Lock] = deque()  # one for each; others look at it only to see whether it is empty

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> bool:
        """Sleep until `ready` returns True, for `seconds` at most. Return what it returned last."""
        end = None if seconds is None else monotonic() + seconds
        alarm = Lock()
        alarm.acquire()
        try:
            self.asleep.append(alarm)  # first: a change after this look is told
            while not ready():
                left = RECHECK if end is None else min(end - monotonic(), RECHECK)
                if left <= 0:
                    return ready()
                alarm.acquire(timeout=left)
            return True
        finally:
            if alarm in self.asleep:
                self.asleep.remove(alarm)

    def notify(self) -> None:
        """Wake all of them to check again."""
        for alarm in list(self.asleep):
            try:
                alarm.release()
            except RuntimeError:
                pass  # it is awake
