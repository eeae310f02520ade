"""Who reads a link, in every interleaving of a few threads: it keeps its promises, and the explorer sees when not."""

from __future__ import annotations

import pytest

from remora.protocol.reader import Reader, Registration, Thresholds
from tests.model.reader_model import FUSED, LIMITS, STEPS, Scenario, beginning, copied, explore, key
from tests.model.reader_mutants import LARGE, MUTANTS, SMALL, Mutant, owned
from tests.thorough import THOROUGH

SCENARIOS = [*SMALL, *(LARGE if THOROUGH else [])]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_promise_is_kept_in_every_world(scenario: Scenario) -> None:
    found = explore(scenario)
    print(found)
    assert not found.broken, str(found)
    assert found.states > 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.where, mutant.attribute, mutant.instead)
    found = explore(mutant.shows_in)
    print(f"{mutant.name}: {found}")
    assert found.broken.startswith(mutant.breaks), str(found)


def test_every_promise_has_a_mutant() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == {"R1", "R2", "R3", "R4", "R5", "R6"}


def test_worlds_know_every_field_of_the_machine() -> None:
    """A field that is not copied would be shared by worlds, and one that is not in the key would make two worlds one."""
    start = beginning(owned)
    start.role = start.token = 1
    for name in set(Reader.__slots__) - {"thresholds", "pending"}:  # (the same in all worlds; set before it is used)
        other = copied(start)
        value = getattr(other.machine, name)
        if isinstance(value, set):
            value.add(7)
        elif isinstance(value, dict):
            value[7] = 7
        else:
            setattr(other.machine, name, not value if isinstance(value, bool) else 1 if value is None else value + 1)
        assert key(other) != key(start), name
        assert key(copied(other)) == key(other), name
    for name in Registration.__slots__:
        other = copied(start)
        value = getattr(other.registrations[0], name)
        setattr(other.registrations[0], name, not value if isinstance(value, bool) else value + 1)
        assert key(other) != key(start), name


def test_the_thresholds_of_the_model_are_in_the_order_of_the_real_ones() -> None:
    """Else it would not be the same machine that is explored."""
    assert (LIMITS.round < LIMITS.memory) is (Thresholds().round < Thresholds().memory)


def test_steps_that_are_taken_as_one_exist() -> None:
    assert STEPS.keys() >= FUSED
