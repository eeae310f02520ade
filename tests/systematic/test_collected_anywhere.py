"""A destructor of the program may run at any line of ours, and use Remora: nothing waits for a frame that cannot go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.systematic.collected import VERBS

ROOT = Path(__file__).parent.parent.parent
WHERE = ("agent/", "transport/", "rref/", "rpc/", "wire/", "autograd/", "protocol/")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All verbs are tried once, by one process: importing torch is what takes long."""
    folder = tmp_path_factory.mktemp("collected")
    command = [sys.executable, "-m", "tests.systematic.collected", str(folder), *WHERE]
    subprocess.run(command, cwd=ROOT, check=True, timeout=115)
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_a_destructor_may_run_anywhere(reports: Path, verb: str) -> None:
    report = (reports / verb).read_text()
    assert report.startswith("done at"), report
