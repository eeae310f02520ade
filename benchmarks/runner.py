"""The order of things: rounds, in each of which the contestants take turns; benchmarks that can share a group do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from benchmarks.contestants import MACHINE, Contestant, Transport
from benchmarks.group import Group
from benchmarks.measure import Benchmark, Measure, Reading, Setting, Skipped, Unit


@dataclass
class Row:
    """All numbers of one metric of one benchmark: by contestant, one a round."""

    benchmark: Benchmark
    metric: str
    unit: Unit
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Results:
    """What a run found, and what there is to say about what is missing."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    failed: bool = False

    def add(self, benchmark: Benchmark, who: Contestant, readings: Sequence[Reading]) -> None:
        for reading in readings:
            new = Row(benchmark, reading.metric, reading.unit)
            row = self.rows.setdefault((benchmark.name, reading.metric), new)
            row.values.setdefault(who.name, []).append(reading.value)

    def excuse(self, benchmark: Benchmark, who: Contestant, error: Exception) -> None:
        self.failed |= not isinstance(error, Skipped)
        self.notes[benchmark.name, who.name] = str(error).strip()


@dataclass(frozen=True)
class Turn:
    """One contestant's turn at benchmarks that need the same group."""

    who: Contestant
    benchmarks: list[Benchmark]

    def __str__(self) -> str:
        return f"{self.who.name}: {', '.join(each.name for each in self.benchmarks)}"


def run(
    benchmarks: Sequence[Benchmark],
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    quick: bool,
    say: Callable[[str], None],
) -> Results:
    """Measure everything, so many times."""
    results = Results()
    for number in range(rounds):
        for turn in _turns(benchmarks, contestants, number):
            say(f"round {number + 1} of {rounds} · {turn}")
            _take(turn, quick, results)
    return results


def _turns(benchmarks: Sequence[Benchmark], contestants: Sequence[Contestant], number: int) -> Iterator[Turn]:
    """Who goes first changes every round."""
    order = contestants if number % 2 == 0 else contestants[::-1]
    for alike in _alike(benchmarks):
        for who in order if alike[0].contestants else [MACHINE]:
            yield Turn(who, alike)


def _alike(benchmarks: Sequence[Benchmark]) -> list[list[Benchmark]]:
    def needs(benchmark: Benchmark) -> tuple[bool, int, Transport]:
        return benchmark.contestants, benchmark.workers, benchmark.transport

    return [list(alike) for _, alike in groupby(sorted(benchmarks, key=needs), key=needs)]


def _take(turn: Turn, quick: bool, results: Results) -> None:
    first = turn.benchmarks[0]
    setting = Setting(turn.who, first.transport, first.workers, quick)
    if not setting.workers:
        _measure_all(turn, lambda measure: list(measure(setting)), results)
        return
    try:
        with Group(setting) as group:
            _measure_all(turn, group.run, results)
    except Exception as error:
        for benchmark in turn.benchmarks:
            results.excuse(benchmark, turn.who, error)


def _measure_all(turn: Turn, run_measure: Callable[[Measure], list[Reading]], results: Results) -> None:
    for benchmark in turn.benchmarks:
        try:
            results.add(benchmark, turn.who, run_measure(benchmark.measure))
        except Exception as error:  # one broken benchmark must not hide the others
            results.excuse(benchmark, turn.who, error)
