"""The future of a call: a torch future that can be waited for, chained, collected and cancelled."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.futures import collect_all as collect_all_bound_early
from torch.futures import wait_all as wait_all_bound_early

from remora import rpc
from remora.agent.serving.dispatch import Request
from remora.errors import CallCancelled, CallError
from tests.eventually import eventually

gate = threading.Event()
ran: list[int] = []


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    ran.clear()
    yield
    gate.set()


def double(x: int) -> int:
    return 2 * x


def fail(text: str) -> None:
    raise ValueError(text)


def wait_at_gate(x: int = 0) -> int:
    assert gate.wait(10.0)
    ran.append(x)
    return x


def everything_arrived() -> bool:
    """Whether the callee (this worker itself) has taken in all that was sent."""
    peer = rpc._get_current_rpc_agent().agent.peers.me
    incoming, outgoing = peer.incoming, peer.outgoing
    return incoming is not None and not outgoing.outbox.batched and incoming.session.received == outgoing.session.sent > 0


def test_it_is_a_torch_future(me: str) -> None:
    future = rpc.rpc_async(me, double, args=(2,))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert future.wait() == 4
    assert future.done()
    assert future.value() == 4
    assert future.wait() == 4, "it may be waited for again"
    assert future.exception() is None


def test_it_is_not_done_before_its_call_is(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(3,))
    assert not future.done()
    with pytest.raises(RuntimeError):
        future.value()
    gate.set()
    assert future.wait() == 3


def test_wait_gives_up_after_its_own_timeout_and_the_call_goes_on(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(3,))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="wait_at_gate"):
        future.wait(timeout=0.05)
    assert 0.05 <= time.monotonic() - start < 1.0
    assert not future.done()
    gate.set()
    assert future.wait(timeout=5.0) == 3


@pytest.mark.parametrize("collected", [False, True])
def test_who_waits_in_vain_again_and_again_leaves_nothing_behind(me: str, collected: bool) -> None:
    call = rpc.rpc_async(me, wait_at_gate, args=(3,))
    future: Any = torch.futures.collect_all([call]) if collected else call
    for _ in range(20):
        with pytest.raises(TimeoutError):
            future.wait(timeout=0.001)
    left = future._watchers
    assert left is None or callable(left) or len(left) <= 2
    gate.set()
    future.wait(timeout=5.0)
    assert call.wait() == 3


def test_the_error_is_raised_by_every_way_of_looking(me: str) -> None:
    future = rpc.rpc_async(me, fail, args=("words",))
    for look in (future.wait, future.value, future.wait):
        with pytest.raises(ValueError, match="words"):
            look()
    assert isinstance(future.exception(), ValueError)
    assert future.done()


def test_several_threads_may_wait_for_one_future(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(5,))
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(5.0)
    assert seen == [5] * 4


def test_waiting_does_not_stop_other_threads(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    thread = threading.Thread(target=future.wait)
    thread.start()
    start, steps = time.monotonic(), 0
    while time.monotonic() - start < 0.05:
        steps += 1
    gate.set()
    thread.join(5.0)
    assert steps > 1000


# Chaining.


def test_then_gets_the_future_and_makes_another(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(3,))
    chained = future.then(lambda done: done.value() + 1).then(lambda done: done.wait() * 10)
    gate.set()
    assert chained.wait() == 40


def test_then_on_a_future_that_is_done_already(me: str) -> None:
    future = rpc.rpc_async(me, double, args=(2,))
    future.wait()
    assert future.then(lambda done: done.value() + 1).wait() == 5


def test_then_passes_an_error_on(me: str) -> None:
    future = rpc.rpc_async(me, fail, args=("words",))
    with pytest.raises(ValueError, match="words"):
        future.then(lambda done: done.value()).wait()


def test_an_error_in_a_callback_of_then_is_the_error_of_its_future(me: str) -> None:
    def refuse(done: torch.futures.Future[int]) -> None:
        raise KeyError(f"got {done.value()}")

    with pytest.raises((KeyError, RuntimeError), match="got 4"):
        rpc.rpc_async(me, double, args=(2,)).then(refuse).wait()


def test_then_may_call_again(me: str) -> None:
    chained = rpc.rpc_async(me, double, args=(2,)).then(lambda done: rpc.rpc_sync(me, double, args=(done.value(),)))
    assert chained.wait() == 8


def test_add_done_callback_runs_once_with_the_future(me: str) -> None:
    seen: list[torch.futures.Future[int]] = []
    called = threading.Event()
    future = rpc.rpc_async(me, wait_at_gate, args=(1,))
    future.add_done_callback(lambda done: (seen.append(done), called.set()))
    assert not seen
    gate.set()
    assert called.wait(5.0)
    assert [done.value() for done in seen] == [1]


def test_a_callback_that_raises_harms_nobody(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(1,))
    future.add_done_callback(lambda done: 1 / 0)
    gate.set()
    assert future.wait() == 1
    assert rpc.rpc_sync(me, double, args=(2,)) == 4


def test_callbacks_may_block_and_others_are_still_served(me: str) -> None:
    reached = threading.Event()
    release = threading.Event()

    def block(done: torch.futures.Future[int]) -> None:
        reached.set()
        assert release.wait(10.0)

    future = rpc.rpc_async(me, double, args=(1,))
    chained = future.then(block) if not future.done() else None
    if chained is not None:
        assert reached.wait(5.0)
    assert [rpc.rpc_async(me, double, args=(i,)).wait() for i in range(20)] == [2 * i for i in range(20)]
    release.set()
    if chained is not None:
        chained.wait()


# Many at once.


@pytest.mark.parametrize("wait_all", [torch.futures.wait_all, wait_all_bound_early], ids=["looked up", "bound early"])
def test_wait_all_gives_the_values_in_order(me: str, wait_all: Any) -> None:
    assert wait_all([rpc.rpc_async(me, double, args=(i,)) for i in range(50)]) == [2 * i for i in range(50)]


def test_wait_all_fails_as_soon_as_one_does(me: str) -> None:
    futures = [rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, fail, args=("words",))]
    start = time.monotonic()
    with pytest.raises(ValueError, match="words"):
        torch.futures.wait_all(futures)
    assert time.monotonic() - start < 2.0
    assert not futures[0].done()
    gate.set()
    futures[0].wait()


def test_wait_all_bound_before_the_worker_started_still_raises(me: str) -> None:
    futures = [rpc.rpc_async(me, double, args=(1,)), rpc.rpc_async(me, fail, args=("words",))]
    with pytest.raises(ValueError, match="words"):
        wait_all_bound_early(futures)


@pytest.mark.parametrize(
    "collect_all", [torch.futures.collect_all, collect_all_bound_early], ids=["looked up", "bound early"]
)
def test_collect_all_yields_the_futures(me: str, collect_all: Any) -> None:
    futures = [rpc.rpc_async(me, double, args=(i,)) for i in range(3)]
    collected = collect_all(futures)
    assert [future.value() for future in collected.wait()] == [0, 2, 4]
    assert collect_all(futures).then(lambda done: len(done.value())).wait() == 3


def test_collect_all_of_nothing_ends(me: str) -> None:
    assert torch.futures.collect_all([]).wait() == []
    assert torch.futures.wait_all([]) == []


def test_collecting_mixes_our_futures_with_others(me: str) -> None:
    other: torch.futures.Future[int] = torch.futures.Future()
    collected = torch.futures.collect_all([rpc.rpc_async(me, double, args=(1,)), other])
    assert not collected.done()
    other.set_result(9)
    assert [future.value() for future in collected.wait()] == [2, 9]


def test_plain_torch_futures_are_as_before(me: str) -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(1)
    assert torch.futures.wait_all([plain]) == [1]
    assert torch.futures.collect_all([plain]).wait()[0].value() == 1


def test_wait_all_context_waits_for_the_calls_made_inside(me: str) -> None:
    with rpc.api._wait_all():
        futures = [rpc.rpc_async(me, wait_at_gate, args=(i,)) for i in range(3)]
        gate.set()
    assert all(future.done() for future in futures)
    assert sorted(ran) == [0, 1, 2]


def test_wait_all_context_raises_the_first_error(me: str) -> None:
    with pytest.raises(ValueError, match="words"), rpc.api._wait_all():
        rpc.rpc_async(me, fail, args=("words",))


# Giving up.


def test_a_cancelled_call_fails_at_once(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    assert not future.cancelled()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    with pytest.raises(CallCancelled, match="wait_at_gate") as caught:
        future.wait()
    assert isinstance(caught.value, CallError)
    assert not future.cancel(), "it is settled"


def test_cancelling_runs_callbacks(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    chained = future.then(lambda done: type(done.exception()).__name__)  # type: ignore[attr-defined]
    future.cancel()
    assert chained.wait() == "CallCancelled"


def test_a_call_that_was_answered_cannot_be_cancelled(me: str) -> None:
    future = rpc.rpc_async(me, double, args=(1,))
    future.wait()
    assert not future.cancel()
    assert not future.cancelled()
    assert future.value() == 2


def test_a_call_cancelled_before_it_ran_does_not_run(narrow: str) -> None:
    blocker = rpc.rpc_async(narrow, wait_at_gate, args=(1,))
    queued = rpc.rpc_async(narrow, wait_at_gate, args=(2,))
    assert queued.cancel()
    eventually(everything_arrived)
    gate.set()
    assert blocker.wait() == 1
    assert rpc.rpc_sync(narrow, double, args=(1,)) == 2, "whatever was queued before this has been dealt with"
    assert ran == [1]


def test_a_late_answer_to_a_cancelled_call_is_dropped(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, args=(1,))
    future.cancel()
    gate.set()
    eventually(lambda: ran == [1] or not rpc._get_current_rpc_agent().agent.dispatch.counts())
    assert rpc.rpc_sync(me, double, args=(1,)) == 2
    assert future.cancelled()


def test_a_worker_forgets_calls_that_were_settled(me: str) -> None:
    futures = [rpc.rpc_async(me, double, args=(i,)) for i in range(200)]
    torch.futures.wait_all(futures)
    future = rpc.rpc_async(me, wait_at_gate)
    future.cancel()
    gate.set()
    agent = rpc._get_current_rpc_agent().agent
    eventually(lambda: agent.peers.active_calls() == 0 and agent.dispatch.counts() == 0)
    assert rpc._get_debug_info()["agent.client_active_calls"] == "0"


# Letting go.


@pytest.mark.parametrize("function", [double, fail])
def test_a_settled_future_does_not_keep_the_bytes_of_the_reply(me: str, function: Any) -> None:
    future = rpc.rpc_async(me, function, args=("x" * 1000,))
    eventually(future.done)
    eventually(lambda: future._of.reply is None)  # the thread that settles it drops the reply right after
    assert (future.exception() is None) == (function is double)


def _succeed(to: str) -> Any:
    future = rpc.rpc_async(to, double, args=(1,))
    future.wait()
    return weakref.ref(future)


def _fail_and_wait(to: str) -> Any:
    future = rpc.rpc_async(to, fail, args=("words",))
    try:
        future.wait()
    except ValueError:
        pass
    return weakref.ref(future)


def _fail_and_wait_all(to: str) -> Any:
    future = rpc.rpc_async(to, fail, args=("words",))
    try:
        torch.futures.wait_all([future])
    except ValueError:
        pass
    return weakref.ref(future)


def _fail_and_chain(to: str) -> Any:
    future = rpc.rpc_async(to, fail, args=("words",)).then(lambda done: done.value())
    try:
        future.wait()
    except ValueError:
        pass
    return weakref.ref(future)


def _fail_in_a_callback(to: str) -> Any:
    def refuse(done: torch.futures.Future[int]) -> None:
        raise KeyError("no") from LookupError("not there")

    future = rpc.rpc_async(to, double, args=(1,)).then(refuse)
    with pytest.raises(RuntimeError, match="KeyError") as caught:
        future.wait()
    assert "in refuse" in caught.value.__notes__[0]
    return weakref.ref(future)


class Awkward(RuntimeError):
    """Does not take the arguments that it says it was made of."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)
        self.two = two


