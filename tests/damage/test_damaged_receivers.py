"""What each parser makes of captured messages that were damaged: an error or a value; no crash, no gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage import hunt, receivers
from tests.damage.mutations import PLAIN, Mutation
from tests.damage.receivers import RECEIVERS, Sample
from tests.damage.subject import Subject
from tests.thorough import THOROUGH

EXAMPLES = 2000 if THOROUGH else 120
OFTEN = {"body": 5, "stream": 3}  # how many more of those that parse more
POSITIONS = st.integers(0, 2**24 - 1)

bounded = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with Subject() as found:
        yield found


@pytest.fixture(scope="module")
def corpus(subject: Subject) -> dict[str, list[Sample]]:
    """Captured now, from sessions of all kinds."""
    found: dict[str, list[Sample]] = {}
    for sample in hunt.samples(subject):
        found.setdefault(sample.receiver, []).append(sample)
    return found


def mutations(kinds: tuple[str, ...]) -> st.SearchStrategy[tuple[Mutation, ...]]:
    one = st.builds(Mutation, st.sampled_from(kinds), POSITIONS, POSITIONS)
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def test_there_is_something_for_every_receiver(corpus: dict[str, list[Sample]]) -> None:
    assert corpus.keys() == RECEIVERS.keys() - {"loan"}


def test_what_is_not_damaged_is_understood(subject: Subject, corpus: dict[str, list[Sample]]) -> None:
    for samples in corpus.values():
        for sample in samples:
            verdict = subject.receive(sample)
            assert not verdict.problem, f"{sample}: {verdict}"
            assert not verdict.outcome.endswith("Error"), f"{sample}: {verdict}"


@pytest.mark.parametrize("receiver", sorted(RECEIVERS.keys() - {"loan"}))
def test_damage_is_an_error_or_a_value(receiver: str, subject: Subject, corpus: dict[str, list[Sample]]) -> None:
    samples = corpus[receiver]

    @settings(bounded, max_examples=EXAMPLES * OFTEN.get(receiver, 1))
    @given(st.sampled_from(range(len(samples))), mutations(hunt.kinds_for(receiver)))
    def damage(i: int, changes: tuple[Mutation, ...]) -> None:
        damaged = hunt.damaged(samples[i], changes, [each.data for each in samples])
        verdict = subject.receive(damaged)
        if verdict.problem:
            path = hunt.Finding(verdict.problem, damaged, None, changes).write(Path("build/damage"))
            pytest.fail(f"{verdict.problem}\nagain: python -m tests.damage --replay {path}", pytrace=False)

    damage()


def test_numbers_of_tensors_at_their_limits(subject: Subject, corpus: dict[str, list[Sample]]) -> None:
    """Every integer of every captured pickle: sizes, strides, offsets, the numbers of buffers."""

    @settings(bounded, max_examples=EXAMPLES * 8)
    @given(st.sampled_from(range(len(corpus["body"]))), st.builds(Mutation, st.just("integer"), POSITIONS, POSITIONS))
    def damage(i: int, change: Mutation) -> None:
        damaged = hunt.damaged(corpus["body"][i], (change,), [])
        verdict = subject.receive(damaged)
        if verdict.problem:
            path = hunt.Finding(verdict.problem, damaged, None, (change,)).write(Path("build/damage"))
            pytest.fail(f"{verdict.problem}\nagain: python -m tests.damage --replay {path}", pytrace=False)

    damage()


@settings(bounded, max_examples=EXAMPLES * 2)
@given(changes=mutations(tuple(PLAIN)))
def test_a_damaged_reference_to_shared_memory(subject: Subject, changes: tuple[Mutation, ...]) -> None:
    verdict = subject.ask(receivers.borrow_damaged, changes)
    assert not verdict.problem, f"{changes}: {verdict}"
