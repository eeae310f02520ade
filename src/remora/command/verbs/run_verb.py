"""`remora run`: starts the worker processes of a program on this host. The same as `python -m remora.launch`."""

from __future__ import annotations

import argparse

from remora import launch

NAME = "run"
HELP = "start the worker processes of a program on this host, and supervise them"
EXAMPLE = "remora run -n 4 --restart on-failure train.py --lr 0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    return launch.run(options)
