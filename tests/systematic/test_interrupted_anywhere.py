"""Interrupted anywhere: an exception strikes the main thread at every point where the interpreter looks for signals.

Each scenario is done once to learn which points there are, and then once more for each of them. After each strike: the
exception came out, calls that other threads or futures wait for are answered, later calls are right, the session has no
hole, nothing is left. """

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.calls.call import Call
from remora.agent.channel import bulk
from remora.agent.channel.pool_reads import PoolReads
from remora.autograd.countdown import Countdown
from tests.agent.alone import worker_alone
from tests.eventually import eventually
from tests.systematic.tracing import SIGNALS, AtPlace, Place, places_of

TRIES = 20  # times that a scenario is done to come to a place: which thread reads what is a matter of chance
SOON = 10.0  # seconds: much longer than anything here takes


class Struck(BaseException):
    """What the signal handler of a program raises."""


class Held:
    """A value that stays where it is."""


def double(x: Any) -> Any:
    return 2 * x


def hold() -> Held:
    return Held()


def twice(x: Any) -> Any:
    time.sleep(0.002)  # so that its reply comes while the main thread waits for another one, or for this one
    return 2 * x


release = Event()


def await_release() -> bool:
    return release.wait(SOON)


in_destructor: list[bool] = [False]


def strike_here(place: Place) -> None:
    frame = sys._getframe()
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    in_destructor.append("__del__" in names)
    raise Struck(f"raised on purpose at {place}")


def call(me: str) -> None:
    assert rpc.rpc_sync(me, double, args=(21,)) == 42


def call_with_tensors(me: str) -> None:
    assert torch.equal(rpc.rpc_sync(me, double, args=(torch.ones(8),)), torch.full((8,), 2.0))


def call_with_shared_memory(me: str) -> None:
    assert rpc.rpc_sync(me, double, args=(torch.ones(1 << 15),)).sum() == 1 << 16


def call_with_large_tensors(me: str) -> None:
    assert rpc.rpc_sync(me, double, args=(torch.ones(1 << 16),)).sum() == 1 << 17


def wait_for_one(me: str) -> None:
    assert rpc.rpc_async(me, twice, args=(21,)).wait() == 42


def wait_for_all(me: str) -> None:
    futures = [rpc.rpc_async(me, twice, args=(n,)) for n in range(3)]
    assert torch.futures.wait_all(futures) == [0, 2, 4]


def make_and_fetch(me: str) -> None:
    assert rpc.remote(me, double, args=(21,)).to_here() == 42


def make_and_drop(me: str) -> None:
    rref = rpc.remote(me, hold)
    del rref


def pass_on_a_reference(me: str) -> None:
    value = rpc.RRef(Held())
    assert rpc.rpc_sync(me, rpc.RRef.is_owner, args=(value,))


SCENARIOS: list[Callable[[str], None]] = [
    call, call_with_tensors, call_with_shared_memory, call_with_large_tensors, wait_for_one, wait_for_all, make_and_fetch,
    make_and_drop, pass_on_a_reference,
]  # fmt: skip


@pytest.fixture
def me() -> Iterator[str]:
    with worker_alone() as name:
        yield name


def check_memory(me: str) -> None:
    """No memory is on loan, or lost to its lender."""
    peers = rpc._get_current_rpc_agent().agent.peers
    peer, lender = peers.find(me), peers.shared_memory.lender

    def all_is_returned() -> bool:
        peer.give_back()
        if lender.lent_bytes():
            gc.collect()  # (a strike is an exception: cycles of it and of its frames keep what they hold)
        return not lender.lent_bytes()

    eventually(all_is_returned, SOON)
    lender.check()


def check_health(me: str, other: torch.futures.Future[Any], place: Place) -> None:
    """PeerManager live, nothing has a hole, later calls are right, nothing is left."""
    worker = rpc._get_current_rpc_agent()
    peer = worker.agent.peers.find(me)
    assert other.wait(timeout=SOON) == 14, "a call that was under way lost its answer"
    assert peer.state == "alive", peer.reason
    assert rpc.rpc_sync(me, double, args=(4,), timeout=SOON) == 8
    assert torch.futures.wait_all([rpc.rpc_async(me, double, args=(n,), timeout=SOON) for n in range(3)]) == [0, 2, 4]
    assert rpc.rpc_sync(me, double, args=(torch.ones(1 << 15),), timeout=SOON).sum() == 1 << 16
    channels = peer.channels()
    eventually(lambda: not any(channel.pending for channel in channels), SOON)
    eventually(lambda: not worker.agent.dispatch.counts(), SOON)
    for channel in channels:
        assert channel.link is not None
        for left in (channel.inbox.frames, channel.inbox.answered, channel.outbox.batched):
            eventually(lambda left=left: not left, SOON)  # type: ignore[misc]
        eventually(lambda channel=channel: not channel.parked, SOON)  # type: ignore[misc]
        assert channel.inbox.registration is not None
        for turn in (channel.reading, channel.writing, channel.inbox.registration.arming):
            eventually(lambda turn=turn: not turn.locked(), SOON)  # type: ignore[misc]
        with channel.sorting, channel.writing:
            channel.session.check()


