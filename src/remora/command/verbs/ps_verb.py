"""`remora ps`: the groups of this user on this host, or one group, and their workers."""

from __future__ import annotations

import argparse

from remora.command.arguments import add_group, add_json, add_watch, print_json, repeat, tell_missing, troubles
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.errors import NothingFound
from remora.observer.directory import folder
from remora.observer.group_observer import GroupObserver, groups
from remora.observer.model import GroupSnapshot, Query, WorkerSnapshot
from remora.observer.snapshot_json import to_json

NAME = "ps"
HELP = "groups and their workers"
EXAMPLE = "remora ps --watch"

COLUMNS = [
    Column("GROUP"),
    Column("WORKER"),
    Column("RANK", right=True),
    Column("STATE"),
    Column("PID", right=True),
    Column("HOST"),
    Column("UP", right=True),
    Column("CPU", right=True),
    Column("MEMORY", right=True),
    Column("RUNNING", right=True),
    Column("QUEUED", right=True),
    Column("MADE", right=True),
    Column("SERVED", right=True),
    Column("FAILED", right=True),
    Column("PROGRAM"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    observers = _find(options)
    try:
        return repeat(options, lambda output: _show(options, observers, output))
    finally:
        for each in observers:
            each.close()


def _find(options: argparse.Namespace) -> list[GroupObserver]:
    """All groups of this host, unless one is named."""
    if options.at is not None:
        return [GroupObserver.find(options.at, options.group, secret_file=options.secret_file)]
    there = [each for each in groups() if each.group.startswith(options.group or "")]
    if not there:
        wanted = f"no group {options.group!r}" if options.group else "no worker"
        raise NothingFound("", f"{wanted} of this user runs on this host (see {folder()}); --at names another group")
    found: list[GroupObserver] = []
    ended: NothingFound | None = None
    for each in there:
        try:
            found.append(GroupObserver.find(group=each.group))
        except NothingFound as error:  # it has just ended: the others are there
            ended = error
    if not found and ended is not None:
        raise ended
    return found


def _show(options: argparse.Namespace, observers: list[GroupObserver], output: Output) -> int:
    snapshots = [each.snapshot(Query(parts=()), options.timeout) for each in observers]
    if options.json:
        print_json(to_json(snapshots), indent=options.watch is None)
        return int(any(map(troubles, snapshots)))
    table = Table(COLUMNS)
    for snapshot in snapshots:
        _add(table, snapshot)
    output.table(table)
    return max(tell_missing(snapshot, output) for snapshot in snapshots)


def _add(table: Table, snapshot: GroupSnapshot) -> None:
    group = snapshot.group[:8]
    rows = [(worker.rank, worker.name, [group, *_cells(worker)], "") for worker in snapshot.workers]
    for each in snapshot.missing:
        cells = [
            each.name,
            "" if each.rank is None else str(each.rank),
            each.state,
            str(each.pid or ""),
            each.host or "",
        ]
        style = "faint" if each.state == "left" else "bad"
        rows.append((each.rank or 0, each.name, [group, *cells, *[""] * (len(COLUMNS) - len(cells) - 1)], style))
    for _, _, row, style in sorted(rows):
        table.add(*row, style=style)


def _cells(worker: WorkerSnapshot) -> list[str]:
    return [
        worker.name,
        str(worker.rank),
        "alive",
        str(worker.pid),
        worker.host,
        duration(worker.up),
        duration(worker.cpu),
        size(worker.memory.resident),
        f"{worker.pool.running}/{worker.pool.limit}",
        str(worker.pool.queued),
        f"{worker.calls_made:,}",
        f"{worker.calls_served:,}",
        f"{worker.calls_failed:,}",
        worker.program,
    ]
