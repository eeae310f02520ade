"""`remora events`: what happened of late on all workers, in the order of the observer's clock."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show, tell_left_out
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import Event, EventKind, GroupSnapshot

NAME = "events"
HELP = "what happened of late: calls, workers that came and went, faults"
EXAMPLE = "remora events --kind died --kind suspected"

COLUMNS = [
    Column("TIME"),
    Column("WORKER"),
    Column("EVENT"),
    Column("PEER"),
    Column("CALL"),
    Column("FUNCTION"),
    Column("TOOK", right=True),
    Column("BYTES", right=True),
    Column("WHAT"),
]
MOST = 100_000
BAD = (EventKind.CALL_FAILED, EventKind.RUN_FAILED, EventKind.SUSPECTED, EventKind.DIED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add_filters(parser, ("time", "took", "bytes"), older=False)
    kinds = [str(each) for each in EventKind]
    parser.add_argument(
        "--kind", action="append", choices=kinds, metavar="KIND", help=f"only these: {', '.join(kinds)}"
    )
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    query = replace(query_of(options, "events"), limit=MOST)
    return show(options, query, lambda group, output: _draw(options, group, output))


def _draw(options: argparse.Namespace, group: GroupSnapshot, output: Output) -> int:
    found = [
        (event.time - group.clock_offsets.get(worker.name, 0.0), worker.name, event)
        for worker in group.workers
        if options.worker in (None, worker.name)
        for event in worker.events
        if not options.kind or event.kind in options.kind
    ]
    found.sort(key=lambda each: _rank(options.sort, each[0], each[2]))
    if not found:
        output.line("no such event is remembered")
        return 0
    table = Table(COLUMNS)
    for moment, name, event in found[-options.limit :]:
        table.add(
            time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03}",
            name,
            event.kind,
            event.peer or "",
            str(event.call or ""),
            event.function or "",
            duration(event.seconds),
            size(event.bytes) if event.bytes else "",
            event.text,
            style="bad" if event.kind in BAD else "",
        )
    output.table(table)
    tell_left_out(output, min(options.limit, len(found)), len(found), group.workers, "events")
    return 0


def _rank(sort: str, moment: float, event: Event) -> float:
    """The last shown is the newest, or the largest."""
    return {"time": moment, "took": event.seconds or 0.0, "bytes": float(event.bytes or 0)}[sort]
