"""The reference protocol in every interleaving of small worlds: it keeps its promises, and the explorer sees when not."""

from __future__ import annotations

from dataclasses import fields

import pytest

from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owned, Owner
from tests.model.reference_explorer import explore, main
from tests.model.reference_mutants import HARMLESS, MUTANTS, Mutant, chain
from tests.model.reference_scenarios import SMALL
from tests.model.reference_state import Scenario, beginning, clone_holder, clone_owner, world_key

SCENARIOS = {each.name: each for each in (*SMALL, *(mutant.shows_in for mutant in MUTANTS))}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_every_promise_is_kept_in_every_world(scenario: Scenario) -> None:
    found = explore(scenario)
    print(found)
    assert not found.broken, str(found)
    assert found.states > 5


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_promise_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.where, mutant.attribute, mutant.instead)
    found = explore(mutant.shows_in)
    print(f"{mutant.name} (in {mutant.shows_in.name}): {found}")
    assert found.broken.startswith(mutant.breaks), str(found)
    assert len(found.trace) > 0


def test_a_goodbye_before_the_confirmation_does_no_harm_in_ordered_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """H2 asks for more than is needed where lanes are ordered. The docs say so; this is where they have it from."""
    monkeypatch.setattr(HARMLESS.where, HARMLESS.attribute, HARMLESS.instead)
    for scenario in (*SMALL[:9], HARMLESS.shows_in):
        found = explore(scenario)
        assert not found.broken, str(found)


def test_the_counterexample_is_the_shortest_and_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(each for each in MUTANTS if each.name.startswith("H3"))
    monkeypatch.setattr(mutant.where, mutant.attribute, mutant.instead)
    found = explore(chain)
    assert found.broken == "S1: v0 was freed, but b1 is on its way"
    assert found.trace == [
        "B asks A for v0, held as b0",
        "B -> A: create v0 b0",
        "A -> B: confirm b0",
        "B shares v0, held as b0, with C in a call",
        "B drops b0",
        "B -> A: user delete v0 b0",
    ]


def test_exploring_shows_progress() -> None:
    shown: list[int] = []
    big = next(each for each in SMALL if each.name.startswith("the same in replies"))
    explore(big, lambda found: shown.append(found.states))
    assert shown
    assert shown == sorted(shown)


def test_the_command_explores_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calls not sent", "owner-made: out"]) == 0
    assert main(["no such scenario"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "2 scenarios, " in lines[2]
    assert lines[2].endswith("0 broken")


def test_worlds_know_every_field_of_the_machines() -> None:
    """A field that is not copied would be shared by worlds, and one that is not in the key would make two worlds one."""
    known = {
        Owner: ["values", "unconfirmed_losses", "confirmed_losses", "unmade"],
        Owned: ["forks", "made", "awaited", "creator"],
        Holder: ["forks", "parents", "gone"],
        Held: ["rref", "owner", "parent", "confirmed", "in_use", "children"],
    }
    assert {machine: [each.name for each in fields(machine)] for machine in known} == known


def test_worlds_that_differ_have_different_keys() -> None:
    start = beginning(chain)
    numbers: dict[object, int] = {}
    assert world_key(start, numbers) == world_key(beginning(chain), numbers)
    assert clone_owner(start.sites[0].owner) == start.sites[0].owner
    assert clone_holder(start.sites[0].holder) == start.sites[0].holder
