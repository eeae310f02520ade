"""A channel that threads come to all the time is left to them; and nothing waits for long if they do not come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.agent import Agent
from remora.agent.calls.call import Call
from remora.agent.calls.future import when_done
from remora.agent.channel import outbox
from remora.agent.channel.channel import Channel
from remora.agent.channel.deferred_replies import DeferredReplies
from remora.agent.channel.pool_reads import PoolReads
from remora.agent.channel.waiter_owned import WaiterOwned
from remora.agent.peers.failure_detector import FailureDetector
from remora.options import FAST_PATHS
from remora.protocol.reader import USUAL
from remora.wire.pickler import pack
from tests.agent.alone import wait_until

pytestmark = pytest.mark.skipif(not FAST_PATHS.waiter_owned, reason="turned off")
SOON = 2.0  # seconds: much longer than what is expected, much shorter than the tick or a read that nothing ends
ran: list[object] = []
unpickled_on: list[int] = []
gate = threading.Event()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gate.clear()
    ran.clear()
    unpickled_on.clear()
    yield
    gate.set()


class Witness:
    """Tells who unpickled it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        unpickled_on.append(threading.get_ident())
        self.__dict__ = state


def witness(number: int) -> Witness:
    return Witness(number)


def note(what: object) -> object:
    ran.append(what)
    return what


def wait_at_gate() -> str:
    assert gate.wait(20.0)
    return "passed"


def keep_busy(me: str, calls: int = 50, window: int = 4) -> Channel:
    """Keep some calls in flight, as programs do: the channel is waiter_owned afterwards."""
    under_way = deque(rpc.rpc_async(me, note, (n,)) for n in range(window))
    for number in range(calls):
        under_way.popleft().wait(20.0)
        under_way.append(rpc.rpc_async(me, note, (number,)))
    torch.futures.wait_all(list(under_way))
    ran.clear()
    return agent().peers.find(me).outgoing


def read_all(me: str) -> None:
    """Come again and again, until the replies to all calls have been read, in whatever order they came."""
    channel, end = agent().peers.find(me).outgoing, time.monotonic() + 20.0
    while channel.pending:
        assert time.monotonic() < end
        rpc.rpc_async(me, note, (0,)).wait(20.0)


def agent() -> Agent:
    found: Agent = rpc._get_current_rpc_agent().agent
    return found


