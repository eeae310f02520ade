"""PyTorch's own RPC tests pass, but for those that `expected.toml` names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 600


@pytest.mark.first
@pytest.mark.timeout(TIMEOUT + 30)
def test_the_suites_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, since torch cannot be itself again after Remora was put into it."""
    command = [sys.executable, "-m", "tests.conformance", "--quiet", "--jobs", "5"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    with capsys.disabled():
        print(f"\n\n{run.stdout}{run.stderr}")
    assert run.returncode == 0, "see the table above, and the lines under it that begin with PROBLEM"
