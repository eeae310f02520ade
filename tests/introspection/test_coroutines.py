"""What coroutines wait for, and threads that wait for other threads of their process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from remora import rpc
from remora.introspection.snapshot import take
from remora.observer.model import CallStatus, Query, Stage, WaitKind, WaitStatus, WorkerSnapshot
from remora.testing.world import World
from tests.eventually import eventually

gate = threading.Event()
lock = asyncio.Lock()  # of the first event loop on which it is waited for


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    global lock
    gate.clear()
    lock = asyncio.Lock()
    yield
    gate.set()


def block() -> int:
    gate.wait(30)
    return 1


async def block_the_loop() -> int:
    return block()


async def call_on_the_loop(to: str) -> int:
    return rpc.rpc_sync(to, block)


async def quick() -> int:
    return 1


async def gather(to: str) -> list[int]:
    return await asyncio.gather(rpc.rpc_async(to, block), wrapped(to))


async def wrapped(to: str) -> int:
    return await rpc.rpc_async(to, block)


async def for_a_while(to: str) -> int:
    return await asyncio.wait_for(wrapped(to), 30)


async def hold(to: str) -> int:
    async with lock:
        return await wrapped(to)


async def want() -> int:
    async with lock: return 1  # fmt: skip  # noqa: E701


async def asleep() -> int:
    while not gate.is_set():
        await asyncio.sleep(0.005)
    return 1


def look(world: World, i: int) -> WorkerSnapshot:
    return take(world[i].subject, Query())


def served(found: WorkerSnapshot, function: Callable[..., Any]) -> CallStatus | None:
    return next((each for each in found.calls if each.function == f"{__name__}.{function.__name__}"), None)


def waits(world: World, i: int, count: int = 1, for_loop: bool = False) -> list[WaitStatus]:
    """What a worker waits for, when it waits for so much. A coroutine that is about to run waits for its event loop: that
    passes, but where `for_loop` says that another one blocks the loop."""
    found: list[WaitStatus] = []

    def there() -> bool:
        found[:] = look(world, i).waits
        return len(found) == count and (for_loop or all(each.kind is not WaitKind.LOOP for each in found))

    eventually(there, what=lambda: found)
    return found


def test_a_coroutine_waits_for_the_event_loop_while_another_one_blocks_it() -> None:
    with World(2) as world, world.acting(0):
        first = rpc.rpc_async("worker1", block_the_loop)
        eventually(lambda: (call := served(look(world, 1), block_the_loop)) and call.thread)
        second = rpc.rpc_async("worker1", quick)
        (wait,) = waits(world, 1, for_loop=True)
        found = look(world, 1)
        blocks, waiting = served(found, block_the_loop), served(found, quick)
        assert blocks is not None
        assert waiting is not None
        (loop,) = [each for each in found.threads if each.role == "event loop"]
        assert (blocks.thread, loop.serving, waiting.thread) == (loop.id, blocks.key, None)
        assert (wait.kind, wait.serving, wait.holder) == (WaitKind.LOOP, waiting.key, loop.id)
        gate.set()
        assert first.wait() == second.wait() == 1


def test_a_coroutine_that_makes_a_call_which_blocks_waits_on_the_thread_of_the_loop() -> None:
    with World(2) as world, world.acting(0):
        future = rpc.rpc_async("worker1", call_on_the_loop, args=("worker0",))
        (wait,) = waits(world, 1)
        found = look(world, 1)
        call = served(found, call_on_the_loop)
        assert call is not None
        (loop,) = [each for each in found.threads if each.role == "event loop"]
        assert (wait.kind, wait.serving, wait.thread) == (WaitKind.CALL, call.key, loop.id)
        gate.set()
        future.wait()


def test_a_coroutine_waits_for_all_that_it_gathers() -> None:
    with World(2) as world, world.acting(0):
        future = rpc.rpc_async("worker1", gather, args=("worker0",))
        found = waits(world, 1, 2)
        snapshot = look(world, 1)
        call = served(snapshot, gather)
        assert call is not None
        assert {each.serving for each in found} == {call.key}
        assert {each.kind for each in found} == {WaitKind.CALL}
        assert len({each.call for each in found}) == 2
        assert not any(each.limited for each in found)
        gate.set()
        future.wait()


def test_a_coroutine_that_waits_for_a_while() -> None:
    with World(2) as world, world.acting(0):
        future = rpc.rpc_async("worker1", for_a_while, args=("worker0",))
        (wait,) = waits(world, 1)
        call = served(look(world, 1), for_a_while)
        assert call is not None
        assert (wait.kind, wait.serving, wait.limited) == (WaitKind.CALL, call.key, True)
        gate.set()
        future.wait()


def test_a_lock_of_asyncio_and_the_call_that_holds_it() -> None:
    with World(2) as world, world.acting(0):
        holding = rpc.rpc_async("worker1", hold, args=("worker0",))
        waits(world, 1)
        wanting = rpc.rpc_async("worker1", want)
        found = waits(world, 1, 2)
        snapshot = look(world, 1)
        holder, waiter = served(snapshot, hold), served(snapshot, want)
        assert holder is not None
        assert waiter is not None
        (wait,) = [each for each in found if each.kind is WaitKind.LOCK]
        assert (wait.serving, wait.call) == (waiter.key, holder.key)
        assert wait.text.startswith(f"the lock lock at {__file__}:")
        gate.set()
        holding.wait()
        wanting.wait()


def test_coroutines_that_wait_on_the_line_of_the_body_hold_nothing() -> None:
    with World(2) as world, world.acting(0):
        holding = rpc.rpc_async("worker1", hold, args=("worker0",))
        waits(world, 1)
        wanting = [rpc.rpc_async("worker1", want) for _ in range(2)]
        found = [each for each in waits(world, 1, 3) if each.kind is WaitKind.LOCK]
        holder = served(look(world, 1), hold)
        assert holder is not None
        assert [each.call for each in found] == [holder.key, holder.key]
        gate.set()
        for each in (holding, *wanting):
            each.wait()


def test_where_coroutines_are() -> None:
    with World(2) as world, world.acting(0):
        future = rpc.rpc_async("worker1", asleep)
        eventually(lambda: any(line.endswith(" asleep") for each in look(world, 1).threads for line in each.stack))
        found = look(world, 1)
        (coroutine,) = [each for each in found.threads if each.role == "coroutine"]
        call = served(found, asleep)
        assert call is not None
        assert (call.stage, call.thread) == (Stage.RUNNING, None)
        assert coroutine.serving == call.key
        assert coroutine.task is not None
        assert any(line.endswith(" asleep") and line.startswith(__file__) for line in coroutine.stack)
        gate.set()
        future.wait()


def test_a_thread_of_the_program_waits_for_what_its_event_loop_runs() -> None:
    with World(2) as world:

        def program() -> None:
            with world.acting(0):
                asyncio.run(gather("worker1"))

        thread = threading.Thread(target=program)
        thread.start()
        found = waits(world, 0, 2)
        assert {(each.kind, each.thread, each.serving) for each in found} == {(WaitKind.CALL, thread.ident, None)}
        gate.set()
        thread.join()


def test_a_thread_that_waits_for_another_one() -> None:
    with World(2) as world:
        inner = threading.Thread(target=world.run, args=(0, rpc.rpc_sync, "worker1", block), name="inner")
        inner.start()
        outer = threading.Thread(target=inner.join)
        patient = threading.Thread(target=inner.join, args=(30.0,))
        outer.start()
        patient.start()
        found = {each.thread: each for each in waits(world, 0, 3)}
        assert outer.ident is not None
        assert patient.ident is not None
        for thread, limited in ((outer.ident, False), (patient.ident, True)):
            wait = found[thread]
            assert (wait.kind, wait.holder, wait.limited) == (WaitKind.THREAD, inner.ident, limited)
            assert wait.text == "thread inner to end"
        gate.set()
        for each in (inner, outer, patient):
            each.join()


def test_a_thread_that_waits_for_what_an_executor_runs() -> None:
    with World(2) as world, ThreadPoolExecutor(1, thread_name_prefix="mine") as executor:
        future = executor.submit(world.run, 0, rpc.rpc_sync, "worker1", block)
        waiter = threading.Thread(target=future.result)
        waiter.start()
        found = {each.thread: each for each in waits(world, 0, 2)}
        assert waiter.ident is not None
        wait = found.pop(waiter.ident)
        assert (wait.kind, wait.holder, wait.text) == (WaitKind.THREAD, next(iter(found)), "what thread mine_0 runs")
        gate.set()
        waiter.join()


def test_what_follows_a_call_is_no_lock_of_the_program() -> None:
    with World(2) as world:

        def program() -> None:
            with world.acting(0):
                rpc.rpc_async("worker1", block).then(lambda done: done.wait()).wait()

        thread = threading.Thread(target=program)
        thread.start()
        (wait,) = waits(world, 0)
        assert (wait.kind, wait.thread) == (WaitKind.FUTURE, thread.ident)
        assert wait.text == f"what follows call of {__name__}.block on worker1"
        gate.set()
        thread.join()
