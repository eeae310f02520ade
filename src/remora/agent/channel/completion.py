"""Passes the outcomes of asynchronous calls on: to their futures, and to callbacks of the program."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from remora.agent.calls.call import Call
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.try_lock import may_be_struck

log = logging.getLogger("remora")


def settle(call: Call) -> None:
    """Pass it on now."""
    try:
        call.finish()
    except BaseException:
        if may_be_struck():
            raise  # the call can still be passed on: see `Call.finish`
        log.exception("the outcome of the %s could not be passed on", call.what)


def have_settled(pool: WorkerPool, calls: Sequence[Call]) -> None:
    """Have the pool pass them on, though it may be going home: they are on no list any more. None waits for another: a
    callback may wait for the outcome of the next call."""
    if calls:
        pool.submit_final(_Settling(pool, calls))


class _Settling:
    """Several calls, of which a thread completes one after the other. Before each, it has another thread come for the rest,
    should it be kept by that one."""

    __slots__ = ("_another", "_calls", "_pool")

    def __init__(self, pool: WorkerPool, calls: Sequence[Call]) -> None:
        self._pool = pool
        self._calls = deque(calls)
        self._another = True  # is on its way, and has not begun

    def __call__(self) -> None:
        self._another = False
        calls = self._calls
        while calls:
            try:
                call = calls.popleft()
            except IndexError:
                return  # another thread was quicker
            if calls and not self._another:
                self._another = True
                self._pool.submit_final(self)
            settle(call)
