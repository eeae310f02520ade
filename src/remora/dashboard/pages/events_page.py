"""Events: who joined, was suspected, left or died, connections, refusals, injected faults; calls too if asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.pages.rows import EVENTS, RARE, event_rows
from remora.dashboard.table import View, table
from remora.observer.model import EventKind

PARTS = ("events",)
FAILED = frozenset({EventKind.CALL_FAILED, EventKind.RUN_FAILED})
CHOICES = {"group": RARE, "failed": FAILED, "all": frozenset(EventKind)}


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    chosen = arguments.get("show", "group")
    rows = event_rows(moment, CHOICES.get(chosen, RARE | FAILED))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["kind"]] = counts.get(row["kind"], 0) + 1
    return {"show": chosen, "counts": counts, "events": table(EVENTS, rows, View.of(arguments), name="events")}
