"""Remote references: who owns how much, who holds it, what made it, how it grows; and one reference with its holders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.table import Column, Row, View, table
from remora.observer.model import OwnedReference

PARTS = ("owned", "held")
CURVES = 8  # owners drawn over time
LARGEST = 100

SOURCES = (
    Column("count", "References", "count"),
    Column("bytes", "Size", "bytes", hint="of their tensors"),
    Column("owner", "Owner", "worker"),
    Column("holders", "Holders", "workers"),
    Column("function", "Made by", "function"),
    Column("type", "Type", narrow=False),
    Column("oldest", "Oldest", "seconds", narrow=False),
    Column("site", "Created at", narrow=False),
)
REFERENCES = (
    Column("id", "Reference", "reference"),
    Column("owner", "Owner", "worker"),
    Column("type", "Type", narrow=False),
    Column("bytes", "Size", "bytes"),
    Column("state", "State", "state"),
    Column("holders", "Holders", "workers"),
    Column("unconfirmed", "On their way", "count", narrow=False, hint="forks that no holder has confirmed"),
    Column("age", "Age", "seconds"),
    Column("device", "Device", narrow=False),
    Column("function", "Made by", "function", narrow=False),
)
HELD = (
    Column("worker", "Holder", "worker"),
    Column("state", "State", "state"),
    Column("age", "Age", "seconds"),
    Column("function", "Made by", "function"),
    Column("site", "Created at"),
)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    return _one(moment, path[0]) if path else _all(moment, arguments)


def _all(moment: Moment, arguments: Mapping[str, str]) -> dict[str, Any]:
    owned = [(worker.name, each) for worker in moment.snapshot.workers for each in worker.owned]
    largest = sorted(owned, key=lambda item: (-(item[1].bytes or 0), -item[1].age))
    left_out = moment.left_out("owned")
    return {
        "count": len(owned) + left_out,
        "bytes": sum(each.bytes or 0 for _, each in owned),
        "held": sum(len(worker.held) for worker in moment.snapshot.workers) + moment.left_out("held"),
        "growth": _growth(moment),
        "sources": table(SOURCES, _sources(owned), View.of(arguments), name="references by source"),
        "largest": table(
            REFERENCES,
            [_row(owner, each) for owner, each in largest],
            View(words=arguments.get("filter", ""), limit=LARGEST),
            left_out=left_out,
            name="references",
        ),
    }


def _sources(owned: Sequence[tuple[str, OwnedReference]]) -> list[Row]:
    """References with the same owner, holders, type and maker together: a leak is a large number."""
    found: dict[tuple[Any, ...], Row] = {}
    for owner, each in owned:
        key = owner, each.function, each.type, each.holders, each.site
        row = found.setdefault(
            key,
            {
                "owner": owner,
                "function": each.function,
                "type": each.type,
                "holders": list(each.holders),
                "site": each.site,
                "count": 0,
                "bytes": 0,
                "oldest": 0.0,
            },
        )
        row["count"] += 1
        row["bytes"] += each.bytes or 0
        row["oldest"] = max(row["oldest"], each.age)
    return sorted(found.values(), key=lambda row: (-row["count"], -row["bytes"]))


def _growth(moment: Moment) -> list[dict[str, Any]]:
    """Over time, of the owners with most."""
    owners = sorted(moment.history.owners.items(), key=lambda item: -(item[1].last("count") or 0))[:CURVES]
    return [{"worker": name, **series.tell("count", "bytes")} for name, series in owners]


def _row(owner: str, each: OwnedReference) -> Row:
    return {
        "id": each.id,
        "owner": owner,
        "type": each.type,
        "bytes": each.bytes,
        "state": each.state,
        "holders": list(each.holders),
        "unconfirmed": each.unconfirmed,
        "age": each.age,
        "device": each.device,
        "function": each.function,
        "site": each.site,
    }


def _one(moment: Moment, key: str) -> dict[str, Any]:
    owned = [_row(worker.name, each) for worker in moment.snapshot.workers for each in worker.owned if each.id == key]
    held = [
        {"worker": worker.name, "state": each.state, "age": each.age, "function": each.function, "site": each.site}
        for worker in moment.snapshot.workers
        for each in worker.held
        if each.id == key
    ]
    return {"id": key, "reference": owned[0] if owned else None, "held": table(HELD, held, View(), name="holders")}
