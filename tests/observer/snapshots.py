"""Snapshots made up for tests, in few words."""

from __future__ import annotations

from typing import Any

from remora.observer.model import (
    CallKey,
    CallStatus,
    GroupSnapshot,
    Missing,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)

MAIN, POOL, OTHER = 1, 2, 3
THREADS = (
    ThreadStatus(id=MAIN, name="MainThread", role="main", stack=("train.py:9 <module>", "train.py:30 step")),
    ThreadStatus(id=POOL, name="pool-0", role="pool", stack=("train.py:40 serve",)),
    ThreadStatus(id=OTHER, name="pool-1", role="pool", stack=("train.py:50 other",)),
)


def worker(name: str, **fields: Any) -> WorkerSnapshot:
    """A worker with three threads."""
    fields = {"rank": 0, "pid": 17, "host": "here", "time": 100.0, "up": 60.0, "threads": THREADS, **fields}
    return WorkerSnapshot(name=name, group="g" * 32, incarnation=f"{name}-1", **fields)


def group(*workers: WorkerSnapshot, missing: tuple[Missing, ...] = (), **fields: Any) -> GroupSnapshot:
    """A group whose clocks agree."""
    fields = {"clock_offsets": {each.name: 0.0 for each in workers}, **fields}
    return GroupSnapshot(group="g" * 32, time=100.0, workers=workers, missing=missing, **fields)


def gone(name: str, state: str = "silent", reason: str = "its process is stopped (SIGSTOP)", **fields: Any) -> Missing:
    """A worker that gave no snapshot."""
    return Missing(name=name, rank=None, state=state, reason=reason, **fields)


def key(text: str) -> CallKey:
    """Of "worker0#5"."""
    caller, _, number = text.partition("#")
    return CallKey(caller=caller, id=int(number))


def call(
    name: str,
    callee: str,
    function: str,
    stage: Stage,
    age: float = 10.0,
    thread: int | None = None,
    makes: str | None = None,
) -> CallStatus:
    """One half of a call."""
    return CallStatus(
        key=key(name),
        callee=callee,
        function=function,
        kind="PYTHON_CALL",
        stage=stage,
        age=age,
        thread=thread,
        makes=makes,
    )


def waits(kind: WaitKind, thread: int | None = MAIN, age: float | None = 10.0, **fields: Any) -> WaitStatus:
    """A wait. Calls are named as texts."""
    for each in ("call", "serving"):
        if each in fields:
            fields[each] = key(fields[each])
    return WaitStatus(kind=kind, text=fields.pop("text", ""), age=age, thread=thread, **fields)


def waits_for(name: str, **fields: Any) -> WaitStatus:
    """A wait for the answer to a call."""
    return waits(WaitKind.CALL, call=name, **fields)
