"""Who owes a gradient: the ledger's promises, and that a pass ends, everywhere and once, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.autograd.ledger import Ledger
from tests.autograd.pass_model import ROOTS, Run, World, every_order

WORLDS = {
    "nothing leaves": World((), {ROOTS: frozenset()}),
    "one call": World(((1, 0),), {ROOTS: frozenset({0}), 0: frozenset()}),
    "there and back": World(((0, 1), (1, 0)), {ROOTS: frozenset({1}), 1: frozenset({0}), 0: frozenset()}),
    "one result unused": World(((1, 0), (1, 0)), {ROOTS: frozenset({0}), 0: frozenset(), 1: frozenset()}),
    "around the call": World(
        ((2, 0), (0, 1), (1, 0)),
        {ROOTS: frozenset({0, 2}), 2: frozenset({1}), 1: frozenset({0}), 0: frozenset()},
    ),
    "diamond": World(
        ((0, 1), (0, 2), (1, 3), (2, 3), (3, 0)),
        {ROOTS: frozenset({4}), 4: frozenset({2, 3}), 3: frozenset({1}), 2: frozenset({0}), 1: frozenset(), 0: frozenset()},
    ),
    "to and fro": World(
        ((0, 1), (1, 0), (0, 1), (1, 0)),
        {ROOTS: frozenset({1, 3}), 3: frozenset({0, 2}), 2: frozenset({1}), 1: frozenset({0}), 0: frozenset()},
    ),
    "two at once": World(
        ((0, 1), (0, 2), (1, 0), (2, 0)),
        {ROOTS: frozenset({2, 3}), 3: frozenset({1}), 2: frozenset({0}), 1: frozenset(), 0: frozenset()},
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_pass_ends_once_and_everywhere(name: str) -> None:
    ends = 0
    for run in every_order(lambda: Run(WORLDS[name])):
        run.check_end()
        ends += 1
    assert ends


@pytest.mark.parametrize("name", WORLDS)
def test_a_failure_anywhere_reaches_the_beginning(name: str) -> None:
    for failing in Run(WORLDS[name]).segments():
        for run in every_order(lambda failing=failing: Run(WORLDS[name], failing)):
            run.check_end()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    workers = draw(st.integers(1, 4))
    pair = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    messages = tuple(draw(st.lists(pair, max_size=9)))
    leads = {}
    for source in (ROOTS, *range(len(messages))):
        worker = 0 if source == ROOTS else messages[source][0]
        before = range(len(messages)) if source == ROOTS else range(source)
        received = [message for message in before if messages[message][1] == worker]
        leads[source] = frozenset(draw(st.sets(st.sampled_from(received)))) if received else frozenset()
    return World(messages, leads)


@settings(max_examples=300, deadline=None)
@given(worlds(), st.data())
def test_so_does_any_pass_in_any_order(world: World, data: st.DataObject) -> None:
    run = Run(world)
    failing = data.draw(st.none() | st.sampled_from(run.segments()))
    run = Run(world, failing)
    while run.events:
        run.step(data.draw(st.sampled_from(sorted(run.events))))
    run.check_end()


def test_a_segment_is_handed_out_when_its_last_need_is_met() -> None:
    ledger = Ledger(2, {0b01: set(), 0b11: {0b01}})
    assert ledger.arrive([1]) == []
    assert ledger.arrive([0]) == [0b01]
    assert ledger.owed == []
    assert not ledger.done
    assert ledger.ran(0b01) == [0b11]
    assert ledger.ran(0b11) == []
    assert ledger.done


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    ledger = Ledger(2, {0b01: set(), 0b10: set()})
    ledger.arrive([0])
    for wrong in ([0], [1, 1], [2]):
        with pytest.raises(ValueError, match="not expected"):
            ledger.arrive(wrong)
    with pytest.raises(ValueError, match="not being run"):
        ledger.ran(0b10)
    assert ledger.owed == [1]
    with pytest.raises(ValueError, match="makes no sense"):
        Ledger(1, {0b10: set()})
