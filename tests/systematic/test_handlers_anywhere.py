"""A signal handler uses Remora at every point at which the interpreter may run one, in the midst of what the main
thread does.

A handler runs on top of the frame that it interrupts, which does not go on before it returns: nothing that the handler
waits for may need that frame. """

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel import bulk
from remora.errors import CallOutcomeUnknown
from tests.agent.alone import worker_alone
from tests.systematic import test_interrupted_anywhere as interrupted
from tests.systematic.test_interrupted_anywhere import SOON, check_health, double, twice
from tests.systematic.tracing import SIGNALS, AtPlace, Place, places_of
from tests.thorough import THOROUGH

PROMPT = 5.0  # seconds in which everything here is over, many times; deadlines are longer
SCENARIOS = [
    interrupted.call, interrupted.call_with_shared_memory, interrupted.call_with_large_tensors, interrupted.wait_for_one,
    interrupted.wait_for_all, interrupted.make_and_fetch,
]  # fmt: skip


@pytest.fixture
def me() -> Iterator[str]:
    with worker_alone() as name:
        yield name


def places_in(me: str, scenario: Callable[[str], None]) -> list[Place]:
    for _ in range(3):
        scenario(me)
    return list(dict.fromkeys(place for _ in range(2) for place in places_of(lambda: scenario(me), SIGNALS)))


def handle_at_each_place(me: str, scenario: Callable[[str], None], handler: Callable[[Place], object]) -> int:
    """How often the handler ran. What it interrupts goes on and is right."""
    ran = 0
    for place in places_in(me, scenario):
        other = rpc.rpc_async(me, twice, args=(7,))
        began = time.monotonic()
        with AtPlace(place, handler, SIGNALS) as strike:
            scenario(me)
        assert time.monotonic() - began < PROMPT, f"it took long, interrupted at {place}"
        check_health(me, other, place)
        ran += strike.place is not None
    return ran


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_handler_may_call_the_same_worker(
    me: str, scenario: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered, or told at once that it is in the midst of a message to or from that worker."""
    if scenario is interrupted.call_with_large_tensors:
        monkeypatch.setattr(bulk, "SHARED_FROM", 1 << 40)
    answered, refused = [], []

    def handler(place: Place) -> None:
        try:
            answered.append(rpc.rpc_sync(me, double, args=(50,), timeout=60.0) == 100)
        except CallOutcomeUnknown:
            refused.append(place)

    assert handle_at_each_place(me, scenario, handler) > 20
    assert all(answered)
    assert len(answered) > len(refused)


@pytest.mark.parametrize("scenario", [interrupted.wait_for_one, interrupted.wait_for_all])
def test_a_handler_may_wait_for_a_future(me: str, scenario: Callable[[str], None]) -> None:
    """It gets its value, though the frame that it interrupts was about to pass the outcomes of other calls on."""
    answered, refused = [], []

    def handler(place: Place) -> None:
        try:
            answered.append(rpc.rpc_async(me, double, args=(50,), timeout=60.0).wait(PROMPT) == 100)
        except CallOutcomeUnknown:
            refused.append(place)

    assert handle_at_each_place(me, scenario, handler) > 20
    assert all(answered)
    assert len(answered) > len(refused)


def test_a_handler_may_fetch_a_value_that_is_being_made(me: str) -> None:
    """Of this very worker, too: what makes it may be left with the frame that is interrupted. Then it is told so."""
    fetched, refused = [], []

    def handler(place: Place) -> None:
        try:
            fetched.append(rpc.remote(me, double, args=(50,)).to_here() == 100)
        except CallOutcomeUnknown:
            refused.append(place)

    assert handle_at_each_place(me, interrupted.call, handler) > 20
    assert all(fetched)
    assert len(fetched) > len(refused) > 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_a_handler_starts_is_done(me: str, scenario: Callable[[str], None]) -> None:
    started: list[torch.futures.Future[Any]] = []

    def handler(place: Place) -> None:
        started.append(rpc.rpc_async(me, double, args=(50,), timeout=60.0))
        started.append(rpc.rpc_async(me, double, args=(torch.ones(1 << 16),), timeout=60.0))
        rpc.remote(me, double, args=(1,))

    assert handle_at_each_place(me, scenario, handler) > 20
    for small, large_one in zip(started[::2], started[1::2], strict=True):
        assert small.wait() == 100
        assert large_one.wait().sum() == 1 << 17


SOME = [interrupted.call, interrupted.wait_for_one, interrupted.make_and_fetch, interrupted.call_with_shared_memory]


@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario.__name__)
def test_a_handler_may_end_the_worker(scenario: Callable[[str], None]) -> None:
    """It returns, and what it interrupted does, too: with its answer or an error that says that RPC has ended."""
    with worker_alone() as me:
        places = places_in(me, scenario)
    errors: list[str] = []
    for place in places if THOROUGH else places[::10]:  # what takes long is tried at some of the points
        with worker_alone() as me:
            scenario(me)
            began = time.monotonic()
            try:
                with AtPlace(place, lambda _: rpc.shutdown(graceful=False), SIGNALS):
                    scenario(me)
            except RuntimeError as error:
                errors.append(f"{error} (interrupted at {place})")
            assert time.monotonic() - began < PROMPT, f"it took long, interrupted at {place}"
    expected = ("running", "initialized", "has left")
    assert [error for error in errors if not any(word in error for word in expected)] == []


assert SOON > PROMPT
