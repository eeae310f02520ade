"""The ten lines of the README run as they stand, and print what stands below them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def ten_lines() -> tuple[str, str]:
    """The first program of the README, and the block that follows it."""
    found = re.search(r"## Ten lines\n\n```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None, "the section has a program and its output"
    return found[1], found[2]


@pytest.mark.parametrize("module", ["remora", "torch.distributed"])
def test_the_ten_lines_print_what_the_readme_says(tmp_path: Path, module: str) -> None:
    program, printed = ten_lines()
    assert "29500" in program
    assert "from remora import rpc" in program
    with socket.create_server(("127.0.0.1", 0)) as server:  # the port of the README may be in use here
        port = server.getsockname()[1]
    if module != "remora":  # as the README says below
        program = program.replace("from remora import rpc", f"import {module}.rpc as rpc")
    file = tmp_path / "ten_lines.py"
    file.write_text(program.replace("29500", str(port)))
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    ) as running:  # fmt: skip
        try:
            out, errors = running.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    assert (running.returncode, out) == (0, printed), errors
    if module == "remora":
        assert errors == ""
