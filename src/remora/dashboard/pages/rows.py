"""Columns and rows that several pages show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remora.dashboard.moment import CallEnds, Moment
from remora.dashboard.table import Column, Row
from remora.observer.model import Event, EventKind, WorkerSnapshot

CALLS = (
    Column("age", "Age", "seconds", hint="since the call was made"),
    Column("key", "Call", "call", narrow=False, hint="the caller's name and its number there"),
    Column("function", "Function", "function"),
    Column("from", "From", "worker"),
    Column("to", "To", "worker"),
    Column("stage", "Stage", "state"),
    Column("left", "Deadline in", "seconds", narrow=False),
    Column("bytes", "Size", "bytes", narrow=False),
    Column("kind", "Kind", narrow=False),
)

EVENTS = (
    Column("time", "Time", "time"),
    Column("worker", "Worker", "worker"),
    Column("kind", "Event", "state"),
    Column("peer", "Peer", "worker"),
    Column("text", "What happened"),
    Column("call", "Call", "call", narrow=False),
)

# What is no call: seldom, and what a reader looks for.
RARE = frozenset(
    {
        EventKind.JOINED, EventKind.SUSPECTED, EventKind.RECOVERED, EventKind.LEFT, EventKind.DIED, EventKind.CONNECTED,
        EventKind.DISCONNECTED, EventKind.REFUSED, EventKind.FAULT,
    }
)  # fmt: skip


def call_row(call: CallEnds) -> Row:
    each = call.any
    return {
        "key": str(each.key),
        "age": call.age,
        "function": each.function,
        "from": each.key.caller,
        "to": each.callee,
        "stage": call.stage.value,
        "left": None if call.at_caller is None else call.at_caller.left,
        "bytes": max(end.bytes for end in (call.at_caller, call.at_callee) if end),
        "kind": each.kind,
    }


def event_rows(moment: Moment, kinds: Iterable[EventKind], worker: str = "") -> list[Row]:
    """The newest first."""
    kinds = frozenset(kinds)
    found = [
        (each.time, name, each)
        for name, each in moment.history.all_events()
        if each.kind in kinds and worker in ("", name, each.peer)
    ]
    found.sort(key=lambda item: (-item[0], item[1]))
    return [event_row(name, each) for _, name, each in found]


def event_row(worker: str, event: Event) -> Row:
    return {
        "time": event.time,
        "worker": worker,
        "kind": event.kind.value,
        "peer": event.peer,
        "text": " ".join(filter(None, [event.text, event.function if event.call else None])),
        "call": None if event.call is None else str(event.call),
    }


def worker_facts(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "host": worker.host,
        "pid": worker.pid,
        "up": worker.up,
        "program": worker.program,
        "versions": worker.versions,
        "resident": worker.memory.resident,
        "interpreter_wait": worker.interpreter_wait,
    }
