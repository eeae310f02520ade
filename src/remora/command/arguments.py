"""Options that several verbs share, and the group that they name."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remora.command.output import Output, make_output
from remora.command.text import counted, seconds_of
from remora.command.usage_errors import UsageError
from remora.observer.group_observer import GroupObserver
from remora.observer.model import GroupSnapshot, Missing, Query, WorkerSnapshot
from remora.observer.snapshot_json import to_json

TIMEOUT = 2.0
MOST = 1000  # entries of a part that each worker is asked for; what `--limit` cuts is cut here, after sorting


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a group, and the time its workers have to answer."""
    add = parser.add_argument
    add("--at", metavar="ADDRESS", help="the group's store (tcp://host:port, file://…), or a worker's observer socket")
    add("--group", metavar="NAME", help="the group, where this host has several (the first letters are enough)")
    add(
        "--secret-file",
        metavar="FILE",
        help="the group's secret; else REMORA_SECRET, REMORA_SECRET_FILE or this user's",
    )
    add("--timeout", type=seconds, default=TIMEOUT, metavar="TIME", help="how long workers have to answer (%(default)gs)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", nargs="?", type=seconds, const=1.0, metavar="TIME", help="show it again and again (each second)"
    )


def add_filters(parser: argparse.ArgumentParser, sorts: Sequence[str], *, older: bool = True) -> None:
    """Add the options that choose the rows of a table and their order: the first of `sorts` unless told otherwise."""
    add = parser.add_argument
    add("--worker", metavar="NAME", help="only what this worker says")
    add("--function", default="", metavar="TEXT", help="only what has this text in the name of its function")
    if older:
        add("--older", type=seconds, default=0.0, metavar="TIME", help="only what is at least so old: 200ms, 5s, 3m")
    add("--sort", choices=sorts, default=sorts[0], help=f"the order ({sorts[0]})")
    add("--limit", type=rows, default=40, metavar="N", help="at most so many rows (40)")


def seconds(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rows(text: str) -> int:
    """Read a number of rows."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a number of rows: {text!r}")
    return int(text)


def find_group(options: argparse.Namespace) -> GroupObserver:
    """The group that the options of `add_group` name. NothingFound if there is none."""
    return GroupObserver.find(options.at, options.group, secret_file=options.secret_file)


def query_of(options: argparse.Namespace, *parts: str) -> Query:
    """Return the query that the options of `add_filters` ask for."""
    return Query(
        parts=parts,
        limit=max(MOST, options.limit),
        older_than=getattr(options, "older", 0.0),
        function=options.function,
    )


def show(options: argparse.Namespace, query: Query, draw: Callable[[GroupSnapshot, Output], int]) -> int:
    """Ask the group and draw the answer, again and again under `--watch`. Return the exit code of the last time: that of
    `draw`, or 1 if a worker did not answer."""
    with find_group(options) as group:

        def once(output: Output) -> int:
            snapshot = group.snapshot(query, options.timeout)
            check_worker(snapshot, getattr(options, "worker", None))
            if options.json:
                print_json(to_json(snapshot), indent=options.watch is None)
                return int(bool(troubles(snapshot)))
            return max(draw(snapshot, output), tell_missing(snapshot, output))

        return repeat(options, once)


SHORTEST = 0.05  # seconds between two looks


def repeat(options: argparse.Namespace, once: Callable[[Output], int]) -> int:
    """Do it once, or under `--watch` until Ctrl-C. Return the exit code of the last time."""
    output = make_output()
    if options.watch is None:
        return once(output)
    code = 0
    try:
        while True:
            if not options.json:
                output.clear()
                output.line(time.strftime("%H:%M:%S"), "faint")
            code = once(output)
            time.sleep(max(options.watch, SHORTEST))
    except KeyboardInterrupt:
        return code


def print_json(value: Any, indent: bool = True) -> None:
    """On several lines for people; on one under `--watch`, for programs that read line by line."""
    sys.stdout.write(json.dumps(value, indent=2 if indent else None, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def check_worker(snapshot: GroupSnapshot, name: str | None) -> None:
    """UsageError if the group has no worker of that name."""
    names = names_of(snapshot)
    if name is not None and name not in names:
        raise UsageError(f"group {snapshot.group} has no worker {name!r}. It has {', '.join(names) or 'none'}.")


def names_of(snapshot: GroupSnapshot) -> list[str]:
    """Of all workers, those that did not answer last."""
    return [each.name for each in snapshot.workers] + [each.name for each in snapshot.missing]


def troubles(snapshot: GroupSnapshot) -> list[Missing]:
    """The workers that should have answered: a worker that left is no trouble."""
    return [each for each in snapshot.missing if each.state != "left"]


def tell_missing(snapshot: GroupSnapshot, output: Output) -> int:
    """Say how many workers answered, if not all did, and why the others did not. Return 1 then, else 0."""
    bad = troubles(snapshot)
    if bad:
        output.line()
        output.line(partial_answer(snapshot), "bad")
    return int(bool(bad))


def partial_answer(snapshot: GroupSnapshot) -> str:
    """Such as: 7 of 8 workers answered; worker3 is silent: its process is stopped (SIGSTOP)."""
    bad = troubles(snapshot)
    answered = len(snapshot.workers)
    reasons = [f"{each.name} is {each.state}" + (f": {each.reason}" if each.reason else "") for each in bad]
    return "; ".join([f"{answered} of {counted(answered + len(bad), 'worker')} answered", *reasons])


def tell_left_out(output: Output, shown: int, found: int, snapshots: Iterable[WorkerSnapshot], *parts: str) -> None:
    """Say how many rows are not shown: cut off here, or by the workers themselves."""
    cut = sum(each.left_out.get(part, 0) for each in snapshots for part in parts)
    if found - shown + cut > 0:
        output.line(f"… and {found - shown + cut:,} more (--limit)", "faint")
