"""`remora dump`: everything that the workers say of themselves, in one file."""

from __future__ import annotations

import argparse
import time

from remora import __version__
from remora.command.arguments import add_group, add_json, find_group, partial_answer, print_json, troubles
from remora.command.output import make_output
from remora.command.text import counted
from remora.observer.dump import write_group_dump
from remora.observer.model import Query

NAME = "dump"
HELP = "write everything that the workers say of themselves into one file, for `remora explain` or an issue"
EXAMPLE = "remora dump -o d.zip && remora explain d.zip"
EVERYTHING = Query(limit=100_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    add_group(parser)
    parser.set_defaults(timeout=10.0)  # everything takes longer than what a table shows
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it (remora-dump-<date>-<time>.zip)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Ask the workers, and write the file."""
    path = options.output or time.strftime("remora-dump-%Y%m%d-%H%M%S.zip")
    with find_group(options) as group:
        snapshot = group.snapshot(EVERYTHING, options.timeout)
    write_group_dump(path, snapshot, f"remora {__version__}")
    bad = troubles(snapshot)
    if options.json:
        print_json({"file": path, "workers": len(snapshot.workers), "missing": {each.name: each.reason for each in bad}})
        return int(bool(bad))
    output = make_output()
    who = counted(len(snapshot.workers), "worker")
    output.line(f"{path}: {who}. It has names of functions, hosts and files, and no values of arguments.")
    if bad:
        output.line(partial_answer(snapshot), "bad")
    return int(bool(bad))
