"""What a run found, for people (tables) and for programs (JSON)."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import bars, results, wording
from benchmarks.against import ALLOWED, BEFORE, NOW, Change, Comparison, Verdict
from benchmarks.contestants import CONTESTANTS, MACHINE, REMORA, TORCH, Contestant
from benchmarks.measure import Benchmark
from benchmarks.results import Results, Row

COLOURS = {Verdict.WORSE: "red", Verdict.BETTER: "green", Verdict.NO_WORSE: "default", Verdict.OPEN: "yellow"}
TITLES = {"remora": "Remora", "torch": "torch", "ray": "Ray", "monarch": "Monarch"}


def show(results: Results, suite: Sequence[Benchmark], console: Console) -> None:
    """The tables: the machine, the contestants, the bars; then what went wrong."""
    _show_machine(results, [each for each in suite if each.contestants == (MACHINE,)], console)
    _show_contestants(results, [each for each in suite if each.contestants != (MACHINE,)], console)
    _show_bars(results, console)
    for (benchmark, who), note in results.notes.items():
        console.print(f"{benchmark}, {who}: {note}", style="yellow", markup=False, highlight=False)


def _show_machine(results: Results, suite: Sequence[Benchmark], console: Console) -> None:
    table = _table("What the machine does, without RPC", ["floor", "metric"], [""])
    for benchmark in suite:
        _add_rows(table, benchmark, results, lambda row: [_cell(row, MACHINE)])
    _print(table, console)


def _show_contestants(results: Results, suite: Sequence[Benchmark], console: Console) -> None:
    present = [who for who in CONTESTANTS if who.name in results.contestants()]
    others = [who for who in present if who not in (REMORA, TORCH)]
    numbers = ["Remora", "torch", "ratio", *(TITLES[who.name] for who in others)]
    table = _table("Remora beside torch.distributed.rpc", ["benchmark", "metric"], numbers)

    def cells(row: Row) -> list[str]:
        ratio = _coloured(row.ratio(REMORA.name, TORCH.name))
        return [_cell(row, REMORA), _cell(row, TORCH), ratio, *(_cell(row, who) for who in others)]

    for benchmark in suite:
        _add_rows(table, benchmark, results, cells)
    _print(table, console)
    if table.rows:
        how = "Medians of all turns, ± half the distance between the quartiles."
        console.print(f"{how} Ratio: how many times better Remora is.", style="dim")


def _show_bars(results: Results, console: Console) -> None:
    table = _table("Bars", ["bar"], ["wanted", "measured", ""])
    for verdict in bars.judge(results):
        table.add_row(verdict.name, verdict.wanted, verdict.measured, "[green]met[/]" if verdict.met else "[red]not met[/]")
    _print(table, console)


def show_changes(found: Comparison, suite: Sequence[Benchmark], console: Console) -> None:
    """The table of a comparison of two trees, and what went wrong."""
    title = f"The working tree beside {found.revision}"
    table = _table(title, ["benchmark", "metric"], ["before", "now", "now/before", "99 % interval", "pairs", ""])
    for benchmark in suite:
        for index, change in enumerate(change for change in found.of(benchmark.name) if change.tabled):
            table.add_row(benchmark.title if index == 0 else "", change.metric, *_cells_of(change))
    _print(table, console)
    if table.rows:
        how = "Before, now: medians of all turns. Ratio: the median of pairs of turns, and its bootstrap interval."
        worse = f"Worse: by more than {ALLOWED:.0%} in all of the interval. Open: in some of it; more rounds may tell."
        console.print(f"{how} {worse}", style="dim", highlight=False)
    for (name, who), note in found.notes.items():
        console.print(f"{name}, {who}: {note}", style="yellow", markup=False, highlight=False)


def show_paths(found: Sequence[Comparison], suite: Sequence[Benchmark], console: Console) -> None:
    """The table of fast paths, each compared with its absence, and what went wrong."""
    words = ["fast path", "benchmark", "metric"]
    table = _table("With each fast path, and without it", words, ["without", "with", "ratio", "99 % interval", "pairs", ""])
    for path in found:
        name = path.revision
        for benchmark in suite:
            for change in path.of(benchmark.name):
                if change.tabled and change.metric != "p99":
                    table.add_row(name, benchmark.title, change.metric, *_cells_of(change))
                    name = ""
    _print(table, console)
    for path in found:
        for (benchmark_name, who), note in path.notes.items():
            side = "with it" if who == NOW else "without it"
            console.print(f"{path.revision}, {benchmark_name}, {side}: {note}", style="yellow", markup=False)


def _cells_of(change: Change) -> list[str]:
    ratio, interval, verdict = change.ratio(), change.interval(), change.verdict()
    return [
        *(wording.of_value(statistics.median(change.values(who)), change.unit) for who in (BEFORE, NOW)),
        "—" if ratio is None else f"{ratio:.3f}",
        "—" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        str(len(change.values(NOW))),
        "—" if verdict is None else f"[{COLOURS[verdict]}]{verdict.value}[/]",
    ]


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_rows(table: Table, benchmark: Benchmark, results: Results, cells: Any) -> None:
    for index, row in enumerate(row for row in results.of(benchmark.name) if row.tabled):
        table.add_row(benchmark.title if index == 0 else "", row.metric, *cells(row))


def _print(table: Table, console: Console) -> None:
    if table.rows:
        console.print(table)


def _cell(row: Row, who: Contestant) -> str:
    return wording.of_values(row.values.get(who.name, []), row.unit)


def _coloured(ratio: float | None) -> str:
    if ratio is None:
        return "—"
    colour = "green" if ratio >= 1.05 else "red" if ratio <= 0.95 else "default"
    return f"[{colour}]{wording.of_ratio(ratio)}[/]"


def write(found: Results, path: Path) -> None:
    """Every number of every turn, what they come to, and what machine it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "environment": environment(),
        "results": results.as_data(found, REMORA.name, TORCH.name),
        "bars": [vars(verdict) for verdict in bars.judge(found)],
        "notes": [{"benchmark": name, "who": who, "note": note} for (name, who), note in found.notes.items()],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_changes(found: Comparison, path: Path) -> None:
    """Every number of every turn of both trees, by rounds, and what they come to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **_changes_as_data(found)}, indent=1) + "\n")


def write_paths(found: Sequence[Comparison], path: Path) -> None:
    """The same for each fast path: `now` is with it, `before` without it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"environment": environment(), "paths": [_changes_as_data(each) for each in found]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def _changes_as_data(found: Comparison) -> dict[str, Any]:
    changes = [
        {
            "benchmark": change.benchmark,
            "metric": change.metric,
            "unit": change.unit.value,
            "less_is_better": change.unit.less_is_better,
            "ratio": change.ratio(),
            "interval": change.interval(),
            "verdict": verdict.value if (verdict := change.verdict()) else None,
            "rounds": [[{NOW: now, BEFORE: before} for now, before in pairs] for pairs in change.rounds.values()],
        }
        for change in found.changes.values()
    ]
    notes = [{"benchmark": name, "who": who, "note": note} for (name, who), note in found.notes.items()]
    return {"against": found.revision, "changes": changes, "notes": notes}


def read(path: Path) -> Results:
    """What was written."""
    return results.from_data(json.loads(path.read_text())["results"])


def environment() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
