"""`python -m tests.faults`: every scenario under every single fault, and under random plans; prints what came of them."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator

from remora.faults.plan import Plan
from tests.faults.scenarios import SCENARIOS
from tests.faults.trials import (
    REAL,
    VIRTUAL,
    Pace,
    Verdict,
    latency_of,
    quick_time,
    random_plan,
    single_faults,
    survey,
    try_out,
)


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    logging.disable(logging.CRITICAL)
    bad = 0
    print(f"{'scenario':<12}{'plans':<10}{'tried':>8}{'faults':>9}{'wrong':>7}{'seconds':>9}")
    gc.collect()
    gc.freeze()  # what was imported stays: the collector need not look at all of torch each time
    with quick_time() if options.real else contextlib.nullcontext():
        for scenario in options.scenarios:
            pace = REAL if options.real else VIRTUAL
            bad += _try_all(scenario, "single", _single(scenario, pace), pace)
            plans = _random(options.seed, options.random, latency_of(scenario, pace))
            bad += _try_all(scenario, "random", plans, pace)
    return 1 if bad else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--random", type=int, default=1000, metavar="N", help="random plans per scenario (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of their seeds (default: 0)")
    parser.add_argument("--real", action="store_true", help="in real time (default: in virtual time)")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    return parser.parse_args(arguments)


def _single(scenario: str, pace: Pace) -> Iterator[tuple[Plan | str, bool]]:
    return ((plan, False) for plan in single_faults(survey(scenario, pace)))


def _random(first: int, n: int, latency: float) -> Iterator[tuple[Plan | str, bool]]:
    return ((random_plan(seed, latency), True) for seed in range(first, first + n))


def _try_all(scenario: str, kind: str, plans: Iterator[tuple[Plan | str, bool]], pace: Pace) -> int:
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for plan, heal in plans:
        with contextlib.redirect_stderr(io.StringIO()):  # functions that fail on purpose say so there
            verdict = try_out(scenario, plan, heal, pace)
        _count(counts, verdict)
        if verdict.problems:
            print(f"WRONG {verdict}", flush=True)
    seconds = time.monotonic() - started
    row = f"{scenario:<12}{kind:<10}{counts['tried']:>8}{counts['faults']:>9}{counts['wrong']:>7}{seconds:>9.1f}"
    print(row, flush=True)
    return counts["wrong"]


def _count(counts: Counter[str], verdict: Verdict) -> None:
    counts["tried"] += 1
    counts["faults"] += verdict.faults
    counts["wrong"] += bool(verdict.problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
