"""Overview: all workers at a glance, what is wrong first, calls a second and their latency over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.pages.rows import EVENTS, RARE, event_rows
from remora.dashboard.table import Column, Row, View, table

PARTS: tuple[str, ...] = ()
MANY = 100  # workers: beyond, cells and bars instead of a line for each
LINES = 40  # then: those with trouble, and some others
SPARK = 60  # points of a small curve
TROUBLE = {"dead": 0, "unreachable": 1, "silent": 2, "refused": 3, "suspected": 4, "busy": 5, "alive": 6, "left": 7}

WORKERS = (
    Column("state", "State", "state"),
    Column("worker", "Worker", "worker"),
    Column("reason", "Why", narrow=False),
    Column("served", "Served /s", "rate", hint="calls that ended here"),
    Column("curve", "", "spark", narrow=False),
    Column("running", "Running", "bar", hint="functions that run now, of the threads of the pool"),
    Column("queued", "Queued", "count", hint="calls that wait for a thread of the pool"),
    Column("oldest", "Oldest call", "seconds", narrow=False, hint="that it makes or serves"),
    Column("cpu", "CPU", "percent", narrow=False),
    Column("resident", "Memory", "bytes"),
    Column("host", "Host", narrow=False),
)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    rows = worker_rows(moment)
    many = len(rows) > MANY
    history = moment.history
    return {
        "totals": _totals(moment),
        "curves": history.group.tell("served", "made", "failed", "p50", "p99", "resident", "queued", "running"),
        "cells": [[row["worker"], row["state"], row["load"]] for row in by_rank(moment, rows)] if many else None,
        "bars": {"queued": _bars(rows, "queued"), "served": _bars(rows, "served")} if many else None,
        "workers": table(WORKERS, rows, View.of(arguments, LINES if many else MANY), name="workers"),
        "events": table(EVENTS, event_rows(moment, RARE)[:8], View(), name="events"),
    }


def worker_rows(moment: Moment) -> list[Row]:
    """A line for each worker, those with trouble first."""
    oldest = _oldest_calls(moment)
    suspected = _suspected(moment)
    rows = [_row(moment, name, oldest, suspected) for name in moment.workers]
    rows += [_missing_row(moment, name) for name in moment.missing]
    places = {name: place for place, name in enumerate(moment.names)}
    rows.sort(key=lambda row: (TROUBLE.get(row["state"], 0), places[row["worker"]]))
    return rows


def by_rank(moment: Moment, rows: Sequence[Row]) -> list[Row]:
    found = {row["worker"]: row for row in rows}
    return [found[name] for name in moment.names]


def _row(moment: Moment, name: str, oldest: dict[str, float], suspected: dict[str, str]) -> Row:
    worker = moment.workers[name]
    series = moment.history.workers[name]
    pool = worker.pool
    full = pool.limit > 0 and pool.running >= pool.limit and pool.queued > 0
    why = suspected.get(name, "")
    return {
        "worker": name,
        "state": "suspected" if why else "busy" if full else "alive",
        "served": series.last("served"),
        "curve": series.tell("served", points=SPARK)["served"],
        "running": [pool.running, pool.limit],
        "load": min(pool.running / pool.limit, 1.0) if pool.limit else 0.0,
        "queued": pool.queued,
        "oldest": oldest.get(name),
        "cpu": series.last("cpu"),
        "resident": worker.memory.resident,
        "host": worker.host,
        "reason": why or (f"all {pool.limit} threads of the pool are taken" if full else ""),
    }


def _missing_row(moment: Moment, name: str) -> Row:
    missing = moment.missing[name]
    return {
        "worker": name,
        "state": missing.state,
        "reason": missing.reason,
        "host": missing.host,
        "running": None,
        "curve": None,
        "load": 0.0,
    }


def _oldest_calls(moment: Moment) -> dict[str, float]:
    oldest: dict[str, float] = {}
    for call in moment.calls.values():  # the oldest first
        for name in (call.any.key.caller, call.any.callee):
            oldest.setdefault(name, call.age)
    return oldest


def _suspected(moment: Moment) -> dict[str, str]:
    """The suspected workers, with the workers that suspect them and the reasons. Not known in a large
    group, whose links are not asked for: events tell it."""
    found: dict[str, str] = {}
    for worker in moment.snapshot.workers:
        for link in worker.links:
            if link.state == "suspected":
                found.setdefault(link.peer, f"suspected by {worker.name}: {link.reason}".removesuffix(": "))
    return found


def _totals(moment: Moment) -> dict[str, Any]:
    workers = moment.snapshot.workers
    group = moment.history.group
    oldest = next(iter(moment.calls.values()), None)
    return {
        "alive": len(workers),
        "all": len(moment.names) - sum(each.state == "left" for each in moment.snapshot.missing),
        "served": group.last("served"),
        "failed": group.last("failed"),
        "p50": group.last("p50"),
        "p99": group.last("p99"),
        "in_flight": len(moment.calls) + moment.left_out("calls"),
        "oldest": None if oldest is None else oldest.age,
        "oldest_call": None if oldest is None else str(oldest.any.key),
        "queued": sum(each.pool.queued for each in workers),
        "running": sum(each.pool.running for each in workers),
        "limit": sum(each.pool.limit for each in workers),
        "resident": sum(each.memory.resident for each in workers),
        "shared": sum(each.memory.shared_own for each in workers),
    }


def _bars(rows: Sequence[Row], key: str, bins: int = 20) -> dict[str, Any]:
    """The numbers of workers in evenly wide bins, from nothing to the most."""
    values = [row[key] for row in rows if row.get(key) is not None]
    most = max(values, default=0) or 1
    width = most / bins if most > bins else 1
    counts = [0] * bins
    for value in values:
        counts[min(int(value / width), bins - 1)] += 1
    return {"width": width, "counts": counts}