def places_to_strike(me: str, scenario: Callable[[str], None]) -> list[Place]:
    """Where the interpreter looks for signals, after the same as before each strike: it decides what shares a write."""
    other = rpc.rpc_async(me, twice, args=(7,))
    places = places_of(lambda: scenario(me), SIGNALS)
    assert other.wait(timeout=SOON) == 14
    check_memory(me)
    return places


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_strike_leaves_nothing_behind(
    me: str, scenario: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A strike in a destructor comes out here. pytest would keep the exception, whose frames keep what is being destroyed.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    if scenario is call_with_large_tensors:
        monkeypatch.setattr(bulk, "SHARED_FROM", 1 << 40)
    for _ in range(3):
        scenario(me)
    runs = [places_to_strike(me, scenario) for _ in range(5)]
    places = list(dict.fromkeys(place for run in runs for place in run))
    usual = set(runs[0]).intersection(*runs[1:])  # (to others it may never come again: that is a matter of chance)
    assert len(places) > 30
    struck: set[Place] = set()
    for place in places:
        other = rpc.rpc_async(me, twice, args=(7,))
        strike = AtPlace(place, strike_here, SIGNALS)
        try:
            with strike:
                for _ in range(TRIES):
                    scenario(me)
                    if strike.place is not None:
                        break
        except Struck:
            pass
        else:  # (what strikes in a destructor does not come out of it)
            assert strike.place is None or in_destructor[-1], f"the exception raised at {place} was swallowed"
        if strike.place is not None:
            struck.add(place)
        try:
            check_health(me, other, place)
            check_memory(me)
        except BaseException as error:
            raise AssertionError(f"after a strike at {place}: {error!r}") from error
    assert len(struck & usual) > 0.8 * len(usual), "the places were not found again"
    assert len(struck) > 25
    gc.collect()
    eventually(lambda: not rpc.references().owned and not rpc.references().held, SOON)


def double_for_a_sleeper(x: int) -> int:
    """Answer when the thread that asks sleeps: a reader wakes no other."""
    pending = rpc._get_current_rpc_agent().agent.peers.find(rpc.get_worker_info().name).outgoing.pending
    eventually(lambda: any(each.signal is not None for each in list(pending.values())))
    return 2 * x


def test_a_struck_reader_wakes_the_thread_whose_reply_it_has(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolReads, "tick", lambda reads: None)  # however long it takes, no thread of the pool reads instead
    wakes: list[int] = []
    wake = Call.wake

    def wake_or_strike(call: Call) -> None:
        wakes.append(call.id)
        if len(wakes) == 1:
            raise Struck
        wake(call)

    call(me)  # so that there is a link
    release.clear()
    monkeypatch.setattr(Call, "wake", wake_or_strike)
    channel = rpc._get_current_rpc_agent().agent.peers.find(me).outgoing
    with ThreadPoolExecutor(1) as pool:

        def call_meanwhile() -> int:
            eventually(lambda: channel.reading.locked())
            return rpc.rpc_sync(me, double_for_a_sleeper, args=(4,), timeout=SOON)

        other = pool.submit(call_meanwhile)
        with pytest.raises(Struck):
            rpc.rpc_sync(me, await_release)
        release.set()
        assert other.result(SOON) == 8
    assert len(set(wakes)) < len(wakes)


def pass_over(me: str) -> torch.Tensor:
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(me, double, args=(x,)).sum()])
        return autograd.get_gradients(context_id)[x]


def test_a_strike_does_not_end_what_another_thread_waits_for(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread reads the answers to the calls of a backward pass of another one. It leaves to the pool what counts
    them: to do that twice, or half, would end the pass too early, or never."""
    pass_over(me)  # so that there is a link
    monkeypatch.setattr(PoolReads, "tick", lambda reads: None)  # however long it takes, no thread of the pool reads instead
    channel = rpc._get_current_rpc_agent().agent.peers.find(me).outgoing

    def pass_meanwhile() -> torch.Tensor:
        eventually(lambda: channel.reading.locked())
        try:
            return pass_over(me)
        finally:
            release.set()

    places = dict.fromkeys(places_of(lambda: Countdown[Any](lambda failure: None).finish(), SIGNALS))
    assert len(places) >= 3
    for place in places:
        release.clear()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(pass_meanwhile)
            with suppress(Struck), AtPlace(place, strike_here, SIGNALS):
                rpc.rpc_sync(me, await_release)
            assert torch.equal(other.result(SOON), torch.full((3,), 2.0)), place


@pytest.mark.parametrize("verb", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_a_call_that_was_not_sent_is_taken_back_though_others_were(me: str, verb: Callable[..., Any]) -> None:
    """What the peer has acknowledged meanwhile was of other calls."""
    call(me)
    worker = rpc._get_current_rpc_agent()
    channel = worker.agent.peers.find(me).outgoing
    limit = Call.limit

    def send_another_and_strike(struck: Call, *args: float) -> float:
        Call.limit = limit  # type: ignore[method-assign]
        call(me)
        assert channel.session.acked > 0
        raise Struck

    Call.limit = send_another_and_strike  # type: ignore[method-assign]
    try:
        with pytest.raises(Struck):
            verb(me, rpc.RRef.is_owner, args=(rpc.RRef(Held()),))
    finally:
        Call.limit = limit  # type: ignore[method-assign]
    eventually(lambda: not rpc.references().owned and not rpc.references().held, SOON)
