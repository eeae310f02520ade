"""`remora refs`: values that remote references point to, by what made them and who holds them."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from remora.command.arguments import add_filters, add_group, add_json, add_watch, query_of, show
from remora.command.output import Column, Output, Table
from remora.command.text import duration, size
from remora.observer.model import GroupSnapshot

NAME = "refs"
HELP = "remote references: what made them, who holds them, how large they are"
EXAMPLE = "remora refs --older 1m --sort bytes"

COLUMNS = [
    Column("OWNER"),
    Column("MADE BY"),
    Column("TYPE"),
    Column("STATE"),
    Column("HELD BY"),
    Column("COUNT", right=True),
    Column("BYTES", right=True),
    Column("DEVICE"),
    Column("OLDEST", right=True),
    Column("WHERE"),
    Column("ID"),
]
MOST = 100_000  # to count what leaks, all have to be looked at


@dataclass(frozen=True)
class Kind:
    """Values that are alike."""

    owner: str
    function: str
    type: str
    state: str
    holders: str
    device: str
    site: str
    id: str = ""  # where each is shown


@dataclass
class Total:
    """The number of references of one kind."""

    count: int = 0
    bytes: int = 0
    sized: bool = False  # the size of any is known
    oldest: float = 0.0

    def add(self, age: float, count: int | None) -> None:
        self.count += 1
        self.bytes += count or 0
        self.sized = self.sized or count is not None
        self.oldest = max(self.oldest, age)

    def measure(self, sort: str) -> float:
        return {"count": self.count, "bytes": self.bytes, "age": self.oldest}[sort]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    parser.set_defaults(timeout=10.0)  # they may be many
    add_filters(parser, ("count", "bytes", "age"))
    parser.add_argument(
        "--each", action="store_true", help="a row for each value, instead of one for all that are alike"
    )
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    query = replace(query_of(options, "owned", "held"), limit=MOST)
    return show(options, query, lambda group, output: _draw(options, group, output))


def _draw(options: argparse.Namespace, group: GroupSnapshot, output: Output) -> int:
    totals: dict[Kind, Total] = defaultdict(Total)
    for kind, age, count in _values(group, options.worker):
        totals[kind if options.each else replace(kind, id="")].add(age, count)
    if not totals:
        output.line("no such reference")
        return 0
    found = sorted(totals.items(), key=lambda item: item[1].measure(options.sort), reverse=True)
    table = Table(COLUMNS)
    for kind, total in found[: options.limit]:
        table.add(
            kind.owner,
            kind.function,
            kind.type,
            kind.state,
            kind.holders,
            f"{total.count:,}",
            size(total.bytes) if total.sized else "",
            kind.device,
            duration(total.oldest),
            kind.site,
            kind.id,
        )
    output.table(table)
    _tell_rest(options, group, output, len(found))
    return 0


def _tell_rest(options: argparse.Namespace, group: GroupSnapshot, output: Output, found: int) -> None:
    if found > options.limit:
        output.line(f"… and {found - options.limit:,} more rows (--limit)", "faint")
    uncounted = sum(each.left_out.get("owned", 0) for each in group.workers)
    if uncounted:
        output.line(f"… and {uncounted:,} values that were not counted: there are too many", "faint")


def _values(group: GroupSnapshot, name: str | None) -> Iterator[tuple[Kind, float, int | None]]:
    """Every value with its age and size: as its owner has it, or as its holders have it if the owner does not answer."""
    for worker in group.workers:
        for each in worker.owned:
            if name is None or name == worker.name or name in each.holders:
                holders = list(each.holders) + ([f"{each.unconfirmed} on their way"] if each.unconfirmed else [])
                yield (
                    Kind(
                        worker.name,
                        each.function or "",
                        each.type,
                        each.state,
                        ", ".join(holders) or "its owner",
                        each.device or "",
                        each.site or "",
                        each.id,
                    ),
                    each.age,
                    each.bytes,
                )
    answered = {worker.name for worker in group.workers}
    for worker in group.workers:
        for ref in worker.held:
            if ref.owner not in answered and name in (None, worker.name, ref.owner):
                kind = Kind(ref.owner, ref.function or "", "", ref.state, worker.name, "", ref.site or "", ref.id)
                yield kind, ref.age, None
