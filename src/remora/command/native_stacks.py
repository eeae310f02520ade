"""The stacks of a process of this host with those of its C code, by py-spy, if it is installed. It is never required."""

from __future__ import annotations

import shutil
import subprocess

TOOL = "py-spy"
PATIENCE = 10.0  # seconds


def native_stacks(pid: int) -> list[str]:
    """Return what py-spy says of a process, or why it says nothing; nothing if it is not installed."""
    tool = shutil.which(TOOL)
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{TOOL} says nothing: {error}"]
    if done.returncode != 0:
        told = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        return [f"{TOOL} says nothing: {told[0]}"]
    return [f"{TOOL} says:", *done.stdout.splitlines()]
