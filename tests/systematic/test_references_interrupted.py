"""References, interrupted anywhere: an exception strikes the main thread at every point where the interpreter looks for
signals, while it makes a value on another worker, or hands references on. After each strike no worker counts or holds
anything. (What strikes in a destructor is lost by the interpreter, and is not tried.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora import rpc
from remora.testing.world import World
from tests.systematic.tracing import SIGNALS, AtPlace, Place, places_of

TRIES = 20  # times that a scenario is done to come to a place: which thread reads what is a matter of chance
SOON = 10.0  # seconds: much longer than anything here takes


class Struck(BaseException):
    """What the signal handler of a program raises."""


class Held:
    """A value that stays where it is."""


def strike_here(place: Place) -> None:
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return
        frame = frame.f_back
    raise Struck(f"raised on purpose at {place}")


def look_at(*references: Any) -> int:
    return len(references)


def make_there() -> None:
    rpc.remote("worker1", Held)


def make_from_own() -> None:
    rpc.remote("worker1", look_at, args=(rpc.RRef(Held()),))


def hand_out_own() -> None:
    assert rpc.rpc_async("worker1", look_at, args=(rpc.RRef(Held()), rpc.RRef(Held()))).wait() == 2


def hand_on_anothers() -> None:
    assert rpc.rpc_sync("worker1", look_at, args=(rpc.remote("worker2", Held),)) == 1


SCENARIOS = [make_there, make_from_own, hand_out_own, hand_on_anothers]


@pytest.fixture
def world() -> Iterator[World]:
    with World(3) as found:
        yield found


def is_clean(world: World) -> bool:
    """Whether no worker counts or holds a reference."""
    tables = [worker.references.table for worker in world.workers]
    for table in tables:
        table.held.releases.drain_inline()
    return not any(table.state.owner.values or table.state.holder.forks or table.state.holder.parents for table in tables)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_reference_is_left(world: World, scenario: Callable[[], None]) -> None:
    with world.acting(0):
        for _ in range(3):
            scenario()
        places = list(dict.fromkeys(place for _ in range(3) for place in places_of(scenario, SIGNALS)))
        assert len(places) > 30
        struck = 0
        for place in places:
            strike = AtPlace(place, strike_here, SIGNALS)
            try:
                with strike:
                    for _ in range(TRIES):
                        scenario()
                        if strike.place is not None:
                            break
            except Struck:
                pass
            struck += strike.place is not None
            try:
                world.wait_until(lambda: is_clean(world), SOON)
            except AssertionError:
                gc.collect()
                waiting = {str(each) for each in gc.get_objects() if isinstance(each, rpc.RRef)}
                raise AssertionError(f"a reference is left after a strike at {place}; handles: {waiting}") from None
        assert struck > 0.8 * len(places), "the places were not found again"
