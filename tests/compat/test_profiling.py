"""Calls show in torch's profilers under PyTorch's names; under the legacy one, what the callee did shows, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

from remora import rpc
from remora.errors import CallCancelled
from remora.rpc import api
from remora.rpc.internal import check_arguments
from remora.rpc.profiler import callee_events, profiler_trace
from remora.rpc.profiler.profiler_trace import Event, TracedCall, _skew
from tests.workers import Workers

SYNC, ASYNC, REMOTE = (f"rpc_{kind}#{{}}(worker0 -> worker1)" for kind in ("sync", "async", "remote"))
REMOTE_OP = "#remote_op: "


def double(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2)


def fail() -> None:
    raise ValueError("as it should")


async def double_later(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return double(x)


async def sleep_long() -> None:
    await asyncio.sleep(60)


@rpc.functions.async_execution
def double_elsewhere(to: str, x: torch.Tensor) -> Any:
    return rpc.rpc_async(to, double, (x,))


class Counter:
    def add(self, n: int) -> int:
        return n + 1


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(3) as workers:
        yield workers


pytestmark = pytest.mark.may_leak("the workers are shared by the tests of this file, and are gone after the last")


def seen(events: Any) -> list[SimpleNamespace]:
    """What a test looks at of events, in a form that travels."""
    return [
        SimpleNamespace(
            name=event.name,
            remote=event.is_remote,
            worker=event.node_id,
            start=event.time_range.start,
            end=event.time_range.end,
            memory=event.cpu_memory_usage,
            shapes=event.input_shapes,
        )
        for event in events
    ]


def profiled_by(work: Any, **settings: Any) -> tuple[Any, list[SimpleNamespace]]:
    with profile(**settings) as prof:
        value = work()
    return value, seen(prof.function_events)


def only(events: list[SimpleNamespace], name: str) -> SimpleNamespace:
    (event,) = [event for event in events if event.name == name]
    return event


def test_a_call_and_what_its_callee_did(workers: Workers) -> None:
    def work() -> Any:
        with record_function("outer"):
            return rpc.rpc_sync("worker1", double, (torch.ones(3),)).tolist()

    value, events = workers.run(0, lambda: profiled_by(work))
    call, remote = only(events, SYNC.format("double")), only(events, SYNC.format("double") + REMOTE_OP + "aten::mul")
    assert value == [2.0, 2.0, 2.0]
    assert (call.remote, call.worker, remote.remote, remote.worker) == (False, 0, True, 1)
    outer = only(events, "outer")
    assert outer.start <= call.start <= remote.start < remote.end <= call.end <= outer.end
    assert [event.start for event in events] == sorted(event.start for event in events)


def test_a_call_is_in_its_place_though_the_thread_was_descheduled_when_the_profile_began(workers: Workers) -> None:
    """The times of calls were off by as long as it had not run between the profiler's first record and the next line."""

    def work() -> Any:
        with record_function("outer"):
            return rpc.rpc_sync("worker1", double, (torch.ones(3),)).tolist()

    def descheduled() -> Any:
        real = profiler_trace._start

        def start(profile: Any) -> None:
            real(profile)
            time.sleep(0.05)

        profiler_trace._start = start
        try:
            return profiled_by(work)
        finally:
            profiler_trace._start = real

    _, events = workers.run(0, descheduled)
    outer, call = only(events, "outer"), only(events, SYNC.format("double"))
    assert outer.start <= call.start < call.end <= outer.end


@pytest.mark.parametrize("wait", ["wait", "then", "await"])
def test_an_asynchronous_call(workers: Workers, wait: str) -> None:
    def work() -> Any:
        future = rpc.rpc_async("worker1", torch.add, (torch.ones(1), 1))
        assert isinstance(future, torch.futures.Future)
        if wait == "then":
            return future.then(lambda done: done.value().item()).wait()
        return future.wait().item() if wait == "wait" else asyncio.run(awaited(future)).item()

    async def awaited(future: Any) -> Any:
        return await future

    value, events = workers.run(0, lambda: profiled_by(work))
    assert value == 2
    only(events, ASYNC.format("aten::add"))
    assert only(events, ASYNC.format("aten::add") + REMOTE_OP + "aten::add").worker == 1


def test_a_value_made_elsewhere(workers: Workers) -> None:
    def work() -> Any:
        rref = rpc.remote("worker1", Counter)
        value = rref.rpc_sync().add(1)
        rref._get_profiling_future().wait()
        return value, len(callee_events._kept)

    (value, _), events = workers.run(0, lambda: profiled_by(work))
    assert value == 2
    only(events, REMOTE.format("Counter"))
    only(events, SYNC.format("add"))
    assert workers.run(1, lambda: len(callee_events._kept)) == 0, "events were kept that nobody will ask for"


def test_calls_of_the_callee_show_too(workers: Workers) -> None:
    """An asynchronous function returns before the calls it made are over."""
    value, events = workers.run(
        0, lambda: profiled_by(lambda: rpc.rpc_sync("worker1", double_elsewhere, ("worker2", torch.ones(1))).item())
    )
    nested = SYNC.format("double_elsewhere") + REMOTE_OP + "rpc_async#double(worker1 -> worker2)"
    assert value == 2
    assert only(events, nested).worker == 1
    assert only(events, nested + REMOTE_OP + "aten::mul").worker == 2


def test_a_coroutine(workers: Workers) -> None:
    value, events = workers.run(
        0, lambda: profiled_by(lambda: rpc.rpc_sync("worker1", double_later, (torch.ones(1),)).item())
    )
    assert value == 2
    only(events, SYNC.format("double_later"))


