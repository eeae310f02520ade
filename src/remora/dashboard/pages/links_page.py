"""Links: bytes, round trips and queues between all pairs as a matrix of colours; one pair over time.

In a large group a cell stands for a block of workers, and shows the worst of its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.table import Column, Row, View, table, whole_number
from remora.observer.model import LinkStatus

PARTS = ("links",)
SIDE = 64  # cells
METRICS = ("rate", "round_trip", "queued", "sent", "reconnects")

LINKS = (
    Column("link", "Link", "link"),
    Column("state", "Peer is", "state"),
    Column("transport", "Transport", narrow=False),
    Column("rate", "Out /s", "bytes"),
    Column("sent", "Sent", "bytes"),
    Column("round_trip", "Round trip", "seconds"),
    Column("queued", "Queued", "bytes"),
    Column("messages", "Unacked", "count", narrow=False, hint="messages kept until the peer acknowledges them"),
    Column("paused", "Paused", "state", narrow=False, hint="flow control does not let us read"),
    Column("reconnects", "Reconnects", "count", narrow=False),
    Column("silent_for", "Silent for", "seconds", narrow=False),
    Column("lent", "Memory lent", "bytes", narrow=False),
    Column("reason", "Why", narrow=False),
)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    if len(path) > 1:
        return _pair(moment, path[0], path[1])
    metric = arguments.get("metric", "")
    metric = metric if metric in METRICS else "rate"
    rows = [_row(moment, worker.name, each) for worker in moment.snapshot.workers for each in worker.links]
    rows.sort(key=lambda row: (row["state"] == "alive", -(row["queued"] or 0), -(row["round_trip"] or 0)))
    names = _names(moment, arguments.get("block", ""))
    return {
        "metric": metric,
        "metrics": METRICS,
        "matrix": _matrix(names, rows, metric),
        "links": table(LINKS, rows, View.of(arguments), left_out=moment.left_out("links"), name="links"),
    }


def _names(moment: Moment, block: str) -> list[str]:
    """All workers, or those of a block "first-last" by place."""
    first, last = map(whole_number, block.partition("-")[::2])
    return moment.names if first is None or last is None else moment.names[first : last + 1] or moment.names


def _matrix(names: list[str], rows: Sequence[Row], metric: str) -> dict[str, Any]:
    size = -(-len(names) // SIDE) or 1  # workers of a block
    blocks = [names[at : at + size] for at in range(0, len(names), size)]
    place = {name: at // size for at, name in enumerate(names)}
    cells: list[list[float | None]] = [[None] * len(blocks) for _ in blocks]
    bad: set[tuple[int, int]] = set()
    for row in rows:
        at, to = place.get(row["from"]), place.get(row["to"])
        if at is None or to is None:
            continue
        if row["state"] != "alive":
            bad.add((at, to))
        value, known = row[metric], cells[at][to]
        if value is not None and (known is None or value > known):
            cells[at][to] = value
    return {
        "labels": [block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks],
        "size": size,
        "cells": [[None if cell is None else float(f"{cell:.3g}") for cell in line] for line in cells],
        "bad": sorted(bad),
        "most": max((cell for line in cells for cell in line if cell is not None), default=0),
    }


def _row(moment: Moment, worker: str, link: LinkStatus) -> Row:
    series = moment.history.links.get((worker, link.peer))
    return {
        "link": [worker, link.peer],
        "from": worker,
        "to": link.peer,
        "state": link.state,
        "transport": link.transport or "none now",
        "rate": None if series is None else series.last("sent"),
        "sent": link.bytes_sent,
        "received": link.bytes_received,
        "round_trip": link.round_trip,
        "queued": link.queued_bytes,
        "messages": link.queued_messages,
        "paused": "paused" if link.paused else "",
        "reconnects": link.reconnects,
        "silent_for": link.silent_for,
        "lent": link.shared_lent + link.device_lent,
        "reason": link.reason,
    }


def _pair(moment: Moment, one: str, other: str) -> dict[str, Any]:
    ways = []
    for worker, peer in ((one, other), (other, one)):
        found = moment.workers.get(worker)
        link = None if found is None else next((each for each in found.links if each.peer == peer), None)
        series = moment.history.links.get((worker, peer))
        ways.append(
            {
                "from": worker,
                "to": peer,
                "link": None if link is None else _row(moment, worker, link),
                "messages_sent": None if link is None else link.messages_sent,
                "messages_received": None if link is None else link.messages_received,
                "curves": None if series is None else series.tell("sent", "received", "round_trip", "queued"),
            }
        )
    return {"ways": ways}
