"""Contexts go where calls go, and are gone everywhere when they are left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.agent.calls.call_context import current_recording
from remora.testing.world import World
from tests.autograd.belongings import (
    assert_close,
    contexts,
    gradient,
    leaf,
    my_weight,
    wait_for_no_contexts,
    weight_of,
)
from tests.systematic.tracing import SIGNALS, AtPlace, places_of, raising


def current_id() -> int:
    return int(autograd._current_context()._context_id())


def ask_two() -> int:
    return rpc.rpc_sync("worker2", current_id)


async def ask_two_async() -> int:
    await asyncio.sleep(0)
    return await rpc.rpc_async("worker2", current_id)


async def here_after_a_pause() -> int:
    await asyncio.sleep(0.001)
    return current_id()


@rpc.functions.async_execution
def ask_two_in_a_callback() -> torch.futures.Future[int]:
    return rpc.rpc_async("worker2", current_id).then(lambda done: rpc.rpc_sync("worker2", current_id) - 0 * done.wait())


@rpc.functions.async_execution
def current_in_a_callback() -> torch.futures.Future[int]:
    return rpc.rpc_async("worker2", int, args=(1,)).then(lambda _: current_id())


@rpc.functions.async_execution
def current_when_all_are_there() -> torch.futures.Future[int]:
    every = torch.futures.collect_all([rpc.rpc_async("worker2", int, args=(i,)) for i in range(3)])
    return every.then(lambda _: current_id())


def fetch_two() -> int:
    return rpc.remote("worker2", current_id).to_here()


TARGETS = [
    current_id,
    ask_two,
    ask_two_async,
    here_after_a_pause,
    ask_two_in_a_callback,
    current_in_a_callback,
    current_when_all_are_there,
    fetch_two,
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.parametrize("style", ["sync", "async", "remote"])
def test_the_context_goes_along(world: World, target: Any, style: str) -> None:
    with autograd.context() as context_id:
        match style:
            case "sync":
                found = rpc.rpc_sync("worker1", target)
            case "async":
                found = rpc.rpc_async("worker1", target).wait()
            case _:
                found = rpc.remote("worker1", target).to_here()
        assert found == context_id


def test_the_context_is_there_in_callbacks_of_the_caller(world: World) -> None:
    with autograd.context() as context_id:
        assert rpc.rpc_async("worker1", int, args=(1,)).then(lambda _: current_id()).wait() == context_id
        chained = rpc.rpc_async("worker1", int, args=(1,)).then(lambda _: 1).then(lambda _: current_id())
        assert chained.wait() == context_id


def test_the_context_is_there_in_coroutines_of_the_caller(world: World) -> None:
    async def both() -> list[int]:
        return list(await asyncio.gather(rpc.rpc_async("worker1", current_id), rpc.rpc_async("worker2", ask_two)))

    with autograd.context() as context_id:
        assert asyncio.run(both()) == [context_id, context_id]


def test_other_threads_have_no_context(world: World) -> None:
    found: list[bool] = []

    def look() -> None:
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            autograd._current_context()
        found.append(True)

    with autograd.context():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [True]


def test_a_served_call_leaves_no_context_on_the_thread(world: World) -> None:
    with autograd.context():
        rpc.rpc_sync("worker1", current_id)
    for _ in range(8):
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            rpc.rpc_sync("worker1", current_id)


def test_contexts_are_not_nested(world: World) -> None:
    with autograd.context() as outer:
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"), autograd.context():
            pass
        assert current_id() == outer
    wait_for_no_contexts(world)


def call_around(hops: int) -> None:
    if hops:
        me = rpc.get_worker_info().id
        rpc.rpc_sync((me + 1) % 3, call_around, args=(hops - 1,))


def test_a_context_is_released_everywhere(world: World) -> None:
    with autograd.context():
        call_around(7)
        assert contexts(world) == [1, 1, 1]
    wait_for_no_contexts(world)


def test_a_context_is_released_everywhere_after_an_error(world: World) -> None:
    def fail() -> None:
        with autograd.context():
            call_around(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_for_no_contexts(world)


def release_late(context_id: int) -> None:
    """A call of a context that has been released meanwhile."""
    call_around(1)


def test_a_call_that_outlives_its_context_does_not_bring_it_back(world: World) -> None:
    for _ in range(20):
        with autograd.context() as context_id:
            late = rpc.rpc_async("worker1", release_late, args=(context_id,))
        with contextlib.suppress(RuntimeError):  # it may learn that its context is gone
            late.wait()
    wait_for_no_contexts(world)


@pytest.mark.parametrize("context_id", [-1, 100])
def test_an_unknown_context_is_refused(world: World, context_id: int) -> None:
    x = leaf(0)
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd.backward(context_id, [x.sum()])
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd.get_gradients(context_id)


def test_roots_that_cannot_be_are_refused(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        for roots, words in [
            ([], "No tensors provided for gradient computation"),
            ([x.detach().sum()], "requires_grad not set on root"),
            ([x * 2], "is not a scalar, all roots need to be scalar"),
            ([torch.tensor(1.0, requires_grad=True)], "does not have a valid gradient function"),
        ]:
            with pytest.raises(RuntimeError, match=words):
                autograd.backward(context_id, roots)


def test_the_ids_of_a_worker_begin_with_its_number(world: World) -> None:
    for worker in range(3):
        with world.acting(worker), autograd.context() as context_id:
            assert context_id >> 48 == worker
            assert autograd._get_max_id() == (worker << 48) + 2**48 - 1
            assert context_id <= autograd._get_max_id()


def weigh(x: Tensor) -> Tensor:
    return torch.tanh(x @ my_weight())


def train_a_while(world: World, worker: int, factor: float, times: int, found: list[tuple[float, Tensor, Tensor]]) -> None:
    """Several contexts one after another, on weights that others use at the same time."""
    with world.acting(worker):
        for _ in range(times):
            with autograd.context() as context_id:
                x = leaf(0)
                middle = rpc.rpc_sync(1, weigh, args=(x,))
                result = rpc.rpc_sync(2, weigh, args=(middle + x,)) * factor
                autograd.backward(context_id, [result.sum()])
                theirs = gradient(world, 1, context_id, weight_of(world, 1)).clone()
                found.append((factor, gradient(world, worker, context_id, x), theirs))


def test_contexts_at_the_same_time_on_the_same_weights(world: World) -> None:
    found: list[tuple[float, Tensor, Tensor]] = []
    weights = weight_of(world, 1), weight_of(world, 2)
    threads = [
        threading.Thread(target=train_a_while, args=(world, worker, float(10**nth), 8, found))
        for nth, worker in enumerate((0, 0, 1, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 32
    x = leaf(0)
    middle = torch.tanh(x @ weights[0])
    expected = torch.autograd.grad(torch.tanh((middle + x) @ weights[1]).sum(), [x, weights[0]])
    for factor, mine, theirs in found:
        assert_close(mine / factor, expected[0])
        assert_close(theirs / factor, expected[1])
    wait_for_no_contexts(world)


def scale_weight(factor: float) -> Tensor:
    return my_weight() * factor


def test_two_contexts_at_one_weight_wait_for_each_other(world: World) -> None:
    """A hook sees the gradient of its own context in `.grad`, though another pass has come to the same weight."""
    weight = weight_of(world, 1)
    both_here = threading.Barrier(2)
    seen: set[float] = set()

    def hook(leaf: Tensor) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_here.wait(0.3)  # the other pass may come now; it must not get in
        assert leaf.grad is not None
        seen.update(leaf.grad.unique().tolist())

    def make_a_pass(factor: float) -> list[float]:
        with world.acting(0), autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", scale_weight, args=(factor,)).sum()])
            found: list[float] = gradient(world, 1, context_id, weight).unique().tolist()
            return found

    weight.register_post_accumulate_grad_hook(hook)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make_a_pass, [1.0, 10.0])) == [[1.0], [10.0]]
    assert seen == {1.0, 10.0}
    assert both_here.broken, "they were there at the same time"
    assert weight.grad is None


# Workers that die.


def test_the_contexts_of_a_dead_worker_are_released(world: World) -> None:
    def enter_and_never_leave() -> None:
        with world.acting(2):
            autograd.context().__enter__()
            call_around(5)

    thread = threading.Thread(target=enter_and_never_leave)
    thread.start()
    thread.join()
    assert contexts(world) == [1, 1, 1]
    world.kill(2)
    world.wait_until(lambda: contexts(world)[:2] == [0, 0], 5)


def test_a_context_is_released_beyond_a_dead_worker(world: World) -> None:
    """Worker 2 knows of the context only by worker 1, which cannot pass on that it is over."""
    with autograd.context():
        call_around(2)
        assert contexts(world) == [1, 1, 1]
        world.kill(1)
    world.wait_until(lambda: (contexts(world)[0], contexts(world)[2]) == (0, 0), 10)


class Struck(BaseException):
    """What the signal handler of a program raises."""


def enter_and_leave() -> None:
    with autograd.context():
        pass


def enter_call_and_leave() -> None:
    with autograd.context():
        rpc.rpc_sync("worker1", ask_two)


@pytest.mark.parametrize("scenario", [enter_and_leave, enter_call_and_leave])
def test_an_exception_of_a_signal_handler_leaves_no_context(world: World, scenario: Callable[[], None]) -> None:
    """Wherever it strikes, the thread can enter another context, and no worker keeps a part of the first."""
    scenario()
    places = [each for each in dict.fromkeys(places_of(scenario, SIGNALS)) if each.file.startswith("autograd/")]
    assert len(places) > 10
    for place in places:
        with contextlib.suppress(Struck), AtPlace(place, raising(Struck), SIGNALS):
            scenario()
        assert current_recording.get() is None, place
        scenario()
        wait_for_no_contexts(world)


def test_a_context_whose_with_statement_is_gone_is_released_by_the_next(world: World) -> None:
    """An exception of a signal handler struck at the first instruction of `__exit__`."""
    first = autograd.context().__enter__()
    rpc.rpc_sync("worker1", ask_two)
    with autograd.context() as second:
        assert second != first
        assert current_id() == second
    wait_for_no_contexts(world)


def abandon_and_enter() -> None:
    autograd.context().__enter__()
    enter_and_leave()


def test_a_strike_as_the_next_context_is_entered_leaves_none_that_is_released(world: World) -> None:
    abandon_and_enter()
    places = dict.fromkeys(places_of(abandon_and_enter, SIGNALS))
    for place in [each for each in places if each.file.startswith("autograd/")]:
        with contextlib.suppress(Struck), AtPlace(place, raising(Struck), SIGNALS):
            abandon_and_enter()
        assert not getattr(current_recording.get(), "released", False), place
        enter_and_leave()
        wait_for_no_contexts(world)