@pytest.fixture
def patient(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks after the channel meanwhile: what is seen is seen because somebody asked."""

    def later(self: WaiterOwned) -> None:
        self._timers.soon(0.05, lambda: self._look())

    monkeypatch.setattr(WaiterOwned, "_look", later)
    for peer in agent().peers.all():
        monkeypatch.setattr(peer.outgoing.reader, "thresholds", replace(USUAL, memory=60.0))
    monkeypatch.setattr(FailureDetector, "tick", lambda self, now: None)


def test_calls_in_flight_wake_nobody(me: str, patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = keep_busy(me)
    asked: list[object] = []

    def asks(kind: type, name: str, mine: object) -> None:
        original = getattr(kind, name)

        def ask(part: object, *args: object, **more: object) -> Any:
            if part is mine:
                asked.append(name)
            return original(part, *args, **more)

        monkeypatch.setattr(kind, name, ask)

    asks(Channel, "want_flush", channel)  # (the worker that answers a burst writes it in one go)
    asks(PoolReads, "_take_turn", channel.pool_reads)  # the poller has seen a reply
    asks(DeferredReplies, "pass_on", channel.deferred)
    assert keep_busy(me).waiter_owned
    assert asked == []


def test_values_are_unpickled_by_who_waits_for_them(me: str, patient: None) -> None:
    keep_busy(me)
    futures = [rpc.rpc_async(me, witness, (n,)) for n in range(20)]
    assert [future.wait(20.0).number for future in futures] == list(range(20))
    assert unpickled_on == [threading.get_ident()] * 20


def test_what_is_left_aside_comes_out_when_asked_for(me: str, patient: None) -> None:
    """Whoever wants to hear of it without waiting: callbacks, `done`, `await`."""
    keep_busy(me)

    def others() -> list[Any]:
        first, *rest = [rpc.rpc_async(me, witness, (n,)) for n in range(6)]
        first.wait(20.0)
        return rest

    heard: list[object] = []
    for future in others():
        future.add_done_callback(heard.append)
    wait_until(lambda: len(heard) == 5, SOON)

    keep_busy(me)
    for future in others():
        wait_until(future.done, SOON)

    keep_busy(me)

    async def all_of_them() -> list[int]:
        return [(await asyncio.wait_for(_awaited(future), SOON)).number for future in others()]

    assert asyncio.run(all_of_them()) == [1, 2, 3, 4, 5]

    keep_busy(me)
    torch.futures.collect_all(others()).add_done_callback(lambda _: heard.append("all"))
    wait_until(lambda: heard[-1] == "all", SOON)


async def _awaited(future: Any) -> Any:
    return await future


LISTENERS: dict[str, Callable[[Any, list[object]], None]] = {
    "callback": lambda future, heard: future.add_done_callback(heard.append),
    "then": lambda future, heard: future.then(heard.append),
    "collection": lambda future, heard: torch.futures.collect_all([future]).add_done_callback(heard.append),
    "ours": lambda future, heard: when_done(future, heard.append),  # as `async_execution` does
}


@pytest.mark.parametrize("listen", LISTENERS)
def test_a_callback_hears_of_a_call_on_an_attended_channel(me: str, patient: None, listen: str) -> None:
    keep_busy(me)
    *_, future = [rpc.rpc_async(me, wait_at_gate) for _ in range(3)]  # the last ones wait to be written
    heard: list[object] = []
    LISTENERS[listen](future, heard)
    gate.set()
    wait_until(lambda: heard, SOON)


def test_our_own_calls_are_noticed(me: str, patient: None) -> None:
    """Those that no thread will ever come for: their replies are not left to threads that wait."""
    keep_busy(me)
    late = rpc.rpc_async(me, wait_at_gate)
    answered: list[Call] = []
    peer = agent().peers.find(me)
    call = Call(peer, "something", answered.append)
    kind, packed = 0x102, pack((time.sleep, (0.2,), {}))
    agent().caller.start_call(peer, call, kind, packed, 0, 20.0)
    with pytest.raises(TimeoutError):
        late.wait(0.05)  # a thread comes, and goes again before the reply is there
    wait_until(lambda: answered, SOON)
    gate.set()
    assert late.wait(20.0) == "passed"


def test_a_thread_that_finds_another_one_reading_does_not_wait_for_long(me: str, patient: None) -> None:
    channel = keep_busy(me)
    slow, quick = rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, time.sleep, (0.3,))
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(slow.wait(20.0)))
    first = threading.Thread(target=lambda: quick.wait(20.0))
    first.start()
    wait_until(lambda: channel.reading.locked())
    thread.start()  # it cannot read: the first one does, and leaves when its own reply is there
    first.join(20.0)
    gate.set()
    wait_until(lambda: results == ["passed"], SOON)
    thread.join(20.0)


def test_a_synchronous_call_that_finds_another_one_reading_does_not_either(me: str, patient: None) -> None:
    channel = keep_busy(me)
    quick = rpc.rpc_async(me, time.sleep, (0.3,))
    results: list[object] = []
    first = threading.Thread(target=lambda: quick.wait(20.0))
    first.start()
    wait_until(lambda: channel.reading.locked())
    second = threading.Thread(target=lambda: results.append(rpc.rpc_sync(me, wait_at_gate)))
    second.start()
    first.join(20.0)
    gate.set()
    wait_until(lambda: results == ["passed"], SOON)
    second.join(20.0)


def pause() -> None:
    gate.wait(0.1)


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def test_a_reply_that_a_thread_reads_for_another_one_that_sleeps(me: str, patient: None) -> None:
    channel = keep_busy(me)
    slow = rpc.rpc_async(me, wait_at_gate)
    reader = threading.Thread(target=lambda: slow.wait(20.0))
    reader.start()
    wait_until(lambda: channel.reading.locked())
    assert rpc.rpc_async(me, nap, (0.2,)).wait(SOON) == "rested"  # read by the other thread, which does not wait for it
    assert torch.futures.wait_all([rpc.rpc_async(me, nap, (0.1,)) for _ in range(3)]) == ["rested"] * 3
    gate.set()
    reader.join(20.0)
    assert not channel.parked  # (before that the other thread may be: this one read when it had dealt with something)


def test_a_reply_that_another_thread_puts_aside_while_its_own_begins_to_wait(
    me: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = keep_busy(me)
    first, second = [rpc.rpc_async(me, witness, (n,)) for n in (1, 2)]
    come_for = DeferredReplies.come_for

    def late(deferred: DeferredReplies, calls: Any) -> None:
        """Found nothing; and right after that, the other thread reads both."""
        come_for(deferred, calls)
        monkeypatch.setattr(DeferredReplies, "come_for", come_for)
        other = threading.Thread(target=lambda: (first.wait(20.0), read_all(me)))
        other.start()
        other.join(20.0)
        assert not channel.pending

    monkeypatch.setattr(DeferredReplies, "come_for", late)
    channel.reader.deferred[0] = Call(agent().peers.find(me), "another")  # so that there is reason to look
    try:
        assert second.wait(SOON).number == 2
    finally:
        del channel.reader.deferred[0]
    assert not channel.parked


def test_a_thread_sleeps_on_though_others_come_and_go(me: str, patient: None) -> None:
    channel = keep_busy(me)
    results: list[object] = []
    quick = rpc.rpc_async(me, nap, (0.1,))
    first = threading.Thread(target=lambda: quick.wait(20.0))
    first.start()
    wait_until(lambda: channel.reading.locked())
    sleepers = [
        threading.Thread(target=lambda: results.append(rpc.rpc_sync(me, wait_at_gate))),
        threading.Thread(target=lambda: results.append(rpc.rpc_async(me, wait_at_gate).wait(20.0))),
    ]
    for thread in sleepers:
        thread.start()
    wait_until(lambda: channel.parked and channel.reader.notify_ids)
    first.join(20.0)
    keep_busy(me)
    gate.set()  # nobody comes any more
    wait_until(lambda: results == ["passed"] * 2, SOON)
    for thread in sleepers:
        thread.join(20.0)


def test_a_call_with_little_time_is_left_to_nobody(
    me: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_busy(me)
    monkeypatch.setattr(outbox, "BURST_GAP", 60.0)
    monkeypatch.setattr(outbox, "BURST", 60.0)
    *_, future = [*(rpc.rpc_async(me, note, (n,)) for n in range(3)), rpc.rpc_async(me, note, ("now",), timeout=0.9)]
    wait_until(lambda: future._settled, SOON)
    assert future.wait() == "now"


def test_callbacks_of_a_collection_do_not_run_on_a_thread_that_waits(me: str) -> None:
    keep_busy(me)
    mine, other = rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, pause)
    ran_on: list[int] = []
    torch.futures.collect_all([other]).add_done_callback(lambda _: ran_on.append(threading.get_ident()))
    threading.Timer(0.2, gate.set).start()
    assert mine.wait(20.0) == "passed"
    wait_until(lambda: ran_on, SOON)
    assert threading.get_ident() not in ran_on


# If they do not come back.


@pytest.fixture
def trusting(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came once is counted on for ever."""
    for peer in agent().peers.all():
        monkeypatch.setattr(peer.outgoing.reader, "thresholds", replace(USUAL, memory=60.0))


def test_calls_that_wait_to_be_written_are_written(me: str, trusting: None) -> None:
    keep_busy(me)
    futures = [rpc.rpc_async(me, note, (n,)) for n in range(5)]  # the last ones wait for company
    wait_until(lambda: sorted(map(str, ran)) == ["0", "1", "2", "3", "4"], SOON)
    assert [future.wait(20.0) for future in futures] == list(range(5))


def test_the_poller_looks_again(me: str) -> None:
    channel = keep_busy(me)
    future = rpc.rpc_async(me, note, ("late",))
    wait_until(lambda: not channel.waiter_owned and not channel.pending, SOON)
    assert future.wait(0.0) == "late"


def test_replies_that_nobody_comes_for_are_passed_on(me: str, trusting: None) -> None:
    """While others are waited for all the time: the ignored ones must not pile up."""
    keep_busy(me)
    forgotten = [rpc.rpc_async(me, witness, (n,)) for n in range(50)]
    end = time.monotonic() + 20.0
    while len(unpickled_on) < 50:
        assert time.monotonic() < end
        keep_busy(me, 20)
    assert threading.get_ident() not in unpickled_on
    assert [future.wait(0.0).number for future in forgotten] == list(range(50))


def test_a_worker_that_ends_while_a_reply_is_being_put_aside(
    me: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_busy(me)
    first, second = rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, witness, (1,))
    share_out = DeferredReplies._share

    def late(deferred: DeferredReplies, answered: list[Call], calls: Any) -> None:
        if second._of in answered:
            monkeypatch.setattr(DeferredReplies, "_share", share_out)
            rpc.shutdown(graceful=False)
        share_out(deferred, answered, calls)

    monkeypatch.setattr(DeferredReplies, "_share", late)
    with pytest.raises(RuntimeError):
        first.wait(5.0)
    wait_until(lambda: second._settled, SOON)
    assert second.wait().number == 1


@pytest.mark.parametrize("graceful", [True, False])
def test_a_worker_that_ends_leaves_no_future_behind(me: str, patient: None, graceful: bool) -> None:
    channel = keep_busy(me)
    *rest, last = [rpc.rpc_async(me, witness, (n,)) for n in range(1, 7)]
    last.wait(20.0)
    read_all(me)
    assert channel.reader.deferred
    rpc.shutdown(graceful)
    wait_until(lambda: all(future.done() for future in rest), SOON)
    assert [future.value().number for future in rest] == [1, 2, 3, 4, 5]
