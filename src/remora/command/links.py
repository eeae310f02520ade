"""`remora links`: the connection of each pair of workers: how much goes over it, how long that takes, what waits.

`DELAY` is the least that a call spent between the two workers: what its caller measured, less what its callee says of
running it, of the fastest calls of each function. Histograms tell it to a factor of two. The fastest, because a call among
ten thousand others waits for those, and that says nothing of the link.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import median

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import GroupSnapshot, Histogram, LinkStatus

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
    Column("CALLS", right=True),
    Column("DELAY", right=True),
    Column("SILENT", right=True),
    Column("BROKE", right=True),
    Column("SHARED", right=True),
    Column("WHY"),
]
SLOW = 0.005  # seconds that a link takes at least to be called slow …
SLOWER = 5.0  # … and how many times as long as the fastest one
ENOUGH = 5  # calls that tell how fast a link is: the first one waits for connections and imports

Pair = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add_filters(parser, ("name", "delay", "bytes", "queued"), older=False)
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    query = query_of(options, "links", "histograms")
    return show(options, query, lambda group, output: _draw(options, group, output))


def delays(group: GroupSnapshot) -> dict[Pair, tuple[int, float]]:
    """By caller and callee: how many calls were measured, and how long the fastest was on the way."""
    runs = {
        (each.peer, worker.name, each.function): _fastest(each)
        for worker in group.workers
        for each in worker.histograms
        if each.measure == "run" and each.peer is not None
    }
    found: dict[Pair, tuple[int, float]] = {}
    for worker in group.workers:
        for each in worker.histograms:
            if each.measure == "call" and each.peer is not None and each.count:
                pair = worker.name, each.peer
                delay = max(_fastest(each) - runs.get((*pair, each.function), 0.0), 0.0)
                count, least = found.get(pair, (0, delay))
                found[pair] = count + each.count, min(least, delay)
    return found


def _fastest(histogram: Histogram) -> float:
    """Seconds that all of them took at least."""
    return 2.0 ** min(histogram.buckets) / 1e9 if histogram.buckets else histogram.longest


def slow_pairs(measured: dict[Pair, tuple[int, float]]) -> set[Pair]:
    """Those that take much longer than the others."""
    delay = {pair: seconds for pair, (count, seconds) in measured.items() if count >= ENOUGH}
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


def _cells(name: str, link: LinkStatus, measured: tuple[int, float] | None) -> Iterable[str]:
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
        f"{measured[0]:,}" if measured else "",
        duration(measured[1]) if measured else "",
        duration(link.silent_for) if link.silent_for is not None and link.silent_for > 1 else "",
        str(link.reconnects or ""),
        size(link.shared_lent + link.shared_borrowed) if link.shared_lent + link.shared_borrowed else "",
        link.reason,
    ]


def _rank(sort: str, row: tuple[str, LinkStatus], measured: dict[Pair, tuple[int, float]]) -> tuple[float, str, str]:
    name, link = row
    value = {
        "name": 0.0,
        "delay": max(measured.get((name, link.peer), (0, 0.0))[1], link.round_trip or 0.0),
        "bytes": float(link.bytes_sent + link.bytes_received),
        "queued": float(link.queued_bytes + link.queued_messages),
    }[sort]
    return -value, name, link.peer


def _tell_slow(slow: set[Pair], measured: dict[Pair, tuple[int, float]], output: Output) -> None:
    others = [seconds for pair, (count, seconds) in measured.items() if pair not in slow and count >= ENOUGH]
    for caller, callee in sorted(slow):
        least, usual = measured[caller, callee][1], median(others)
        output.line(
            f"slow: every call from {caller} to {callee} is on the way for {duration(least)} or more; on other links, for "
            f"{duration(usual)}",
            "bad",
        )
