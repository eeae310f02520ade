"""What a person reads of a run: a line per test, what went wrong, one table. Formats, and decides nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.conformance.expectations import Expectations
from tests.conformance.trial import Outcome

_LONGEST_OUTPUT = 8000


def line(number: int, total: int, outcome: Outcome, expected: Expectations) -> str:
    """One test."""
    mark = " " if expected.is_met(outcome) else "!"
    width = len(str(total))
    return f"[{number:{width}}/{total}] {mark} {outcome.status:<7} {outcome.seconds:6.2f} s  {outcome.test}"


def story(outcome: Outcome) -> str:
    """All there is to know of one outcome."""
    parts = [f"--- {outcome.test} {outcome.status} after {outcome.seconds:.2f} s", _shortened(outcome.why)]
    if outcome.output.strip():
        parts += [f"--- {outcome.test} printed", _shortened(outcome.output)]
    return "\n".join(part.rstrip() for part in parts)


def _shortened(text: str) -> str:
    """Both ends: the first failure is the cause, the last says how it ended."""
    cut = len(text) - 2 * _LONGEST_OUTPUT
    return text if cut <= 0 else f"{text[:_LONGEST_OUTPUT]}\n[... {cut} characters ...]\n{text[-_LONGEST_OUTPUT:]}"


def table(outcomes: Iterable[Outcome], expected: Expectations, wall: float) -> str:
    """Each suite with its numbers; then those that were not run."""
    by_suite: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_suite[outcome.test.partition(".")[0]].append(outcome)
    everything = [outcome for those in by_suite.values() for outcome in those]
    width = max(map(len, ["all", *by_suite, *expected.absent]))
    rows = [f"{'suite':<{width}}  total  passed  expected failures  unexpected  seconds"]
    rows += [_row(name, those, expected, width) for name, those in by_suite.items()]
    rows += [f"{_row('all', everything, expected, width)}  ({wall:.0f} s on the clock)"]
    rows += [f"{name:<{width}}  not run: {reason}" for name, reason in expected.absent.items()]
    return "\n".join(rows)


def _row(name: str, outcomes: list[Outcome], expected: Expectations, width: int) -> str:
    met = [outcome for outcome in outcomes if expected.is_met(outcome)]
    passed = sum(outcome.status == "passed" for outcome in met)
    numbers = f"{len(outcomes):5}  {passed:6}  {len(met) - passed:17}  {len(outcomes) - len(met):10}"
    return f"{name:<{width}}  {numbers}  {sum(outcome.seconds for outcome in outcomes):7.1f}"
