"""`remora why`: what everything that waits finally waits for, across workers. Cycles are named first."""

from __future__ import annotations

import argparse
import re
from typing import Any

from remora.command.arguments import (
    add_group,
    add_json,
    add_watch,
    find_group,
    names_of,
    print_json,
    repeat,
    rows,
    tell_missing,
    troubles,
)
from remora.command.output import Output
from remora.command.text import counted, duration
from remora.command.usage_errors import UsageError
from remora.observer.model import GroupSnapshot, Query
from remora.observer.snapshot_json import to_json
from remora.observer.waits import Chain, WaitGraph

NAME = "why"
HELP = "why it hangs: what each thread and call finally waits for, cycles first"
EXAMPLE = "remora why\n  remora why worker0\n  remora why worker0#17"

_AGE = re.compile(r" \(\d+\.\d s\)")

QUERY = Query(parts=("calls", "waits", "owned", "passes", "links", "threads"), limit=10_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", help="a worker, or a call as `remora calls` names it; nothing: everything")
    parser.add_argument("--limit", type=rows, default=20, metavar="N", help="at most so many chains (20)")
    add_group(parser)
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    with find_group(options) as group:
        return repeat(options, lambda output: _once(options, group.snapshot(QUERY, options.timeout), output))


def _once(options: argparse.Namespace, snapshot: GroupSnapshot, output: Output) -> int:
    graph = WaitGraph.of(snapshot)
    chains = _chains(graph, snapshot, options.what)
    reached = {node for chain in chains for node in chain.nodes}
    cycles = [each for each in graph.cycles() if options.what is None or reached & set(each.nodes)]
    if options.json:
        print_json(_as_json(snapshot, cycles, chains), indent=options.watch is None)
        return int(bool(cycles or troubles(snapshot)))
    if cycles:
        _show_cycles(cycles, output)
    if chains:
        output.line("What waits, and for what:", "head")
        alike = _alike(chains)
        for chain, count in alike[: options.limit]:
            more = f" (and {count - 1:,} more like this)" if count > 1 else ""
            output.line(f"  {chain.text}{more}", "bad" if chain.cyclic else "")
        if len(alike) > options.limit:
            output.line(f"  … and {len(alike) - options.limit:,} more (--limit)", "faint")
    elif not cycles:
        calls = len({call.key for worker in snapshot.workers for call in worker.calls})
        who = f"{options.what} waits for nothing" if options.what else "Nothing waits"
        output.line(f"{who}; {counted(calls, 'call')} under way in the group.")
    return max(tell_missing(snapshot, output), int(bool(cycles)))


def _chains(graph: WaitGraph, snapshot: GroupSnapshot, what: str | None) -> list[Chain]:
    if what is None:
        return graph.chains()
    found = graph.find(what)
    names = names_of(snapshot)
    if not found and what not in names:
        raise UsageError(
            f"{what!r} is neither a worker ({', '.join(names)}) nor a call that is under way (`remora calls` lists them)"
        )
    return [graph.chain(node) for node in found]


def _alike(chains: list[Chain]) -> list[tuple[Chain, int]]:
    """Chains whose sentences differ in nothing but ages, told by the first one, and how many there are."""
    found: dict[str, list[Chain]] = {}
    for chain in chains:
        found.setdefault(_AGE.sub("", chain.text), []).append(chain)
    return [(each[0], len(each)) for each in found.values()]


def _show_cycles(cycles: list[Chain], output: Output) -> None:
    output.line("A cycle:" if len(cycles) == 1 else f"{len(cycles)} cycles:", "bad")
    for cycle in cycles:
        output.line(f"  {cycle.text}", "bad")
        if cycle.expires is not None:
            output.line(f"  It ends when the first deadline of its calls passes, in {duration(cycle.expires)}.")
        elif cycle.limited:
            output.line("  Something in it waits for a time only: it may end by that.")
        else:
            output.line("  Its calls have no deadline: it does not end by itself.")
    output.line()


def _as_json(snapshot: GroupSnapshot, cycles: list[Chain], chains: list[Chain]) -> dict[str, Any]:
    return {
        "group": snapshot.group,
        "time": snapshot.time,
        "cycles": [_chain_as_json(each) for each in cycles],
        "chains": [_chain_as_json(each) for each in chains],
        "missing": to_json(snapshot.missing),
    }


def _chain_as_json(chain: Chain) -> dict[str, Any]:
    return {
        "text": chain.text,
        "cyclic": chain.cyclic,
        "age": chain.age,
        "expires": chain.expires,
        "limited": chain.limited,
        "nodes": [{"kind": str(node.kind), "worker": node.worker, "id": node.id} for node in chain.nodes],
    }
