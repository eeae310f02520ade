"""The order of things: rounds, in each of which the contestants take turns, one benchmark at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.contestants import MACHINE, Contestant, Transport
from benchmarks.group import RunMeasure, opened
from benchmarks.measure import Benchmark, Setting
from benchmarks.results import Results

Say = Callable[[str], None]

ROUNDS_OF_SLOW = 3  # more would be most of a run


@dataclass(frozen=True)
class TryLock:
    """One contestant has the machine to itself, for benchmarks that need the same group."""

    who: Contestant
    benchmarks: list[Benchmark]

    def __str__(self) -> str:
        return f"{self.who.name}: {', '.join(each.name for each in self.benchmarks)}"


def run(
    benchmarks: Sequence[Benchmark], contestants: Sequence[Contestant], *, rounds: int, quick: bool, say: Say
) -> Results:
    """Measure everything, so many times."""
    results = Results()
    for number in range(rounds):
        due = [each for each in benchmarks if each.rounds is None or number < (1 if quick else each.rounds)]
        for turn in _turns(due, contestants, number, quick):
            say(f"round {number + 1} of {rounds} · {turn}")
            _take(turn, quick, results)
    return results


def _turns(
    benchmarks: Sequence[Benchmark], contestants: Sequence[Contestant], number: int, quick: bool
) -> Iterator[TryLock]:
    """Those that start quickly get a group for every turn, which are short; who goes first changes every round.

    No two are up at the same time: torch.distributed.rpc burns a fifth of a core in every process that is idle. Actor
    systems take long to start: all their turns of a round are one, and they do not take part in every round.
    """
    quick_to_start = [who for who in [MACHINE, *contestants] if not who.slow_to_start]
    order = quick_to_start if number % 2 == 0 else quick_to_start[::-1]
    for benchmark in benchmarks:
        for _ in range(1 if quick else benchmark.bouts):
            yield from (TryLock(who, [benchmark]) for who in order if who in benchmark.contestants)
    if number < (1 if quick else ROUNDS_OF_SLOW):
        for who in contestants:
            if who.slow_to_start:
                yield from (TryLock(who, alike) for alike in _alike([b for b in benchmarks if who in b.contestants]))


def _alike(benchmarks: Sequence[Benchmark]) -> list[list[Benchmark]]:
    def needs(benchmark: Benchmark) -> tuple[int, Transport]:
        return benchmark.workers, benchmark.transport

    return [list(alike) for _, alike in groupby(sorted(benchmarks, key=needs), key=needs)]


def _take(turn: TryLock, quick: bool, results: Results) -> None:
    first = turn.benchmarks[0]
    setting = Setting(turn.who, first.transport, first.workers, quick)
    try:
        with opened(setting) as run_measure:
            _measure_all(turn, run_measure, results)
    except Exception as error:
        for benchmark in turn.benchmarks:
            results.excuse(benchmark.name, turn.who.name, error)


def _measure_all(turn: TryLock, run_measure: RunMeasure, results: Results) -> None:
    for benchmark in turn.benchmarks:
        try:
            results.add(benchmark.name, turn.who.name, run_measure(benchmark.measure))
        except Exception as error:  # one broken benchmark must not hide the others
            results.excuse(benchmark.name, turn.who.name, error)
