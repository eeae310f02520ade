"""Every scenario under every single fault at every message that it sends, and under random plans: right, or told, in time.

Here a share of them runs, in virtual time and a few in real time. REMORA_THOROUGH=1 runs every single fault, and more random
plans; `python -m tests.faults` does so too, with as many random plans as it is told.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from remora.protocol.session import Session
from remora.rref.held_refs import HeldRefs
from tests.faults.scenarios import SCENARIOS
from tests.faults.trials import (
    REAL,
    VIRTUAL,
    Verdict,
    latency_of,
    quick_time,
    random_plan,
    single_faults,
    survey,
    try_out,
)
from tests.thorough import THOROUGH

# One single fault in so many. A message has eleven or twelve kinds: a share without a factor of these comes by all of them.
SHARE = dict.fromkeys(SCENARIOS, 1) if THOROUGH else {"calls": 25, "references": 13, "gradients": 13, "shutdown": 41}
RANDOM = dict.fromkeys(SCENARIOS, 100) if THOROUGH else {"calls": 10, "references": 25, "gradients": 25, "shutdown": 18}
REALLY = 6  # random plans in real time

pytestmark = pytest.mark.timeout(3600 if THOROUGH else 120)


def assert_all_well(verdicts: list[Verdict]) -> None:
    bad = [verdict for verdict in verdicts if verdict.problems]
    assert not bad, f"{len(bad)} of {len(verdicts)} went wrong:\n" + "\n".join(map(str, bad))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_single_fault_ends_well(scenario: str) -> None:
    plans = list(single_faults(survey(scenario)))
    assert len(plans) > 150
    verdicts = [try_out(scenario, plan) for plan in plans[:: SHARE[scenario]]]
    assert_all_well(verdicts)
    assert sum(verdict.faults > 0 for verdict in verdicts) > 0.8 * len(verdicts), "the plans hit nothing"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_random_plans_end_well(scenario: str) -> None:
    latency = latency_of(scenario, VIRTUAL)
    assert_all_well([try_out(scenario, random_plan(seed, latency), heal=True) for seed in range(RANDOM[scenario])])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_so_they_do_in_real_time(scenario: str) -> None:
    with quick_time():
        plans = list(single_faults(survey(scenario, REAL)))[SHARE[scenario] // 2 :: 3 * SHARE[scenario]]
        verdicts = [try_out(scenario, plan, pace=REAL) for plan in plans]
        verdicts += [try_out(scenario, random_plan(seed), heal=True, pace=REAL) for seed in range(REALLY)]
    assert_all_well(verdicts)


# The trials can fail.


def test_what_runs_twice_is_seen() -> None:
    with mock.patch.object(Session, "is_repeated", return_value=False):
        verdict = try_out("calls", "duplicate PYTHON_CALL worker0->worker1 #1")
    assert "'call' ran 2 times" in verdict.problems


def test_what_stays_behind_is_seen() -> None:
    with mock.patch.object(HeldRefs, "accepted"):
        verdict = try_out("references", "", pace=replace(VIRTUAL, rest=20.0))
    assert any("not at rest" in problem and "references held" in problem for problem in verdict.problems)


def read_wrongly(key: str, reference: object) -> int:
    return 99


def test_a_wrong_result_is_seen() -> None:
    with mock.patch("tests.faults.scenarios.read", read_wrongly):
        verdict = try_out("references", "")
    assert "read: 99 instead of 7" in verdict.problems