def _fail_awkwardly_in_a_callback(to: str) -> Any:
    def refuse(done: torch.futures.Future[int]) -> None:
        raise Awkward("1", "2")

    future = rpc.rpc_async(to, double, args=(1,)).then(refuse)
    with pytest.raises(Awkward, match="12") as caught:
        future.wait()
    assert caught.value.two == "2"
    return weakref.ref(future)


def _fail_in_a_callback_while_handling_another_error(to: str) -> Any:
    def refuse(done: torch.futures.Future[int]) -> None:
        try:
            raise KeyError("no")
        except KeyError:
            raise RuntimeError("no more") from None

    future = rpc.rpc_async(to, double, args=(1,)).then(refuse)
    with pytest.raises(RuntimeError, match="no more"):
        future.wait()
    return weakref.ref(future)


def _fail_and_await(to: str) -> Any:
    future = rpc.rpc_async(to, fail, args=("words",))

    async def main() -> None:
        await future

    try:
        asyncio.run(main())
    except ValueError:
        pass
    return weakref.ref(future)


def _time_out(to: str) -> Any:
    future = rpc.rpc_async(to, wait_at_gate, timeout=0.01)
    try:
        future.wait()
    except RuntimeError:
        pass
    gate.set()
    return weakref.ref(future)


def _cancel(to: str) -> Any:
    future = rpc.rpc_async(to, wait_at_gate)
    future.cancel()
    gate.set()
    return weakref.ref(future)


