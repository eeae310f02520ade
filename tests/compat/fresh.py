"""A fresh interpreter for a test, since torch cannot be imported twice in one. It has the environment the test gives it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT = 240  # mostly the time to import torch, several times, on a machine that is busy
REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src"


def environment(**settings: str) -> dict[str, str]:
    """This process's environment, without what would redirect or slow down, and with `settings`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("REMORA_COMPAT", "PYTHONPATH")}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **settings}


def python(arguments: Sequence[str | Path], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`; does not judge how it ended."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def run(text: str, folder: Path, **settings: str) -> str:
    """Run a program that must end well; what it printed."""
    script = folder / "program.py"
    script.write_text(text)
    ended = python([script], folder, **settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
