"""`remora links`: the connection of each pair of workers: how much goes over it, how long that takes, what waits.

`DELAY` is how long a call is on the way there and back: what its caller measured, less what its callee says of running it.
Of the last calls of the pair the fastest counts: a call among ten thousand others waits for those, whatever the link.
"""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import EventKind, GroupSnapshot, LinkStatus

NAME = "links"
HELP = "connections between workers: traffic, delay, what waits"
EXAMPLE = "remora links --sort delay"

COLUMNS = [
    Column("FROM"),
    Column("TO"),
    Column("STATE"),
    Column("BY"),
    Column("SENT", right=True),
    Column("RECEIVED", right=True),
    Column("MESSAGES", right=True),
    Column("UNACKED", right=True),
    Column("TO SEND", right=True),
    Column("ROUND TRIP", right=True),
    Column("DELAY", right=True),
    Column("SILENT", right=True),
    Column("BROKE", right=True),
    Column("SHARED", right=True),
    Column("WHY"),
]
MOST = 10_000  # events that are looked at
SLOW = 0.005  # seconds that a link takes at least to be called slow …
SLOWER = 5.0  # … and how many times as long as the fastest one
ENOUGH = 5  # calls that tell how fast a link is

Pair = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add_filters(parser, ("name", "delay", "bytes", "queued"), older=False)
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    query = replace(query_of(options, "links", "events"), limit=MOST)
    return show(options, query, lambda group, output: _draw(options, group, output))


def delays(group: GroupSnapshot) -> dict[Pair, float]:
    """By caller and callee: how long the fastest of their last calls was on the way. Only pairs with enough calls."""
    runs = {
        event.call: event.seconds or 0.0
        for worker in group.workers
        for event in worker.events
        if event.kind is EventKind.RUN_ENDED and event.call is not None
    }
    found: dict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=ENOUGH))
    for worker in group.workers:
        for event in worker.events:
            if event.kind is EventKind.CALL_ENDED and event.peer is not None and event.call in runs:
                found[worker.name, event.peer].append(max((event.seconds or 0.0) - runs[event.call], 0.0))
    return {pair: min(last) for pair, last in found.items() if len(last) == ENOUGH}


def slow_pairs(delay: dict[Pair, float]) -> set[Pair]:
    """Those that take much longer than the fastest."""
    fastest = min(delay.values(), default=0.0)
    return {pair for pair, seconds in delay.items() if seconds >= SLOW and seconds >= SLOWER * fastest}


def _draw(options: argparse.Namespace, group: GroupSnapshot, output: Output) -> int:
    measured = delays(group)
    slow = slow_pairs(measured)
    rows = [
        (worker.name, link)
        for worker in group.workers
        for link in worker.links
        if options.worker in (None, worker.name, link.peer)
    ]
    if not rows:
        output.line("no such link")
        return 0
    rows.sort(key=lambda row: _rank(options.sort, row, measured))
    table = Table(COLUMNS)
    for name, link in rows[: options.limit]:
        pair = name, link.peer
        bad = pair in slow or link.state != "alive"
        table.add(*_cells(name, link, measured.get(pair)), style="bad" if bad else "")
    output.table(table)
    if len(rows) > options.limit:
        output.line(f"… and {len(rows) - options.limit:,} more (--limit)", "faint")
    _tell_slow(slow, measured, output)
    return 0


def _cells(name: str, link: LinkStatus, measured: float | None) -> Iterable[str]:
    return [
        name,
        link.peer,
        link.state + (", paused" if link.paused else ""),
        link.transport or "",
        size(link.bytes_sent),
        size(link.bytes_received),
        f"{link.messages_sent:,}/{link.messages_received:,}",
        str(link.queued_messages or ""),
        size(link.queued_bytes) if link.queued_bytes else "",
        duration(link.round_trip),
        duration(measured),
        duration(link.silent_for) if link.silent_for is not None and link.silent_for > 1 else "",
        str(link.reconnects or ""),
        size(link.shared_lent + link.shared_borrowed) if link.shared_lent + link.shared_borrowed else "",
        link.reason,
    ]


def _rank(sort: str, row: tuple[str, LinkStatus], measured: dict[Pair, float]) -> tuple[float, str, str]:
    name, link = row
    value = {
        "name": 0.0,
        "delay": max(measured.get((name, link.peer), 0.0), link.round_trip or 0.0),
        "bytes": float(link.bytes_sent + link.bytes_received),
        "queued": float(link.queued_bytes + link.queued_messages),
    }[sort]
    return -value, name, link.peer


def _tell_slow(slow: set[Pair], measured: dict[Pair, float], output: Output) -> None:
    others = [seconds for pair, seconds in measured.items() if pair not in slow]
    for caller, callee in sorted(slow):
        least, usual = duration(measured[caller, callee]), duration(median(others))
        output.line(f"slow: a call from {caller} to {callee} is on the way for {least}; on other links, for {usual}", "bad")
