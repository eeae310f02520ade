"""However a program ends, and whatever it holds: it ends soon, with the right code, and Remora adds nothing to what it says.

When the interpreter goes down, other threads stop wherever they are, and the locks that they hold stay held: those of ours,
of the log, and of the import system, which is needed to print an error. So no destructor may raise, lock, import or wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.endings import ENDINGS

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open"), pytest.mark.timeout(320)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them are run once, by one process: importing torch is what takes long."""
    found = tmp_path_factory.mktemp("endings")
    command = [sys.executable, "-W", "default", "-m", "tests.processes.endings", str(found)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return found


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_holds_everything_ends(folder: Path, name: str) -> None:
    codes: list[int | None] = json.loads((folder / "outcomes.json").read_text())[name]
    error = (folder / name / "err0").read_text()
    code, last = ENDINGS[name]
    assert codes[0] == code, error  # (none, if it had to be killed)
    lines = error.splitlines()
    assert (lines[-1] if lines else "") == last, error
    for noise in ("Exception ignored", "Fatal", "Timeout", "Warning", "failed unseen"):
        assert noise not in error
