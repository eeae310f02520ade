"""The order of things: rounds, in each of which the contestants take turns; benchmarks that can share a group do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby

from benchmarks.contestants import MACHINE, Contestant, Transport
from benchmarks.group import Group
from benchmarks.measure import Benchmark, Measure, Reading, Setting
from benchmarks.results import Results

Say = Callable[[str], None]
RunMeasure = Callable[[Measure], list[Reading]]


def run(
    benchmarks: Sequence[Benchmark], contestants: Sequence[Contestant], *, rounds: int, quick: bool, say: Say
) -> Results:
    """Measure everything, so many times."""
    results = Results()
    for number in range(rounds):
        due = [each for each in benchmarks if number < (each.rounds or rounds)]
        for alike in _alike(due):
            for heat in _heats(contestants, number, alike[0].contestants, quick):
                taking_part = [each for each in alike if _suits(each, heat)]
                if taking_part:
                    say(f"round {number + 1} of {rounds} · {_names(heat)}: {', '.join(each.name for each in taking_part)}")
                    _compete(taking_part, heat, quick, results)
    return results


def _alike(benchmarks: Sequence[Benchmark]) -> list[list[Benchmark]]:
    def needs(benchmark: Benchmark) -> tuple[bool, int, Transport, str]:
        own = benchmark.name if benchmark.alone else ""
        return benchmark.contestants, benchmark.workers, benchmark.transport, own

    return [list(alike) for _, alike in groupby(sorted(benchmarks, key=needs), key=needs)]


def _heats(contestants: Sequence[Contestant], number: int, needed: bool, quick: bool) -> list[list[Contestant]]:
    """Those that cost nothing while they wait are up together, and who is first changes every round.

    Actor systems run services that never rest: each is up alone, and in a quick run only once.
    """
    if not needed:
        return [[MACHINE]]
    together = [who for who in contestants if who.is_rpc]
    alone = [[who] for who in contestants if not who.is_rpc and not (quick and number)]
    return [together if number % 2 == 0 else together[::-1], *alone]


def _suits(benchmark: Benchmark, heat: Sequence[Contestant]) -> bool:
    return benchmark.actors or not benchmark.contestants or all(who.is_rpc for who in heat)


def _names(heat: Sequence[Contestant]) -> str:
    return " and ".join(who.name for who in heat)


def _compete(benchmarks: Sequence[Benchmark], heat: Sequence[Contestant], quick: bool, results: Results) -> None:
    """Turns are short: one contestant, one benchmark, one bout; then it is the next one's."""
    with ExitStack() as stack:
        ready = {who: _prepare(who, benchmarks, quick, results, stack) for who in heat}
        for benchmark in benchmarks:
            for _ in range(1 if quick else benchmark.bouts):
                for who, run_measure in ready.items():
                    if run_measure is not None:
                        _measure(benchmark, who, run_measure, results)


def _prepare(
    who: Contestant, benchmarks: Sequence[Benchmark], quick: bool, results: Results, stack: ExitStack
) -> RunMeasure | None:
    """What runs a measure for this contestant, in a group if it takes one; None if the group would not start."""
    setting = Setting(who, benchmarks[0].transport, benchmarks[0].workers, quick)
    if not setting.workers:
        return lambda measure: list(measure(setting))
    try:
        return stack.enter_context(Group(setting)).run
    except Exception as error:
        for benchmark in benchmarks:
            results.excuse(benchmark.name, who.name, error)
        return None


def _measure(benchmark: Benchmark, who: Contestant, run_measure: RunMeasure, results: Results) -> None:
    try:
        results.add(benchmark.name, who.name, run_measure(benchmark.measure))
    except Exception as error:  # one broken benchmark must not hide the others
        results.excuse(benchmark.name, who.name, error)
