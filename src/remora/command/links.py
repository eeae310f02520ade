"""`remora links`: the connection of each pair of workers: how much goes over it, how long that takes, what waits.

`ON THE WAY` is how long a call spends between two workers: what its caller measured of it, less what its callee says of
waiting there and running, on average over all calls of the pair that the recorder knows.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import GroupSnapshot, LinkStatus

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
    Column("ON THE WAY", right=True),
    Column("SILENT", right=True),
    Column("BROKE", right=True),
    Column("SHARED", right=True),
    Column("WHY"),
]
SLOW = 0.005  # seconds that a link takes at least to be called slow …
SLOWER = 5.0  # … and how many times as long as the one in the middle

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
    """By caller and callee: how many calls were measured, and how long each was on the way, on average."""
    whole: defaultdict[Pair, float] = defaultdict(float)
    served: defaultdict[Pair, float] = defaultdict(float)
    counts: Counter[Pair] = Counter()
    runs: Counter[Pair] = Counter()
    for worker in group.workers:
        for each in worker.histograms:
            if each.peer is None:
                continue
            if each.measure == "call":
                whole[worker.name, each.peer] += each.total
                counts[worker.name, each.peer] += each.count
            else:
                served[each.peer, worker.name] += each.total
                runs[each.peer, worker.name] += each.count if each.measure == "run" else 0
    return {
        pair: (count, max(whole[pair] / count - (served[pair] / runs[pair] if runs[pair] else 0.0), 0.0))
        for pair, count in counts.items()
        if count
    }


def slow_pairs(delay: dict[Pair, float]) -> set[Pair]:
    """Those that take much longer than the others."""
    if len(delay) < 2:
        return set()
    return {
        pair
        for pair, seconds in delay.items()
        if seconds >= SLOW and seconds >= SLOWER * median(value for other, value in delay.items() if other != pair)
    }


def _draw(options: argparse.Namespace, group: GroupSnapshot, output: Output) -> int:
    measured = delays(group)
    slow = slow_pairs({pair: seconds for pair, (_, seconds) in measured.items()})
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
    others = [seconds for pair, (_, seconds) in measured.items() if pair not in slow]
    for caller, callee in sorted(slow):
        seconds = measured[caller, callee][1]
        output.line(
            f"slow: a call from {caller} to {callee} is on the way for {duration(seconds)}; "
            f"one of the others, for {duration(median(others))}",
            "bad",
        )
