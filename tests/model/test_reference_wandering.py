"""Long random walks through worlds of the reference protocol that are too large to be explored."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.protocol.holder import Holder
from remora.protocol.owner import Owner
from tests.model.explorer import BrokenPromise
from tests.model.reference_explorer import wander
from tests.model.reference_mutants import buries_without_asking, leaves_before_its_children
from tests.model.reference_state import Made, Scenario, Share

LENGTH = 600


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """4 to 6 workers, some values, many shares between any two of them, up to three crashes."""
    size = draw(st.integers(4, 6))
    worker = st.integers(0, size - 1)
    asked_for = st.builds(Made, worker, worker, st.just(False), st.booleans())
    not_asked_for = st.builds(Made, st.just(0), worker.filter(bool), st.just(True))
    values = draw(st.lists(st.one_of(asked_for, asked_for, not_asked_for), min_size=1, max_size=5))
    rarely = st.sampled_from((False, False, False, True))
    shares = draw(st.lists(st.builds(Share, worker, worker, st.booleans(), rarely), min_size=30, max_size=80))
    fetches = draw(st.lists(worker, min_size=5, max_size=15))
    losses = draw(st.integers(0, 3))
    return Scenario("random", size, tuple(values), tuple(shares), tuple(fetches), tuple(range(size)), losses)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(scenarios(), st.integers(0, 2**32))
def test_promises_are_kept_on_long_walks_and_in_the_end_nothing_is_left(scenario: Scenario, seed: int) -> None:
    world, _ = wander(scenario, Random(seed), LENGTH)
    for worker in world.alive:
        site = world.sites[worker]
        assert not site.owner.values
        assert not site.owner.unconfirmed_losses
        assert not site.holder.forks
        assert not site.holder.parents
        assert not site.table
        assert not site.handles


def wide(size: int, losses: int) -> Scenario:
    """Everybody may share with everybody, in calls and replies, and dies if fate will have it."""
    everybody = range(size)
    shares = [Share(a, b, how) for how in (False, True) for a in everybody for b in everybody] * 2
    values = tuple(Made(owner, (owner + step) % size) for owner, step in [(0, 0), (1, 1), (2, 3)])
    return Scenario("wide", size, values, tuple(shares), tuple(everybody), tuple(everybody), losses)


def test_walks_are_long_and_crash() -> None:
    walks = [wander(wide(6, 3), Random(seed), LENGTH)[1] for seed in range(12)]
    lengths = sorted(len(walk) for walk in walks)
    print(f"walks of {lengths[0]} to {lengths[-1]} moves")
    assert lengths[6] > 200
    assert sum("crashes" in move for walk in walks for move in walk) > 12


def narrow() -> Scenario:
    """A chain that somebody falls out of."""
    shares = [Share(a, a + 1, how) for how in (False, True) for a in range(4)]
    return Scenario("narrow", 5, (Made(0, 0), Made(0, 1)), tuple(shares), (), tuple(range(1, 5)), 2)


def walk_often(scenario: Scenario) -> None:
    for seed in range(400):
        wander(scenario, Random(seed), LENGTH)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        ((Holder, "_leave", leaves_before_its_children), wide(5, 3)),
        ((Owner, "lost", buries_without_asking), narrow()),
    ],
    ids=["H3", "O2"],
)
def test_walks_find_a_broken_promise(
    mutant: tuple[object, str, object], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    with pytest.raises(BrokenPromise, match=r"^S1"):
        walk_often(scenario)


def test_walks_of_the_narrow_keep_their_promises() -> None:
    walk_often(narrow())
