"""Real alarms strike the main thread of a program thousands of times: nothing is lost, hangs or runs twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import THOROUGH

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0 if THOROUGH else 4.0


@pytest.mark.parametrize("kind", ["base", "time"])
def test_a_program_that_is_struck_again_and_again(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "tests.processes.struck"]
    rest = [f"file://{tmp_path}/meeting", str(SECONDS), "1", kind]
    other = subprocess.Popen([*command, "1", *rest], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        done = subprocess.run([*command, "0", *rest], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 90.0)
        assert done.returncode == 0, done.stderr[-5000:]
        outcome: dict[str, Any] = json.loads(done.stdout)
        assert outcome["errors"] == []
        assert outcome["twice"] == []
        assert outcome["struck"] > 100, outcome
        assert outcome["shutdown"] < 20.0, outcome  # it waits for 30 s if something is left
        assert other.wait(30.0) == 0
    finally:
        other.kill()
        other.wait()
