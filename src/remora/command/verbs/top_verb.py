"""`remora top`: workers, calls and links live in the terminal. Needs the extra `remora[top]`."""

from __future__ import annotations

import argparse
import sys

from remora.command.arguments import add_group, find_group
from remora.command.usage_errors import UsageError, extra
from remora.observer.model import GroupSnapshot, Query

NAME = "top"
HELP = "workers, calls and links, live in the terminal"
EXAMPLE = "remora top --interval 0.5"

SHOWN = Query(parts=("calls", "links"))
STACKS = Query(parts=("calls", "waits", "threads"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    add_group(parser)


def run(options: argparse.Namespace) -> int:
    with extra("top", NAME):
        from remora.command.top_app import TopApp
    if not sys.stdout.isatty():
        raise UsageError("`remora top` needs a terminal; `remora ps --watch` and `remora calls --watch` do not")
    with find_group(options) as group:

        def take(stacks: bool) -> GroupSnapshot:
            return group.snapshot(STACKS if stacks else SHOWN, options.timeout)

        TopApp(take, options.interval).run()
    return 0