@pytest.mark.parametrize(
    "use",
    [
        _succeed, _fail_and_wait, _fail_and_wait_all, _fail_and_chain, _fail_in_a_callback,
        _fail_in_a_callback_while_handling_another_error, _fail_awkwardly_in_a_callback, _fail_and_await, _time_out, _cancel,
    ],
    ids=lambda use: use.__name__,
)
def test_a_settled_future_can_be_collected(me: str, use: Any) -> None:
    """A failed one holds a traceback, and that holds whatever the caller had at hand: it must not stay for ever."""
    reference = use(me)

    def collected() -> bool:
        gc.collect()
        return reference() is None

    eventually(collected)


def test_nothing_is_left_of_thousands_of_calls(me: str) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, rpc.Future | Request) for thing in gc.get_objects())

    before = alive()
    for i in range(500):
        rpc.rpc_sync(me, double, args=(i,), timeout=0.9 if i % 2 else 60.0)
        torch.futures.wait_all([rpc.rpc_async(me, double, args=(j,), timeout=0.9) for j in range(4)])
    agent = rpc._get_current_rpc_agent().agent
    eventually(lambda: alive() <= before + 2)
    eventually(lambda: agent.peers.active_calls() == agent.dispatch.counts() == 0)  # (an answer may come before its end)
    peer = agent.peers.me
    assert peer.incoming is not None
    assert len(peer.outgoing.session.kept) < 1000, "what was said is forgotten once it was heard"
    assert len(peer.incoming.session.kept) < 1000


