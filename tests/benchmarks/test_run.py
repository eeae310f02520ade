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


def test_instructions_are_counted_alike_in_each_group(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--instructions", "--quick", "--rounds", "3", "--only", "noop"]
    run = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (written,) = tmp_path.glob("*.json")
    counts = {row["metric"]: row["values"]["remora"] for row in json.loads(written.read_text())["results"]}
    assert set(counts) == {"caller", "callee", "caller, C calls", "callee, C calls"}
    assert min(counts["caller"] + counts["callee"]) > 500
    for metric in ("caller", "caller, C calls"):  # (the callee sets an alarm now and then, by the time that has passed)
        assert max(counts[metric]) < 1.05 * min(counts[metric]), counts
