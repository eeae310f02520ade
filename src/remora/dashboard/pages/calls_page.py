"""Calls under way, the oldest first; and one call: what it waits for, down to the stack that holds it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import CallEnds, Moment
from remora.dashboard.pages.chain import chain_of
from remora.dashboard.pages.rows import CALLS, call_row, event_row
from remora.dashboard.table import View, table

PARTS = ("calls", "waits", "threads", "owned", "passes")
EVENTS_OF_CALL = 50


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    return _one(moment, path[0]) if path else _all(moment, arguments)


def _all(moment: Moment, arguments: Mapping[str, str]) -> dict[str, Any]:
    rows = [call_row(call) for call in moment.calls.values()]
    stages: dict[str, int] = {}
    for row in rows:
        stages[row["stage"]] = stages.get(row["stage"], 0) + 1
    return {
        "stages": stages,
        "calls": table(CALLS, rows, View.of(arguments), left_out=moment.left_out("calls"), name="calls"),
    }


def _one(moment: Moment, key: str) -> dict[str, Any]:
    call = moment.calls.get(key)
    children = [call_row(each) for each in moment.calls.values() if str(each.any.parent) == key]
    return {
        "key": key,
        "call": None if call is None else _facts(call),
        "chain": None if call is None else chain_of(moment, call.any.key),
        "children": table(CALLS, children, View(), name="calls made by it"),
        "events": _events(moment, key),
    }


def _facts(call: CallEnds) -> dict[str, Any]:
    ends = {"caller": call.at_caller, "callee": call.at_callee}
    return {
        **call_row(call),
        "asynchronous": call.any.asynchronous,
        "parent": None if call.any.parent is None else str(call.any.parent),
        "ends": {
            name: None if end is None else {"stage": end.stage.value, "age": end.age, "thread": end.thread}
            for name, end in ends.items()
        },
    }


def _events(moment: Moment, key: str) -> list[dict[str, Any]]:
    found = [
        {**event_row(name, each), "seconds": each.seconds}
        for name, each in moment.history.all_events()
        if each.call is not None and str(each.call) == key
    ]
    return sorted(found, key=lambda row: row["time"])[-EVENTS_OF_CALL:]