# As the standard library sees them.


def test_its_repr_says_of_what_it_is_the_future_and_what_became_of_it(me: str) -> None:
    waiting = rpc.rpc_async(me, wait_at_gate, args=(1,))
    assert repr(waiting) == f"<Future of call of tests.agent.calls.test_future.wait_at_gate on {me}: pending>"
    gate.set()
    waiting.wait()
    assert repr(waiting).endswith(f"wait_at_gate on {me}: done with a value of type int>")
    failing = rpc.rpc_async(me, fail, args=("no luck",))
    with pytest.raises(ValueError, match="no luck"):
        failing.wait()
    assert "failed with ValueError('no luck')" in repr(failing)
    assert repr(rpc.Future[int]()) == "<Future of a value: pending>"
    assert "call of" in repr(waiting.then(lambda done: done.value()))


def test_to_print_a_failed_future_is_not_to_look_at_it(me: str, caplog: pytest.LogCaptureFixture) -> None:
    failing = rpc.rpc_async(me, fail, args=("unseen",))
    eventually(failing.done)
    assert "unseen" in repr(failing)
    del failing
    gc.collect()
    eventually(lambda: "failed unseen" in caplog.text)


def test_result_is_wait(me: str) -> None:
    assert rpc.rpc_async(me, double, args=(2,)).result() == 4
    with pytest.raises(TimeoutError):
        rpc.rpc_async(me, wait_at_gate).result(timeout=0.01)
    gate.set()


def test_as_completed_yields_these_very_futures_in_the_order_of_their_ends(me: str) -> None:
    names = {rpc.rpc_async(me, wait_at_gate, args=(1,)): "slow", rpc.rpc_async(me, double, args=(1,)): "quick"}
    order = []
    for future in concurrent.futures.as_completed(names, timeout=10.0):
        order.append((names[future], future.result()))
        gate.set()
    assert order == [("quick", 2), ("slow", 1)]


def test_as_completed_knows_those_that_were_done_before_and_those_that_failed(me: str) -> None:
    done, failed = rpc.rpc_async(me, double, args=(1,)), rpc.rpc_async(me, fail, args=("no luck",))
    cancelled = rpc.rpc_async(me, wait_at_gate)
    assert done.wait() == 2
    assert cancelled.cancel()
    for _ in range(2):  # a second time they are all done
        assert set(concurrent.futures.as_completed([done, failed, cancelled], timeout=10.0)) == {done, failed, cancelled}
    assert isinstance(failed.exception(), ValueError)
    gate.set()


def test_as_completed_gives_up_in_time_and_can_be_asked_again(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    with pytest.raises(TimeoutError):
        list(concurrent.futures.as_completed([future], timeout=0.01))
    assert not future._waiters
    gate.set()
    assert list(concurrent.futures.as_completed([future], timeout=10.0)) == [future]


def test_wait_of_the_standard_library_waits_for_the_first_the_first_failure_or_all(me: str) -> None:
    slow, quick = rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, double, args=(1,))
    both: Any = [slow, quick]
    assert concurrent.futures.wait(both, 10.0, concurrent.futures.FIRST_COMPLETED) == ({quick}, {slow})
    failing: Any = rpc.rpc_async(me, fail, args=("no luck",))
    first = concurrent.futures.wait([*both, failing], 10.0, concurrent.futures.FIRST_EXCEPTION)
    assert failing in first.done
    assert slow in first.not_done
    gate.set()
    assert concurrent.futures.wait(both, 10.0).done == {slow, quick}


def test_threads_may_wait_for_the_same_futures_at_the_same_time(me: str) -> None:
    futures: Any = [rpc.rpc_async(me, wait_at_gate, args=(number,)) for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(lambda: set(concurrent.futures.as_completed(futures, 10.0))) for _ in range(4)]
        mixed = concurrent.futures.as_completed([*futures, *found], 10.0)  # ours and theirs together
        gate.set()
        assert set(mixed) == {*futures, *found}
        assert all(each.result() == set(futures) for each in found)
