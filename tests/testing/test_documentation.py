"""The worked example of docs/testing.md is a program that works, and its tests can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remora import rpc
from remora.errors import CallTimeout
from remora.testing.world import World

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
SAFEGUARD = "    if ticket not in tickets:\n"


def write_example(folder: Path) -> None:
    """Each block of Python begins with the name of its file."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = re.match(r"# (\w+\.py)", block)
        assert name is not None, block
        path = folder / name[1]
        path.write_text((path.read_text() if path.exists() else "") + block)


def run_example(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "remora.testing.plugin", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(110)
def test_the_example_holds_under_every_plan(tmp_path: Path) -> None:
    write_example(tmp_path)
    outcome = run_example(tmp_path)
    assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-1000:]
    assert "9 passed" in outcome.stdout


def work() -> None:
    pass


def my_program() -> None:
    rpc.rpc_sync("worker1", work)


def test_what_is_said_of_virtual_time_is_so(remora_world: Callable[..., World]) -> None:
    section = PAGE.read_text().partition("\n## Virtual time\n")[2]
    code = re.search(r"```\n(def test_.*?)```", section, re.DOTALL)
    assert code is not None
    found: dict[str, Any] = {}
    names = {"rpc": rpc, "pytest": pytest, "CallTimeout": CallTimeout, "work": work, "my_program": my_program}
    exec(code[1], names, found)
    assert len(found) == 2
    for test in found.values():
        test(remora_world)


@pytest.mark.timeout(110)
def test_without_its_safeguard_it_fails_and_tells_the_faults(tmp_path: Path) -> None:
    write_example(tmp_path)
    program = tmp_path / "counter.py"
    assert SAFEGUARD in program.read_text()
    program.write_text(program.read_text().replace(SAFEGUARD, "    if True:\n"))
    outcome = run_example(tmp_path, "-k", "counted_once and (delay or fail)")
    assert "1 failed, 1 passed" in outcome.stdout, outcome.stdout[-3000:]
    assert "delay PYTHON_RET worker1->worker0 #2" in outcome.stdout
