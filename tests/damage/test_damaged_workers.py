"""**Damaged anywhere**: one unit between two workers arrives damaged. The program is right or fails clearly, in five
seconds; both workers live, later calls are right, and nothing is left behind. On every road."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.damage import hunt, trials
from tests.damage.mutations import Mutation
from tests.damage.processes import Pair
from tests.damage.sessions import PROGRAMS
from tests.damage.subject import Subject
from tests.damage.trials import ROADS, Trial
from tests.thorough import THOROUGH

HEADERS, ANY = (400, 200) if THOROUGH else (3, 1)  # trials of each program on each road
IN_PROCESSES = 300 if THOROUGH else 25


@pytest.fixture
def subject() -> Iterator[Subject]:
    with Subject(patience=60.0) as found:
        yield found


def chosen(subject: Subject, road: str, program: str, headers: int, anything: int) -> list[Trial]:
    units = hunt.captured(subject, road, program)
    chance = random.Random(f"{road} {program}")
    every = list(hunt.header_trials(units, road, program))
    return chance.sample(every, min(headers, len(every))) + [
        hunt.random_trial(chance, units, road, program) for _ in range(anything)
    ]


@pytest.mark.parametrize("road", ROADS)
def test_damaged_anywhere(road: str, subject: Subject) -> None:
    for program in PROGRAMS:
        for trial in chosen(subject, road, program, HEADERS, ANY):
            verdict = subject.ask(trials.judged, trial)
            if verdict.problem:
                path = hunt.Finding(verdict.problem, None, trial, trial.mutations).write(Path("build/damage"))
                pytest.fail(f"{trial}\n{verdict.problem}\nagain: python -m tests.damage --replay {path}", pytrace=False)


def test_a_call_that_makes_a_value_and_does_not_say_which(subject: Subject) -> None:
    """The owner cannot read what value it was to make: calls of that value, which are there already, fail with it."""
    trial = Trial("unix", "references", "out", 0x105, 1, "sealed", (Mutation("cut", 3),))
    verdict = subject.ask(trials.judged, trial)
    assert not verdict.problem, verdict.problem
    assert "was never made" in verdict.outcome


@pytest.mark.parametrize("road", ["tcp", "shm"])
def test_damaged_between_processes(road: str, subject: Subject) -> None:
    """A man in the middle of two processes."""
    found = [trial for program in PROGRAMS for trial in chosen(subject, road, program, 20, 20) if trial.kind >= 0]
    with Pair(road) as pair:
        outcomes = [pair.try_out(trial) for trial in random.Random(road).sample(found, IN_PROCESSES)]
    assert outcomes.count("missed") < len(outcomes) / 2, outcomes
