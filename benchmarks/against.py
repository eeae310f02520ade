"""The working tree and another revision, turn by turn: `make bench ARGS="--against REV"`.

A round has a fresh group of each tree, both up at the same time: an idle worker of Remora costs nothing. They take turns
in the order A B B A, so what changes steadily on the machine strikes both alike. Two neighbouring turns are a pair. The
ratio of a pair is the number of the working tree by that of the revision. What is told is the median of all pairs, and the
interval in which it lies for 99 % of random draws of rounds and of pairs in them (a bootstrap). Rounds are drawn as a
whole because the turns of one group have its luck in common: which processor it is on, where its memory lies.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from benchmarks.contestants import REMORA
from benchmarks.group import RunMeasure
from benchmarks.measure import Benchmark, Measure, Reading, Setting, Unit
from benchmarks.side import Side
from benchmarks.trees import ROOT, compile_all

NOW, BEFORE = "now", "before"
ALLOWED = 0.03  # a change for the worse by no more than this is none
DRAWS = 2000
TAIL = 0.005  # of the draws, at each end: a run has dozens of metrics, and one in twenty would be a false alarm in each
SECONDS = 2.0  # for so long at least both trees take turns in a round: short turns make many pairs
QUICK_SECONDS = 0.5
LEAST_PAIRS = 6  # of fewer, even the extremes do not hold the true median in 19 of 20 cases
ROUNDS = {True: 2, False: 5}  # by whether it is quick

Pair = tuple[float, float]  # now, before
Say = Callable[[str], None]


class Verdict(Enum):
    """What the interval of the ratios says."""

    WORSE = "worse"  # all of it is beyond what is allowed
    BETTER = "better"  # all of it is on the good side of 1
    NO_WORSE = "no worse"  # all of it is within what is allowed
    OPEN = "open"  # it has both what is allowed and what is not, or there are few pairs: more rounds may tell


@dataclass
class Change:
    """One metric of one benchmark in both trees: by the number of the round, its pairs of turns."""

    benchmark: str
    metric: str
    unit: Unit
    tabled: bool = True
    rounds: dict[int, list[Pair]] = field(default_factory=dict)

    def values(self, who: str) -> list[float]:
        return [pair[0 if who == NOW else 1] for pairs in self.rounds.values() for pair in pairs]

    def ratio(self) -> float | None:
        """The median of now / before; None where that says nothing."""
        ratios = [ratio for each in self._ratios() for ratio in each]
        return statistics.median(ratios) if ratios else None

    def interval(self) -> tuple[float, float] | None:
        """Where the ratio may lie; None if there are too few pairs to tell."""
        rounds = self._ratios()
        if sum(map(len, rounds)) < 2:
            return None
        return bootstrap(rounds, random.Random(0))

    def verdict(self) -> Verdict | None:
        interval = self.interval()
        if interval is None:
            return None
        if sum(map(len, self._ratios())) < LEAST_PAIRS:
            return Verdict.OPEN
        low, high = interval if self.unit.less_is_better else (1 / interval[1], 1 / interval[0])
        if low > 1 + ALLOWED:
            return Verdict.WORSE
        if high < 1:
            return Verdict.BETTER
        return Verdict.NO_WORSE if high <= 1 + ALLOWED else Verdict.OPEN

    def _ratios(self) -> list[list[float]]:
        """By round; memory can be given back, so a growth may be negative and has no ratio then."""
        if self.unit is Unit.COUNT:
            return []
        ratios = [[now / before for now, before in pairs if now > 0 and before > 0] for pairs in self.rounds.values()]
        return [each for each in ratios if each]


def bootstrap(rounds: Sequence[Sequence[float]], chance: random.Random) -> tuple[float, float]:
    """The interval of the median over random draws: of rounds, and in each of them of what it has, both with repetition."""
    medians = []
    for _ in range(DRAWS):
        drawn = [chance.choices(one, k=len(one)) for one in chance.choices(rounds, k=len(rounds))]
        medians.append(statistics.median([ratio for one in drawn for ratio in one]))
    medians.sort()
    return medians[int(DRAWS * TAIL)], medians[int(DRAWS * (1 - TAIL)) - 1]


@dataclass
class Comparison:
    """What a run found."""

    revision: str
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)  # by benchmark and tree: what went wrong

    def add(self, benchmark: str, number: int, readings: dict[str, list[Reading]]) -> None:
        """One pair of turns, in the round of that number."""
        before = {reading.metric: reading.value for reading in readings[BEFORE]}
        for reading in readings[NOW]:
            if reading.metric in before:
                new = Change(benchmark, reading.metric, reading.unit, reading.tabled)
                change = self.changes.setdefault((benchmark, reading.metric), new)
                change.rounds.setdefault(number, []).append((reading.value, before[reading.metric]))

    def excuse(self, benchmark: str, who: str, error: Exception) -> None:
        self.notes[benchmark, who] = str(error).strip() or type(error).__name__

    def of(self, benchmark: str) -> list[Change]:
        return [change for change in self.changes.values() if change.benchmark == benchmark]


def run(
    benchmarks: Sequence[Benchmark], packages: Path, found: Comparison, *, rounds: int | None, quick: bool, say: Say
) -> None:
    """Measure everything in both trees, and enter it in `found`; `packages` is where those of the revision are.

    Benchmarks that take long have fewer rounds, unless the caller says how many.
    """
    compile_all(ROOT / "src")
    with Side(ROOT / "src") as now, Side(packages) as before:
        alternate(benchmarks, {NOW: now, BEFORE: before}, found, rounds=rounds, quick=quick, say=say)


def alternate(
    benchmarks: Sequence[Benchmark], sides: dict[str, Side], found: Comparison, *, rounds: int | None, quick: bool, say: Say
) -> None:
    """All rounds of all benchmarks."""
    for number in range(rounds or ROUNDS[quick]):
        for benchmark in benchmarks:
            if rounds or benchmark.rounds is None or number < (1 if quick else benchmark.rounds):
                say(f"round {number + 1} of {rounds or ROUNDS[quick]} · {benchmark.name}")
                compare(benchmark, sides, number, quick, found)


def compare(benchmark: Benchmark, sides: dict[str, Side], number: int, quick: bool, found: Comparison) -> None:
    """One round of one benchmark."""
    setting = Setting(REMORA, benchmark.transport, benchmark.workers, quick)
    with ExitStack() as groups:
        runs: dict[str, RunMeasure] = {}
        for who in block(number)[0]:
            try:
                side = sides[who]
                runs[who] = _fresh(side, setting) if benchmark.fresh else groups.enter_context(side.group(setting))
            except Exception as error:
                found.excuse(benchmark.name, who, error)
                return
        blocks, end = 1 if quick else benchmark.bouts, time.monotonic() + (QUICK_SECONDS if quick else SECONDS)
        while blocks > 0 or time.monotonic() < end:
            blocks -= 1
            for order in block(number):
                readings = {who: _turn(benchmark, who, runs[who], found) for who in order}
                if not all(readings.values()):
                    return
                found.add(benchmark.name, number, readings)


def block(number: int) -> list[tuple[str, str]]:
    """Who goes first in each of two pairs, A B and B A; every other round begins with the other tree."""
    first, second = (NOW, BEFORE) if number % 2 == 0 else (BEFORE, NOW)
    return [(first, second), (second, first)]


def _fresh(side: Side, setting: Setting) -> RunMeasure:
    """A group for each turn, and none of the other tree beside it."""

    def run_once(measure: Measure) -> list[Reading]:
        with side.group(setting) as run_measure:
            return run_measure(measure)

    return run_once


def _turn(benchmark: Benchmark, who: str, run_measure: RunMeasure, found: Comparison) -> list[Reading]:
    try:
        return run_measure(benchmark.measure)
    except Exception as error:  # one broken benchmark must not hide the others
        found.excuse(benchmark.name, who, error)
        return []
