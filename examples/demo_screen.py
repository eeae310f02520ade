"""What the demo looks like: a line that moves while an act runs, a tick when it is done, a table at the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from demo_acts import Act, Ledger


@dataclass(frozen=True)
class Tally:
    """One act, all workers together."""

    act: Act
    ledgers: list[Ledger]

    @property
    def latencies(self) -> list[float]:
        return [seconds for ledger in self.ledgers for seconds in ledger.latencies]

    @property
    def calls_per_second(self) -> float:
        return sum(len(ledger.latencies) / ledger.busy for ledger in self.ledgers if ledger.busy)

    @property
    def bytes_per_second(self) -> float:
        return sum(ledger.bytes / ledger.busy for ledger in self.ledgers if ledger.busy)

    @property
    def wrong(self) -> list[str]:
        return [what for ledger in self.ledgers for what in ledger.wrong]

    @property
    def shown(self) -> str:
        return "".join(ledger.shown for ledger in self.ledgers)


class MovingLine:
    """The progress of one act, or nothing where lines cannot move."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, share: float, calls: int) -> None:
        self._progress.update(self._task, completed=min(share, 1.0), calls=f"{calls:,} calls" if calls else "")


class Screen:
    """A terminal, or a file that wants plain lines."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def title(self, text: str, detail: str) -> None:
        self.console.print(Text.assemble(("\n" + text, "bold cyan"), ("  " + detail, "dim")), end="\n\n")

    @contextmanager
    def moving_line(self, title: str) -> Iterator[MovingLine]:
        columns = (
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description:<30}"),
            BarColumn(bar_width=24, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.fields[calls]}"),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            yield MovingLine(progress, progress.add_task(title, total=1.0, calls=""))

    def done(self, title: str, detail: str, well: bool = True) -> None:
        mark = ("✓", "bold green") if well else ("✗", "bold red")
        self.console.print(Text.assemble(mark, f" {title:<30} ", (detail, "dim" if well else "red")))

    def traceback(self, title: str, text: str) -> None:
        short = text.replace(f"{Path.cwd()}/", "").rstrip()
        self.console.print(Panel(Text(short, style="red"), title=title, border_style="dim", padding=(0, 1)))

    def table(self, tallies: list[Tally]) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("kind of call", no_wrap=True)
        for name in ("calls", "p50", "p99", "calls/s", "MB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for tally in tallies:
            table.add_row(tally.act.title, *_figures(tally))
        self.console.print()
        self.console.print(table)

    def verdict(self, text: str, well: bool) -> None:
        self.console.print(text, style="bold green" if well else "bold red")


def _figures(tally: Tally) -> list[str]:
    ordered = sorted(tally.latencies)
    if not ordered:
        return ["0", "", "", "", ""]
    tail = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    megabytes = f"{tally.bytes_per_second / 1e6:,.0f}" if tally.bytes_per_second else ""
    calls = f"{len(ordered):,}"
    return [calls, duration(statistics.median(ordered)), duration(tail), f"{tally.calls_per_second:,.0f}", megabytes]


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
