"""Who leads, in every interleaving of a few threads: it keeps its promises, and the explorer sees when not."""

from __future__ import annotations

import pytest

from remora.protocol.leader import Leadership, Thresholds
from tests.model.leader_model import Scenario, beginning, copied, explore, key
from tests.model.leader_mutants import LARGE, MUTANTS, SMALL, Mutant, two
from tests.thorough import THOROUGH

SCENARIOS = [*SMALL, *(LARGE if THOROUGH else [])]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_promise_is_kept_in_every_world(scenario: Scenario) -> None:
    found = explore(scenario)
    print(found)
    assert not found.broken, str(found)
    assert found.states > 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.where, mutant.attribute, mutant.instead)
    found = explore(mutant.shows_in)
    print(f"{mutant.name}: {found}")
    assert found.broken.startswith(mutant.breaks), str(found)


def test_worlds_know_every_field_of_the_machine() -> None:
    """A field that is not copied would be shared by worlds, and one that is not in the key would make two worlds one."""
    world = beginning(two)
    not_told_apart = {"thresholds", "streak"}  # the same in all worlds of a scenario; whether the leader spins or sleeps
    for name in set(Leadership.__slots__) - not_told_apart:
        other = copied(world)
        value = getattr(world.machine, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        setattr(other.machine, name, value + 100 if is_number else not value)
        if name == "doing":
            other.machine.doing = type(value).IDLE
        elif name == "steps":
            other.machine.few = world.machine.few = 50
        elif name == "renew_at":
            other.machine.renew_at = world.now + 1
        elif name == "stuck_steps":
            other.machine.stuck_steps = other.machine.steps
        assert key(other) != key(world), name


def test_the_thresholds_of_the_model_are_in_the_order_of_the_real_ones() -> None:
    """Else it would not be the same machine that is explored."""

    def order(limits: Thresholds) -> list[bool]:
        return [
            limits.medium < limits.long,
            limits.long_if_behind < limits.long <= limits.look_every < limits.look_every * limits.relaxed,
            limits.long < limits.long_answer,
            limits.reading > limits.long,
        ]

    assert order(two.limits) == order(Thresholds())
