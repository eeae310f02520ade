"""How long a call may take: per call, by default, inherited, never; and that time passes however busy the worker is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.calls.call import current_serving
from remora.errors import CallOutcomeUnknown, CallTimeout
from tests.agent.alone import worker_alone
from tests.eventually import eventually

gate = threading.Event()
seen: list[float | None] = []


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    """Every test opens the gate before its worker ends."""
    gate.clear()
    seen.clear()
    yield
    gate.set()


@pytest.fixture
def patient(me: str) -> Iterator[str]:
    """A worker whose functions may be stuck at the gate until the test is over."""
    yield me
    gate.set()


def double(x: int) -> int:
    return 2 * x


def wait_at_gate() -> None:
    assert gate.wait(10.0)


def time_left() -> float | None:
    serving = current_serving.get()
    return None if serving is None or serving[0] == float("inf") else serving[0] - time.monotonic()


def time_left_further_down(to: str, **timeout: float) -> Any:
    return rpc.rpc_sync(to, time_left, **timeout)


def note_when_nested_call_ends(to: str, **timeout: float) -> None:
    start = time.monotonic()
    try:
        rpc.rpc_sync(to, wait_at_gate, **timeout)
    except CallTimeout:
        seen.append(time.monotonic() - start)
    else:
        seen.append(None)


def elapsed(action: Callable[[], Any]) -> float:
    start = time.monotonic()
    with pytest.raises(CallTimeout):
        action()
    return time.monotonic() - start


def by_sync(to: str, timeout: float = -1.0) -> None:
    rpc.rpc_sync(to, wait_at_gate, timeout=timeout)


def by_async(to: str, timeout: float = -1.0) -> None:
    rpc.rpc_async(to, wait_at_gate, timeout=timeout).wait()


both = pytest.mark.parametrize("call", [by_sync, by_async])


@both
def test_the_error_says_what_programs_look_for(patient: str, call: Callable[..., None]) -> None:
    with pytest.raises(CallTimeout) as caught:
        call(patient, timeout=0.05)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, CallOutcomeUnknown)
    assert "RPCErr:1:RPC ran for more than set timeout (50 ms)" in str(error)
    assert "wait_at_gate" in str(error)
    assert "alone" in str(error)


@both
@pytest.mark.parametrize("timeout", [0.1, 1.2])
def test_a_call_ends_at_its_deadline_and_not_before(patient: str, call: Callable[..., None], timeout: float) -> None:
    assert timeout <= elapsed(lambda: call(patient, timeout=timeout)) < timeout + 0.4


@both
def test_half_a_millisecond_is_honoured(patient: str, call: Callable[..., None]) -> None:
    rpc.rpc_sync(patient, double, args=(1,))  # connected
    assert elapsed(lambda: call(patient, timeout=0.0005)) < 0.2


def test_the_shortest_timeouts_are_not_taken_for_never(patient: str) -> None:
    for timeout in (1e-9, 1e-6, 1e-4):
        with pytest.raises(CallTimeout):
            rpc.rpc_sync(patient, wait_at_gate, timeout=timeout)
        with pytest.raises(CallTimeout):
            rpc.rpc_async(patient, wait_at_gate, timeout=timeout).wait()


@both
def test_without_a_timeout_the_default_holds(call: Callable[..., None]) -> None:
    with worker_alone(rpc_timeout=0.1) as name:
        assert rpc.get_rpc_timeout() == 0.1
        assert 0.1 <= elapsed(lambda: call(name)) < 1.0
        gate.set()


def test_a_call_may_allow_more_than_the_default() -> None:
    with worker_alone(rpc_timeout=0.05) as name:
        future = rpc.rpc_async(name, wait_at_gate, timeout=5.0)
        with pytest.raises(TimeoutError):
            future.wait(timeout=0.3)
        assert not future.done()
        gate.set()
        future.wait()


def test_the_default_can_be_changed_for_later_calls(patient: str) -> None:
    assert rpc.get_rpc_timeout() == 60.0
    rpc._set_rpc_timeout(0.1)
    assert rpc.get_rpc_timeout() == 0.1
    assert elapsed(lambda: by_sync(patient)) < 1.0


@both
def test_zero_means_never(call: Callable[..., None]) -> None:
    with worker_alone(rpc_timeout=0.02) as name:
        threading.Timer(0.2, gate.set).start()
        call(name, timeout=0)


def test_a_default_of_zero_means_never() -> None:
    with worker_alone(rpc_timeout=0) as name:
        threading.Timer(0.1, gate.set).start()
        rpc.rpc_sync(name, wait_at_gate)
        assert rpc.rpc_sync(name, time_left) is None


def test_an_answer_in_time_is_an_answer(patient: str) -> None:
    assert [rpc.rpc_sync(patient, double, args=(i,), timeout=5.0) for i in range(100)] == [2 * i for i in range(100)]
    futures = [rpc.rpc_async(patient, double, args=(i,), timeout=0.9) for i in range(100)]
    assert torch.futures.wait_all(futures) == [2 * i for i in range(100)]


def test_the_worker_lives_on_and_late_answers_are_dropped(patient: str) -> None:
    futures = [rpc.rpc_async(patient, wait_at_gate, timeout=0.02) for _ in range(5)]
    for future in futures:
        with pytest.raises(CallTimeout):
            future.wait()
    gate.set()
    agent = rpc._get_current_rpc_agent().agent
    eventually(lambda: agent.dispatch.counts() == 0)
    assert rpc.rpc_sync(patient, double, args=(2,)) == 4
    assert agent.peers.active_calls() == 0


# Nested calls.


def test_a_nested_call_inherits_what_is_left(me: str) -> None:
    left = rpc.rpc_sync(me, time_left_further_down, args=(me,), timeout=5.0)
    assert 3.0 < left < 5.0


def test_what_is_left_shrinks_on_the_way_down(me: str) -> None:
    def pause_and_ask(to: str) -> Any:
        time.sleep(0.2)
        return rpc.rpc_sync(to, time_left_further_down, args=(to,))

    assert 3.0 < rpc.rpc_sync(me, pause_and_ask, args=(me,), timeout=5.0) < 4.8


def test_a_nested_call_may_say_otherwise(me: str) -> None:
    def ask(timeout: float) -> Any:
        return rpc.rpc_sync(me, time_left_further_down, args=(me,), kwargs={"timeout": timeout}, timeout=5.0)

    assert ask(1.0) < 1.0
    assert ask(50.0) > 40.0
    assert ask(0) is None


def test_under_a_call_without_deadline_the_default_holds(me: str) -> None:
    left = rpc.rpc_sync(me, time_left_further_down, args=(me,), timeout=0)
    assert 50.0 < left < 60.0


def test_an_inherited_deadline_ends_the_nested_call(patient: str) -> None:
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(patient, note_when_nested_call_ends, args=(patient,), timeout=0.2)
    eventually(lambda: seen)
    assert seen[0] is not None
    assert seen[0] < 1.0


def test_the_deadline_belongs_to_the_call_and_not_to_the_thread(narrow: str) -> None:
    assert rpc.rpc_sync(narrow, time_left, timeout=5.0) is not None
    assert rpc.rpc_sync(narrow, time_left, timeout=0) is None
    assert time_left() is None, "nothing is left behind in the caller"


def test_a_callback_does_not_inherit_a_deadline(me: str) -> None:
    future = rpc.rpc_async(me, double, args=(1,), timeout=0.5)
    assert future.then(lambda _: time_left()).wait() is None


# Time passes.


@both
def test_timeouts_fire_when_every_worker_thread_is_busy(narrow: str, call: Callable[..., None]) -> None:
    blocker = rpc.rpc_async(narrow, wait_at_gate, timeout=0)
    assert elapsed(lambda: call(narrow, timeout=0.1)) < 1.0
    gate.set()
    blocker.wait()


def test_timeouts_fire_while_a_function_computes_without_a_break(narrow: str) -> None:
    def compute() -> int:
        end = time.monotonic() + 0.6
        n = 0
        while time.monotonic() < end:
            n += 1
        return n

    assert elapsed(lambda: rpc.rpc_sync(narrow, compute, timeout=0.1)) < 0.5


def test_the_callback_of_a_timeout_runs_when_every_worker_thread_is_busy(narrow: str) -> None:
    blocker = rpc.rpc_async(narrow, wait_at_gate, timeout=0)
    called = threading.Event()
    future = rpc.rpc_async(narrow, double, args=(1,), timeout=0.1)
    future.add_done_callback(lambda done: called.set())
    assert called.wait(1.5)
    assert isinstance(future.exception(), CallTimeout)
    gate.set()
    blocker.wait()


def test_a_thousand_deadlines_fire(patient: str) -> None:
    futures = [rpc.rpc_async(patient, wait_at_gate, timeout=0.2 + i / 5000) for i in range(1000)]
    eventually(lambda: all(future.done() for future in futures), timeout=5.0)
    assert all(isinstance(future.exception(), CallTimeout) for future in futures)


@pytest.mark.parametrize("timeout", [True, "1", None])
def test_a_default_that_is_not_a_number_is_refused(timeout: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.RpcBackendOptions(rpc_timeout=timeout)


def test_a_negative_default_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        rpc.RpcBackendOptions(rpc_timeout=-1)


@pytest.mark.parametrize("timeout", [1e9, 1e10, 1e300, float("inf")])
def test_a_timeout_beyond_what_clocks_count_is_for_ever(me: str, timeout: float) -> None:
    assert rpc.rpc_sync(me, double, args=(2,), timeout=timeout) == 4
    assert rpc.rpc_async(me, double, args=(2,), timeout=timeout).wait(timeout) == 4
