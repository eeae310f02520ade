"""What a run found, for people (a table) and for programs (JSON)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import MACHINE, REMORA, TORCH
from benchmarks.measure import Benchmark, Unit
from benchmarks.runner import Results, Row

SCALES = {
    Unit.SECONDS: [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")],
    Unit.CALLS_PER_SECOND: [(1.0, "/s")],
    Unit.BYTES_PER_SECOND: [(1e9, "GB/s"), (1e6, "MB/s")],
}


def show(results: Results, suite: Sequence[Benchmark], console: Console) -> None:
    """The table: medians over the rounds, half the distance between the extremes beside them."""
    title = "Remora beside torch.distributed.rpc"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for name in ("Remora", "torch", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for benchmark in suite:
        _add_rows(table, benchmark, results)
    console.print(table)
    console.print("Medians of the rounds, ± half the spread. Ratio: how many times better Remora is.", style="dim")
    for (benchmark_name, who), note in results.notes.items():
        console.print(f"{benchmark_name}, {who}: {note}", style="yellow", markup=False, highlight=False)


def _add_rows(table: Table, benchmark: Benchmark, results: Results) -> None:
    rows = [row for row in results.rows.values() if row.benchmark.name == benchmark.name]
    for index, row in enumerate(rows):
        title = benchmark.title if index == 0 else ""
        table.add_row(title, row.metric, *_cells(row))


def _cells(row: Row) -> tuple[str, str, str]:
    if MACHINE.name in row.values:
        return words(row.values[MACHINE.name], row.unit), "", ""
    ours, theirs = (row.values.get(who.name, []) for who in (REMORA, TORCH))
    return words(ours, row.unit), words(theirs, row.unit), _ratio_words(ratio(ours, theirs, row.unit))


def words(values: Sequence[float], unit: Unit) -> str:
    """`41.2 µs ± 3%`"""
    if not values:
        return "—"
    median = statistics.median(values)
    scale, name = next((each for each in SCALES[unit] if median >= each[0]), SCALES[unit][-1])
    spread = (max(values) - min(values)) / 2 / median * 100
    digits = f"{median / scale:,.0f}" if median / scale >= 1000 else f"{median / scale:.3g}"
    return f"{digits} {name}" + (f" ±{spread:2.0f}%" if len(values) > 1 else "")


def ratio(ours: Sequence[float], theirs: Sequence[float], unit: Unit) -> float | None:
    """How many times better ours is; below 1 it is worse."""
    if not ours or not theirs:
        return None
    mine, other = statistics.median(ours), statistics.median(theirs)
    return other / mine if unit.less_is_better else mine / other


def _ratio_words(value: float | None) -> str:
    if value is None:
        return "—"
    colour = "green" if value >= 1.05 else "red" if value <= 0.95 else "default"
    return f"[{colour}]{value:.{2 if value < 10 else 1}f}x[/]"


def write(results: Results, folder: Path) -> Path:
    """Every number of every round, and what machine it was."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime("%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps({"environment": environment(), "results": as_data(results)}, indent=2) + "\n")
    return path


def as_data(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "benchmark": row.benchmark.name,
            "metric": row.metric,
            "unit": row.unit.value,
            "less_is_better": row.unit.less_is_better,
            "values": row.values,
            "ratio": ratio(row.values.get(REMORA.name, []), row.values.get(TORCH.name, []), row.unit),
        }
        for row in results.rows.values()
    ]


def environment() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
