"""Calls and asyncio: futures that can be awaited, `async def` functions as targets, cancellation in both."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.errors import CallCancelled, CallTimeout
from tests.agent.alone import worker_alone
from tests.eventually import eventually

gate = threading.Event()
events: list[str] = []


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    gate.clear()
    events.clear()
    yield
    gate.set()


def double(x: int) -> int:
    return 2 * x


def fail(text: str) -> None:
    raise ValueError(text)


def wait_at_gate() -> int:
    assert gate.wait(10.0)
    return 1


async def async_double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def async_fail(text: str) -> None:
    await asyncio.sleep(0)
    raise ValueError(text)


async def async_nested(to: str, x: int) -> int:
    first = await rpc.rpc_async(to, async_double, args=(x,))
    rest = await asyncio.gather(*(rpc.rpc_async(to, double, args=(first + i,)) for i in range(3)))
    return sum(rest)


async def sleep_long() -> None:
    events.append("started")
    try:
        await asyncio.sleep(30.0)
    except asyncio.CancelledError:
        events.append("cancelled")
        raise
    events.append("finished")


async def shrug_off_cancelling() -> None:
    events.append("started")
    try:
        await asyncio.sleep(30.0)
    except asyncio.CancelledError:
        events.append("shrugged")


async def note_timeout_of_nested_call(to: str) -> None:
    try:
        await rpc.rpc_async(to, wait_at_gate)
    except CallTimeout as error:
        events.append(type(error).__name__)
        while not gate.is_set():  # or our own answer could be there a moment before our caller gives up
            await asyncio.sleep(0.01)


class Service:
    async def method(self, x: int) -> int:
        return x + 1

    @staticmethod
    async def static(x: int) -> int:
        return x + 2

    async def __call__(self, x: int) -> int:
        return x + 3


# Awaiting.


def test_a_future_can_be_awaited(me: str) -> None:
    async def main() -> int:
        first: int = await rpc.rpc_async(me, double, args=(2,))
        again = rpc.rpc_async(me, double, args=(first,))
        again.wait()
        return await again  # done already

    assert asyncio.run(main()) == 8


def test_awaiting_raises_the_error(me: str) -> None:
    async def main() -> None:
        await rpc.rpc_async(me, fail, args=("words",))

    with pytest.raises(ValueError, match="words"):
        asyncio.run(main())


def test_many_calls_are_gathered(me: str) -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(rpc.rpc_async(me, double, args=(i,)) for i in range(100)))

    assert asyncio.run(main()) == [2 * i for i in range(100)]


def test_awaiting_leaves_the_event_loop_free(me: str) -> None:
    async def main() -> int:
        future = rpc.rpc_async(me, wait_at_gate)
        waiting = asyncio.ensure_future(asyncio.wait_for(future, 5.0))
        turns = 0
        while turns < 10:
            await asyncio.sleep(0.001)
            turns += 1
        assert not waiting.done()
        gate.set()
        return await waiting

    assert asyncio.run(main()) == 1


def test_one_future_may_be_awaited_by_several_tasks(me: str) -> None:
    async def main() -> list[int]:
        future = rpc.rpc_async(me, wait_at_gate)

        async def look() -> int:
            value: int = await future
            return value

        tasks = [asyncio.create_task(look()) for _ in range(3)]
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [1, 1, 1]


def test_wait_for_cancels_the_call(me: str) -> None:
    async def main() -> Any:
        future = rpc.rpc_async(me, sleep_long)
        while not events:
            await asyncio.sleep(0.002)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.02)
        return future

    assert asyncio.run(main()).cancelled()
    eventually(lambda: events == ["started", "cancelled"])


def test_cancelling_a_task_cancels_the_call_it_awaits(me: str) -> None:
    async def main() -> Any:
        future = rpc.rpc_async(me, sleep_long)

        async def look() -> None:
            await future

        task = asyncio.create_task(look())
        while events != ["started"]:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    future = asyncio.run(main())
    assert future.cancelled()
    eventually(lambda: events == ["started", "cancelled"])


def test_a_loop_that_closed_before_the_answer_came_is_no_trouble(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    loop = asyncio.new_event_loop()
    task = loop.create_task(awaited(future))  # kept, or it would be collected before the answer comes
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    gate.set()
    assert future.wait() == 1
    assert rpc.rpc_sync(me, double, args=(1,)) == 2
    assert not task.done()


async def awaited(future: Any) -> Any:
    return await future


# `async def` as a target.


@pytest.mark.parametrize(
    ("function", "expected"),
    [(async_double, 6), (Service().method, 4), (Service.static, 5), (Service(), 6)],
    ids=["function", "method", "static method", "callable"],
)
def test_coroutine_functions_are_awaited_on_the_callee(me: str, function: Any, expected: int) -> None:
    assert rpc.rpc_sync(me, function, args=(3,)) == expected
    assert rpc.rpc_async(me, function, args=(3,)).wait() == expected


def test_a_coroutine_closure_travels_by_value(me: str) -> None:
    offset = 5

    async def shifted(x: int) -> int:
        await asyncio.sleep(0)
        return x + offset

    assert rpc.rpc_sync(me, shifted, args=(1,)) == 6


def test_the_error_of_a_coroutine_arrives(me: str) -> None:
    with pytest.raises(ValueError, match="words") as caught:
        rpc.rpc_sync(me, async_fail, args=("words",))
    assert "async_fail" in str(caught.value.__cause__)


def test_coroutines_await_further_calls(narrow: str) -> None:
    assert rpc.rpc_sync(narrow, async_nested, args=(narrow, 5)) == 2 * (10 + 11 + 12)


def test_many_coroutines_sleep_at_the_same_time_on_one_worker_thread(narrow: str) -> None:
    async def nap(i: int) -> int:
        await asyncio.sleep(0.2)
        return i

    start = time.monotonic()
    assert torch.futures.wait_all([rpc.rpc_async(narrow, nap, args=(i,)) for i in range(50)]) == list(range(50))
    assert time.monotonic() - start < 3.0, "one after the other would take 10 s"


def test_all_coroutines_share_one_loop(me: str) -> None:
    async def which() -> int:
        return id(asyncio.get_running_loop())

    assert len({rpc.rpc_sync(me, which) for _ in range(3)}) == 1


def test_cancelling_reaches_the_coroutine(me: str) -> None:
    future = rpc.rpc_async(me, sleep_long)
    eventually(lambda: events == ["started"])
    assert future.cancel()
    eventually(lambda: events == ["started", "cancelled"])
    with pytest.raises(CallCancelled):
        future.wait()


def test_cancelling_reaches_coroutines_further_down(me: str) -> None:
    async def relay(to: str) -> None:
        await rpc.rpc_async(to, sleep_long)

    future = rpc.rpc_async(me, relay, args=(me,))
    eventually(lambda: events == ["started"])
    future.cancel()
    eventually(lambda: events == ["started", "cancelled"])


def test_a_coroutine_that_refuses_to_be_cancelled_harms_nobody(me: str) -> None:
    future = rpc.rpc_async(me, shrug_off_cancelling)
    eventually(lambda: events == ["started"])
    future.cancel()
    eventually(lambda: events == ["started", "shrugged"])
    assert future.cancelled()
    assert rpc.rpc_sync(me, async_double, args=(1,)) == 2


def test_a_coroutine_that_raises_cancelled_error_itself_is_an_error(me: str) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError("on my own")

    with pytest.raises(RuntimeError, match="CancelledError"):
        rpc.rpc_sync(me, give_up, timeout=5)


def test_the_deadline_of_the_call_is_inherited_by_calls_of_the_coroutine(me: str) -> None:
    start = time.monotonic()
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(me, note_timeout_of_nested_call, args=(me,), timeout=0.3)
    eventually(lambda: events == ["CallTimeout"], timeout=2.0)
    assert time.monotonic() - start < 2.0
    gate.set()


def test_a_coroutine_may_make_a_synchronous_call_to_another_function(narrow: str) -> None:
    async def relay(to: str) -> int:
        value: int = rpc.rpc_sync(to, double, args=(4,))
        return value

    assert rpc.rpc_sync(narrow, relay, args=(narrow,)) == 8


def test_shutdown_cancels_coroutines_that_still_run() -> None:
    with worker_alone(graceful=False) as name:
        rpc.rpc_async(name, sleep_long).add_done_callback(lambda done: done.exception())  # type: ignore[attr-defined]
        eventually(lambda: events == ["started"])
    assert events == ["started", "cancelled"]
