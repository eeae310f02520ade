"""Runs the command for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from remora.observer import directory
from remora.testing.processes import Processes

TIMEOUT = 60.0


@dataclass
class Done:
    """What a run of the command printed, and its exit code."""

    code: int
    out: str
    err: str


def remora(*words: str, **env: str) -> Done:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "remora", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | env)
    return Done(done.returncode, done.stdout, done.stderr)


def group_of(workers: Processes) -> str:
    """The id of a group."""
    return next(entry.group for entry in directory.entries() if entry.pid == workers.pid(0))
