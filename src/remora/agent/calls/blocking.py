"""Blocks a thread until something has happened, by the clock of its worker. Its slot in the pool is free meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from remora.agent.runtime.current import blocking_region, current_clock
from remora.agent.runtime.try_lock import GIVEN_UP_AFTER, blocks_itself, explain_block
from remora.clock import NEVER, SYSTEM, Clock
from remora.errors import CallOutcomeUnknown, NotInitialized
from remora.long_wait import LongWait


def block_until(
    subscribe: Callable[[Callable[[object], None]], None],
    timeout: float | None,
    what: str,
    clock: Clock | None = None,
    began: float | None = None,
    unsubscribe: Callable[[Callable[[object], None]], None] | None = None,
) -> None:
    """Block this thread until the callback given to `subscribe` is called. Ctrl-C works, and other threads run. If it
    was in vain, the callback is given to `unsubscribe`: there will often be another wait."""
    if sys.is_finalizing():
        raise going_down(what)
    clock = clock or current_clock()
    began = clock.now() if began is None else began
    signal = threading.Lock()
    signal.acquire()

    def wake(_: object) -> None:
        try:
            signal.release()
        except RuntimeError:
            pass  # it has been called before

    subscribe(wake)

    def wait(seconds: float | None) -> bool:
        left = threading.TIMEOUT_MAX if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        if left <= GIVEN_UP_AFTER:
            return signal.acquire(timeout=left)
        if signal.acquire(timeout=GIVEN_UP_AFTER):
            return True
        if blocks_itself():
            raise CallOutcomeUnknown(explain_block(what))
        return signal.acquire(timeout=left - GIVEN_UP_AFTER)

    came = False
    try:
        with blocking_region():
            came = clock.block(wait, NEVER if timeout is None else began + max(timeout, 0.0))
    finally:
        if not came and unsubscribe is not None:
            unsubscribe(wake)
    if not came:
        raise TimeoutError(f"{what} is not done after waiting for {timeout} s")


def wait_until(
    ready: Callable[[], bool],
    deadline: float,
    clock: Clock = SYSTEM,
    pause: float = 0.005,
    report: LongWait | None = None,
) -> bool:
    """Look again and again until `ready` says so or the deadline passes. For the slow paths of joining and leaving.
    `report` says what is waited for, if that takes long."""

    def look(seconds: float | None) -> bool:
        end = time.monotonic() + (NEVER if seconds is None else seconds)
        while not ready():
            if (left := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            if report is not None:
                report.look()
        return True

    with blocking_region():
        return clock.block(look, deadline)


def going_down(what: str) -> NotInitialized:
    """The error for what would have to wait, or to lock, while the interpreter goes down: no other thread runs any
    more, and those that are gone may have held any lock."""
    return NotInitialized(f"{what}: the interpreter is going down")
