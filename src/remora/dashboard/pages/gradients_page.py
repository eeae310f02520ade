"""Distributed backward passes: their phase, the workers in them, and what each still owes to which other; one pass alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.table import Column, Row, View, table
from remora.observer.model import PassStatus

PARTS = ("passes", "waits")

PASSES = (
    Column("context", "Pass", "pass"),
    Column("started_by", "Started by", "worker"),
    Column("age", "Age", "seconds"),
    Column("phase", "Phase", "state"),
    Column("workers", "Workers", "workers"),
    Column("owed", "Gradients owed", "count"),
    Column("behind", "Waits for", "workers"),
)
PARTS_OF_PASS = (
    Column("worker", "Worker", "worker"),
    Column("phase", "Phase", "state"),
    Column("age", "Age", "seconds"),
    Column("owes", "Has to send", "count"),
    Column("owes_to", "To", "workers"),
    Column("awaits", "Waits for", "count"),
    Column("awaits_from", "From", "workers"),
)

_Parts = list[tuple[str, PassStatus]]


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    passes: dict[str, _Parts] = {}
    for worker in moment.snapshot.workers:
        for each in worker.passes:
            passes.setdefault(_key(each), []).append((worker.name, each))
    if path:
        return _one(path[0], passes.get(path[0], []))
    rows = sorted((_row(key, parts) for key, parts in passes.items()), key=lambda row: -row["age"])
    return {"passes": table(PASSES, rows, View.of(arguments), name="backward passes")}


def _key(each: PassStatus) -> str:
    return f"{each.context}.{each.number}"


def _row(key: str, parts: _Parts) -> Row:
    phases = sorted({each.phase for _, each in parts})
    return {
        "context": key,
        "started_by": parts[0][1].started_by,
        "age": max(each.age for _, each in parts),
        "phase": ", ".join(phases),
        "workers": [name for name, _ in parts],
        "owed": sum(sum(each.owes.values()) for _, each in parts),
        "behind": sorted({name for _, each in parts for name, count in each.awaits.items() if count}),
    }


def _one(key: str, parts: _Parts) -> dict[str, Any]:
    rows = [
        {
            "worker": name,
            "phase": each.phase,
            "age": each.age,
            "owes": sum(each.owes.values()),
            "owes_to": sorted(each.owes),
            "awaits": sum(each.awaits.values()),
            "awaits_from": sorted(each.awaits),
        }
        for name, each in parts
    ]
    # What one says that it owes, and the other that it waits for: the larger counts, since either may be a moment old.
    owed: dict[tuple[str, str], int] = {}
    for name, each in parts:
        for to, count in each.owes.items():
            owed[name, to] = max(owed.get((name, to), 0), count)
        for origin, count in each.awaits.items():
            owed[origin, name] = max(owed.get((origin, name), 0), count)
    return {
        "key": key,
        "found": bool(parts),
        "summary": _row(key, parts) if parts else None,
        "parts": table(PARTS_OF_PASS, rows, View(), name="workers of the pass"),
        "owed": [[origin, to, count] for (origin, to), count in sorted(owed.items()) if count],
    }
