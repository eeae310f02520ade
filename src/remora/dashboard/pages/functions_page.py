"""Functions: how long calls of each took, queued and ran; one function with its histograms, over time, and by peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.history import Buckets, combine
from remora.dashboard.moment import Moment
from remora.dashboard.pages.rows import CALLS, call_row
from remora.dashboard.table import Column, Row, View, table
from remora.observer.model import Histogram

PARTS = ("histograms", "calls")
MEASURES = ("call", "queue", "run")

FUNCTIONS = (
    Column("function", "Function", "function"),
    Column("count", "Calls", "count"),
    Column("rate", "Calls /s", "rate"),
    Column("curve", "", "spark", narrow=False),
    Column("failed", "Failed", "count"),
    Column("p50", "Median", "seconds"),
    Column("p99", "99 %", "seconds"),
    Column("longest", "Longest", "seconds", narrow=False),
    Column("queue", "Queued 99 %", "seconds", narrow=False, hint="waiting for a thread of the callee"),
    Column("run", "Runs", "seconds", narrow=False, hint="the median of running at the callee"),
    Column("share", "Of all time", "percent", narrow=False),
)
PAIRS = (
    Column("measure", "Measure"),
    Column("worker", "Worker", "worker"),
    Column("peer", "Peer", "worker"),
    Column("count", "Calls", "count"),
    Column("failed", "Failed", "count"),
    Column("p50", "Median", "seconds"),
    Column("p99", "99 %", "seconds"),
    Column("longest", "Longest", "seconds"),
)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    return _one(moment, path[0], arguments) if path else _all(moment, arguments)


def _all(moment: Moment, arguments: Mapping[str, str]) -> dict[str, Any]:
    histograms = [each for worker in moment.snapshot.workers for each in worker.histograms]
    by_measure = {
        measure: combine((each for each in histograms if each.measure == measure), lambda each: each.function)
        for measure in MEASURES
    }
    names = {each.function for each in histograms}
    total = sum(found.total for found in by_measure["call"].values())
    rows = [
        _row(moment, name, {measure: found.get(name) for measure, found in by_measure.items()}, total) for name in names
    ]
    rows.sort(key=lambda row: (-(row["total"] or 0), row["function"]))
    left_out = moment.left_out("histograms")
    return {"functions": table(FUNCTIONS, rows, View.of(arguments), name="functions"), "left_out": left_out}


def _row(moment: Moment, name: str, found: Mapping[str, Buckets | None], total: float) -> Row:
    whole = found["call"] or found["run"] or Buckets()
    series = moment.history.functions.get(name)
    queue, run = found["queue"], found["run"]
    return {
        "function": name,
        "count": whole.count,
        "failed": whole.failed,
        "rate": None if series is None else series.last("rate"),
        "curve": None if series is None else series.tell("rate", points=60)["rate"],
        "p50": whole.quantile(0.5),
        "p99": whole.quantile(0.99),
        "longest": whole.longest,
        "queue": None if queue is None else queue.quantile(0.99),
        "run": None if run is None else run.quantile(0.5),
        "total": whole.total,
        "share": whole.total / total if total else None,
    }


def _one(moment: Moment, name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    found = [
        (worker.name, each) for worker in moment.snapshot.workers for each in worker.histograms if each.function == name
    ]
    measures = combine((each for _, each in found), lambda each: each.measure)
    series = moment.history.functions.get(name)
    pairs = sorted((_pair(worker, each) for worker, each in found), key=lambda row: -(row["p99"] or 0))
    calls = [call_row(call) for call in moment.calls.values() if call.any.function == name]
    return {
        "function": name,
        "measures": {measure: _bars(measures[measure]) for measure in MEASURES if measure in measures},
        "curves": None if series is None else series.tell("rate", "failed", "p50", "p99"),
        "pairs": table(PAIRS, pairs, View.of(arguments), name="workers"),
        "calls": table(CALLS, calls, View(limit=50), name="calls"),
    }


def _pair(worker: str, each: Histogram) -> Row:
    alone = Buckets()
    alone.add(each)
    return {
        "measure": each.measure,
        "worker": worker,
        "peer": each.peer,
        "count": each.count,
        "failed": each.failed,
        "p50": alone.quantile(0.5),
        "p99": alone.quantile(0.99),
        "longest": each.longest,
    }


def _bars(found: Buckets) -> dict[str, Any]:
    first, last = min(found.counts, default=0), max(found.counts, default=0)
    return {
        "first": first,
        "counts": [found.counts[bucket] for bucket in range(first, last + 1)],
        "count": found.count,
        "failed": found.failed,
        "mean": found.total / found.count if found.count else None,
        "p50": found.quantile(0.5),
        "p90": found.quantile(0.9),
        "p99": found.quantile(0.99),
        "longest": found.longest,
    }
