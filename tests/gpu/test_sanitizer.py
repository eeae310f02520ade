"""Hand-overs of device memory under CUDA's own tool for finding accesses to memory that is not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = shutil.which("compute-sanitizer")


@pytest.mark.timeout(280)
@pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer here; it comes with the CUDA toolkit")
def test_memcheck_finds_nothing() -> None:
    command = [str(TOOL), "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.hand_overs"], cwd=ROOT, capture_output=True, text=True, timeout=260
    )
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
