"""`remora calls`: the calls that are under way, each once, with what both of its ends say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show, tell_left_out
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import CallKey, CallStatus, GroupSnapshot, Stage

NAME = "calls"
HELP = "calls under way"
EXAMPLE = "remora calls --older 5s --function forward"

COLUMNS = [
    Column("CALL"),
    Column("FROM"),
    Column("TO"),
    Column("FUNCTION"),
    Column("STAGE"),
    Column("AGE", right=True),
    Column("LEFT", right=True),
    Column("BYTES", right=True),
    Column("FOR"),
]
AT_CALLEE = (Stage.QUEUED, Stage.RUNNING, Stage.ANSWERING)


@dataclass
class Whole:
    """A call, as one or both of its ends have it."""

    caller: CallStatus | None = None
    callee: CallStatus | None = None

    @property
    def best(self) -> CallStatus:
        """The end that knows how far it is."""
        found = self.callee or self.caller
        assert found is not None
        return found

    @property
    def function(self) -> str:
        """Its callee does not know it before it runs."""
        return self.best.function or (self.caller.function if self.caller is not None else "")

    @property
    def age(self) -> float:
        return max(each.age for each in (self.caller, self.callee) if each is not None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add_filters(parser, ("age", "left", "bytes", "function"))
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    return show(options, query_of(options, "calls"), lambda group, output: _draw(options, group, output))


def whole_calls(group: GroupSnapshot) -> list[Whole]:
    """The calls of a group, the two ends of each put together."""
    found: dict[CallKey, Whole] = {}
    for worker in group.workers:
        for call in worker.calls:
            whole = found.setdefault(call.key, Whole())
            if call.stage in AT_CALLEE:
                whole.callee = call
            else:
                whole.caller = call
    return list(found.values())


def _draw(options: argparse.Namespace, group: GroupSnapshot, output: Output) -> int:
    name = options.worker
    calls = [each for each in whole_calls(group) if name in (None, each.best.key.caller, each.best.callee)]
    calls.sort(key=_order(options.sort))
    if not calls:
        output.line("no such call is under way")
        return 0
    table = Table(COLUMNS)
    for each in calls[: options.limit]:
        call = each.best
        table.add(
            str(call.key),
            call.key.caller,
            call.callee,
            each.function,
            call.stage,
            duration(each.age),
            duration(call.left),
            size(call.bytes) if call.bytes else "",
            str(call.parent or ""),
        )
    output.table(table)
    tell_left_out(output, min(options.limit, len(calls)), len(calls), group.workers, "calls")
    return 0


def _order(sort: str) -> Callable[[Whole], Any]:
    orders: dict[str, Callable[[Whole], Any]] = {
        "age": lambda each: -each.age,
        "left": lambda each: float("inf") if each.best.left is None else each.best.left,
        "bytes": lambda each: -each.best.bytes,
        "function": lambda each: (each.function, -each.age),
    }
    return orders[sort]