def test_what_is_recorded_is_what_the_caller_asked_for(workers: Workers) -> None:
    def remote_event(**settings: Any) -> SimpleNamespace:
        _, events = profiled_by(lambda: rpc.rpc_sync("worker1", double, (torch.ones(3),)) is None, **settings)
        return only(events, SYNC.format("double") + REMOTE_OP + "aten::mul")

    plain = workers.run(0, remote_event)
    assert (plain.memory, plain.shapes) == (0, [])
    assert workers.run(0, lambda: remote_event(record_shapes=True)).shapes[0] == [3]
    assert workers.run(0, lambda: remote_event(profile_memory=True)).memory > 0


def test_a_call_that_fails_is_over_too(workers: Workers) -> None:
    def work() -> Any:
        with pytest.raises(ValueError, match="as it should"):
            rpc.rpc_sync("worker1", fail)
        with pytest.raises(ValueError, match="as it should"):
            rpc.rpc_async("worker1", fail).wait()
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker1", 3)  # type: ignore[arg-type]

    _, events = workers.run(0, lambda: profiled_by(work))
    only(events, SYNC.format("fail"))
    only(events, ASYNC.format("fail"))


def test_a_call_that_is_cancelled(workers: Workers) -> None:
    def work() -> Any:
        future = rpc.rpc_async("worker1", sleep_long)
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(CallCancelled):
            future.wait()
        return future.cancelled()

    cancelled, events = workers.run(0, lambda: profiled_by(work))
    assert cancelled
    only(events, ASYNC.format("sleep_long"))


def test_the_newer_profiler_shows_the_caller(workers: Workers) -> None:
    def work() -> Any:
        with torch.profiler.profile() as prof:
            rpc.rpc_sync("worker1", double, (torch.ones(1),))
            rpc.rpc_async("worker1", double, (torch.ones(1),)).wait()
            rref = rpc.remote("worker1", double, (torch.ones(1),))
            rref.to_here()
            rref._get_profiling_future().wait()
        return [event.name for event in prof.events()]

    shown = workers.run(0, work)
    assert [shown.count(key.format("double")) for key in (SYNC, ASYNC, REMOTE)] == [1, 1, 1]
    assert shown.count("to_here#(worker0)->(worker1)") == 1
    assert not [name for name in shown if REMOTE_OP in name], "then docs/migrating.md and the README should say so"


def test_all_that_a_worker_serves(workers: Workers) -> None:
    def work() -> Any:
        outer = rpc.remote("worker1", rpc._server_process_global_profile)
        outer.rpc_sync().__enter__()
        rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
        inner = rpc.remote("worker1", rpc._server_process_global_profile)
        inner.rpc_sync().__enter__()
        rpc.remote("worker1", double, (torch.ones(1),)).to_here()
        inner.rpc_sync().__exit__(None, None, None)
        outer.rpc_sync().__exit__(None, None, None)
        rpc.rpc_sync("worker1", torch.sub, (torch.ones(1), 1))
        return [rpc.rpc_sync("worker1", names_in, (each,)) for each in (outer, inner)]

    outer, inner = workers.run(0, work)
    assert "aten::add" in outer
    assert "aten::mul" in outer
    assert "aten::mul" in inner
    assert "aten::add" not in inner
    assert "aten::sub" not in outer
    observer = workers.run(1, lambda: api._get_current_rpc_agent().agent.execution.observer)
    assert observer is None, "all profiles have ended, and the worker is still observed"


def names_in(rref: rpc.RRef[Any]) -> list[str]:
    profile_of_all = rref.local_value()
    assert profile_of_all.key_averages()
    return [event.name for events in profile_of_all.process_global_function_events for event in events]


def test_without_a_profiler_nothing_is_added(workers: Workers) -> None:
    def ran_profiled() -> bool:
        before = api.spans.rpc_sync
        called = []
        api.spans.rpc_sync = lambda *args: called.append(args)
        try:
            rpc.rpc_sync("worker1", double, (torch.ones(1),))
        finally:
            api.spans.rpc_sync = before
        return bool(called)

    assert not workers.run(0, ran_profiled)


@torch.jit.script
def scripted(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    return x + n


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((1, 2, 3), {}, r"scripted\(\) expected at most 2 argument\(s\) but received 3"),
        ((), {}, "missing value for argument 'x'"),
        ((1,), {"m": 1}, "Unknown keyword argument 'm'"),
    ],
)
def test_the_arguments_of_a_scripted_function_are_checked_by_the_caller(
    args: tuple[Any, ...], kwargs: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        check_arguments(scripted, args, kwargs)


def test_arguments_that_fit_pass() -> None:
    check_arguments(scripted, (1,), {"n": 3})
    check_arguments(scripted, (1, 2), {})
    check_arguments(scripted, (), {"x": 1})


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (10.0, 20.0, 0.0),  # the two clocks agree: inside the call
        (110.0, 120.0, -65.0),  # the callee's is ahead
        (-90.0, -80.0, 135.0),  # or behind: to the middle of the call
    ],
)
def test_the_events_of_a_callee_lie_inside_the_call(first: float, last: float, expected: float) -> None:
    call = TracedCall("a call", is_async=False)
    call.end([Event("op", 1, 1, first, last, [], 0, False, -1, 0, None, None)])
    call.started, call.ended = 0.0, 100.0
    assert _skew(call) == expected
