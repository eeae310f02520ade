"""A very short run of the benchmarks, from the command line to the plots, of Remora alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_benchmark_from_the_command_to_the_plot(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--rounds", "1", "--who", "remora", "--only", "noop"]
    run = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (written,) = tmp_path.glob("*.json")
    medians = {row["metric"]: row["medians"]["remora"] for row in json.loads(written.read_text())["results"]}
    assert 0 < medians["p50"] <= medians["p99"] < 1
    assert (tmp_path / "latency.png").stat().st_size > 1000
    assert "rpc_sync no-op" in run.stdout
