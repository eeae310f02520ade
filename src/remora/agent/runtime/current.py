"""The state of the current thread (its pool, its task, the worker for which it acts), and the worker of this process.

Each thread reads and writes only its own state, so no lock guards it. A thread that is about to wait for something remote
releases its slot in the pool (`blocking_region`): that is rule C2 of `remora.agent.runtime.pool`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from remora.clock import SYSTEM, Clock
from remora.errors import FORKED, NotInitialized


class SlotPool(Protocol):
    """The operations of a pool (`remora.agent.runtime.pool.WorkerPool`) that a thread needs when it blocks."""

    def about_to_block(self) -> None: ...
    def release_slot(self) -> None: ...
    def reacquire_slot(self) -> None: ...


class _ThreadState(threading.local):
    """The state of one thread. The class attributes are the state of a thread of the program."""

    pool: SlotPool | None = None
    in_user_task = False
    handling_events_of: SlotPool | None = None  # the pool whose events it handles; it runs the pool's system tasks next
    worker: Any = None  # the worker for which the thread acts


thread_state = _ThreadState()


class _ProcessState:
    """The one current worker of this process. One assignment changes it, and any thread reads it: no lock guards it."""

    worker: Any = None  # between `init_rpc` and `shutdown`
    forked_from = ""  # the name of the worker that the parent of this process had when it forked


process_state = _ProcessState()


def acting_worker(otherwise: str = "RPC has not been initialized. Call remora.rpc.init_rpc first.") -> Any:
    """Return the worker for which the current thread acts: that whose function it runs, else that of the process. If there
    is none, the error says `otherwise`."""
    worker = thread_state.worker or process_state.worker
    if worker is None:
        forked = f" {FORKED.format(name=process_state.forked_from)}" if process_state.forked_from else ""
        raise NotInitialized(otherwise + forked)
    return worker


def current_worker() -> Any:
    """Return the worker whose function the current thread runs; None on threads of the program."""
    return thread_state.worker


def current_clock() -> Clock:
    """Return the clock of the worker for which the current thread acts; the system's for any other thread."""
    return getattr(thread_state.worker, "clock", SYSTEM)


def reset_in_fork() -> None:
    """Reset the state in a forked child. The worker stayed with the parent; the only thread may have been its."""
    if process_state.worker is not None:
        process_state.forked_from = process_state.worker.get_worker_info().name
        process_state.worker = None
    thread_state.pool = thread_state.handling_events_of = None
    thread_state.in_user_task = False
    thread_state.worker = None


def set_current_worker(worker: object) -> object:
    """Make calls of the current thread calls of `worker`. Return the worker for which it acted before."""
    before, thread_state.worker = thread_state.worker, worker
    return before


@contextmanager
def blocking_region() -> Iterator[None]:
    """Wrap a wait for something remote: if this thread runs a user task, its slot is free meanwhile."""
    pool = release_slot()
    try:
        yield
    finally:
        if pool is not None:
            reacquire_slot(pool)


def release_slot() -> SlotPool | None:
    """Begin a `blocking_region` without a context manager, which costs time. Return the pool if this thread had a slot."""
    pool = thread_state.pool
    if not thread_state.in_user_task or pool is None:
        if pool is not None:
            pool.about_to_block()  # a system task has no slot, but another thread must handle what comes
        return None
    thread_state.in_user_task = False
    pool.release_slot()
    return pool


def reacquire_slot(pool: SlotPool) -> None:
    """End what `release_slot` began."""
    pool.reacquire_slot()
    thread_state.in_user_task = True
