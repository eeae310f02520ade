"""One worker: what it is, its load over time, its calls, threads, references and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.pages.overview_page import by_rank, worker_rows
from remora.dashboard.pages.rows import CALLS, EVENTS, RARE, call_row, event_rows, worker_facts
from remora.dashboard.pages.stacks_page import describe_thread
from remora.dashboard.table import Column, View, table

PARTS = ("calls", "waits", "threads", "owned", "held")

WAITS = (
    Column("kind", "Waits for", "state"),
    Column("text", "What"),
    Column("age", "For", "seconds"),
    Column("call", "Call", "call"),
    Column("thread", "Thread", "thread", narrow=False),
    Column("serving", "While it serves", "call", narrow=False),
)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    if not path:
        return {"workers": [[row["worker"], row["state"]] for row in by_rank(moment, worker_rows(moment))]}
    name = path[0]
    worker, missing = moment.workers.get(name), moment.missing.get(name)
    calls = [call_row(call) for call in moment.calls.values()]
    found: dict[str, Any] = {
        "worker": name,
        "row": next((row for row in worker_rows(moment) if row["worker"] == name), None),
        "missing": None if missing is None else asdict(missing),
        "made": table(CALLS, [row for row in calls if row["from"] == name], View(limit=50), name="calls it makes"),
        "serves": table(CALLS, [row for row in calls if row["to"] == name], View(limit=50), name="calls it serves"),
        "events": table(EVENTS, event_rows(moment, RARE, name), View(limit=50), name="events"),
    }
    series = moment.history.workers.get(name)
    if series is not None:
        found["curves"] = series.tell("served", "made", "failed", "cpu", "resident", "queued", "running")
    if worker is not None:
        found["facts"] = worker_facts(worker)
        found["memory"] = asdict(worker.memory)
        found["pool"] = asdict(worker.pool)
        found["threads"] = [describe_thread(moment, name, each) for each in worker.threads]
        found["owned"] = len(worker.owned) + worker.left_out.get("owned", 0)
        found["held"] = len(worker.held) + worker.left_out.get("held", 0)
        found["waits"] = table(WAITS, [_wait_row(name, each) for each in worker.waits], View(limit=100), name="waits")
    return found


def _wait_row(worker: str, wait: Any) -> dict[str, Any]:
    return {
        "kind": wait.kind.value,
        "text": wait.text,
        "age": wait.age,
        "call": None if wait.call is None else str(wait.call),
        "thread": None if wait.thread is None else [worker, wait.thread],
        "serving": None if wait.serving is None else str(wait.serving),
    }
