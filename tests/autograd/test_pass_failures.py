"""A pass that cannot be finished ends everywhere, soon, and says why; the context can be used again."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.errors import CallTimeout
from remora.testing.world import World
from tests.autograd import mines
from tests.autograd.belongings import (
    assert_close,
    gradient,
    leaf,
    my_weight,
    wait_for_no_contexts,
    wait_for_no_passes,
    weight_of,
)
from tests.autograd.mines import broken, go_on, mined, mined_twice_removed, reached, slow

SOON = 5.0


@pytest.fixture(autouse=True)
def _all_well() -> Iterator[None]:
    mines.clear()
    yield
    go_on.set()


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_an_error_on_another_worker(world: World, mode: str) -> None:
    x = leaf(0)
    broken.set()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mined, args=(x,))
        with pytest.raises(ValueError, match="Error on Node 1: stepped on a mine") as caught:
            autograd.backward(context_id, [result.sum()], mode=mode)
        assert isinstance(caught.value, RuntimeError), "as programs for torch.distributed expect"
        wait_for_no_passes(world)
    wait_for_no_contexts(world)


def test_an_error_on_the_worker_that_began(world: World) -> None:
    x = leaf(0)
    broken.set()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.mul, args=(mined(x), 2.0))
        with pytest.raises(ValueError, match="stepped on a mine"):
            autograd.backward(context_id, [result.sum()])
        wait_for_no_passes(world)


class Batch:
    """What a program works with; something big, perhaps."""


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("where", ["here alone", "here", "elsewhere"])
def test_an_error_keeps_nothing(world: World, where: str, mode: str) -> None:
    def train() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        x = leaf(0)
        with autograd.context() as context_id:
            result = mined(x) if where == "here alone" else rpc.rpc_sync("worker1", _of(where), args=(x,))
            autograd.backward(context_id, [(mined(result) if where == "here" else result).sum()], mode=mode)

    batches: list[weakref.ref[Batch]] = []
    broken.set()
    gc.disable()  # it would find what keeps itself, some day
    try:
        with pytest.raises(ValueError, match="stepped on a mine"):
            train()
        wait_for_no_contexts(world)
        deadline = time.monotonic() + SOON
        while batches[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert batches[0]() is None
    finally:
        gc.enable()


def _of(where: str) -> Callable[[Tensor], Tensor]:
    return mined if where == "elsewhere" else torch.sin


def test_an_error_further_away(world: World) -> None:
    x = leaf(0)
    broken.set()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mined_twice_removed, args=(x,))
        with pytest.raises(ValueError, match="Error on Node 2: stepped on a mine"):
            autograd.backward(context_id, [result.sum()])
        wait_for_no_passes(world)


def test_the_context_can_be_used_again_after_an_error(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mined_twice_removed, args=(x,))
        broken.set()
        for _ in range(3):
            with pytest.raises(ValueError, match="stepped on a mine"):
                autograd.backward(context_id, [result.sum()], retain_graph=True)
        broken.clear()
        before = world.run(2, autograd.get_gradients, context_id).get(weight_of(world, 2))
        kept = torch.zeros(()) if before is None else before.clone()
        autograd.backward(context_id, [result.sum()])
        weights = weight_of(world, 1).detach(), weight_of(world, 2).detach()
        assert_close(gradient(world, 0, context_id, x), 4 * weights[0] * weights[1] / 2)
        assert_close(gradient(world, 2, context_id, weight_of(world, 2)) - kept, 2 * (x * weights[0]).detach())


def test_an_error_while_others_wait_for_gradients_that_will_not_come(world: World) -> None:
    """Worker 2 has one of its two gradients when worker 1 fails, and would wait for the other."""
    x = leaf(0)
    with autograd.context() as context_id:
        shared = rpc.remote("worker2", torch.mul, args=(x, 2.0))
        direct = shared.to_here()
        through = rpc.rpc_sync("worker1", mined_from, args=(shared,))
        broken.set()
        started = time.monotonic()
        with pytest.raises(ValueError, match="Error on Node 1: stepped on a mine"):
            autograd.backward(context_id, [(direct + through).sum()], retain_graph=True)
        wait_for_no_passes(world)
        assert time.monotonic() - started < SOON
        broken.clear()
        autograd.backward(context_id, [(direct + through).sum()])
        assert_close(gradient(world, 0, context_id, x), (2 + 4 * weight_of(world, 1)).detach())
    wait_for_no_contexts(world)


def mined_from(reference: rpc.RRef[Tensor]) -> Tensor:
    return mined(reference.to_here())


def fail_in_a_hook(x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        raise ZeroDivisionError("no hook, no fish")

    x.register_hook(hook)
    return x * 2


def test_an_error_in_a_hook(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", fail_in_a_hook, args=(x,))
        with pytest.raises(ZeroDivisionError, match="Error on Node 1: no hook, no fish"):
            autograd.backward(context_id, [result.sum()])
        wait_for_no_passes(world)


def release_graph(x: Tensor) -> Tensor:
    """Its own graph is used up before the pass."""
    middle = x * my_weight()
    torch.autograd.grad(middle.sum(), my_weight())
    return middle


def test_an_error_of_torch_on_another_worker(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", release_graph, args=(x,))
        with pytest.raises(RuntimeError, match=r"Error on Node 1: .*second time"):
            autograd.backward(context_id, [result.sum()])
        wait_for_no_passes(world)


def test_the_root_is_elsewhere_and_the_error_further_away(world: World) -> None:
    x = leaf(0)
    broken.set()
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", mined_loss, args=(x,))
        with pytest.raises(ValueError, match="stepped on a mine"):
            loss.backward(context_id)
        wait_for_no_passes(world)


def mined_loss(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", mined, args=(x,)).sum()


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_pass_that_takes_longer_than_the_timeout(mode: str) -> None:
    slow.set()
    with World(3, timeout=20.0, clock="virtual") as world, world.acting(0), ThreadPoolExecutor(1) as pool:
        x = leaf(0)
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", mined, args=(x,))
            pool.submit(lambda: reached.wait(SOON) and world.clock.advance(21.5))
            with pytest.raises(CallTimeout):
                autograd.backward(context_id, [result.sum()], retain_graph=True, mode=mode)
            assert 20.0 <= world.clock.now() <= 21.5
            assert reached.is_set()
            slow.clear()
            go_on.set()
            wait_for_no_passes(world)
            autograd.backward(context_id, [result.sum()], mode=mode)
        wait_for_no_contexts(world)


def test_a_pass_without_end_may_be_timed_by_none(world: World) -> None:
    """No timeout at all: it ends when it ends."""
    rpc._set_rpc_timeout(0)
    slow.set()
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mined, args=(x,))
        timer = threading.Timer(0.2, go_on.set)
        timer.start()
        autograd.backward(context_id, [result.sum()])
        timer.join()
        assert_close(gradient(world, 0, context_id, x), (4 * weight_of(world, 1) / 2).detach())


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_worker_dies_in_a_pass(world: World, mode: str) -> None:
    slow.set()
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mined_twice_removed, args=(x,))
        killer = threading.Thread(target=lambda: reached.wait(10) and world.kill(2))
        killer.start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="worker2"):
            autograd.backward(context_id, [result.sum()], mode=mode)
        assert time.monotonic() - started < SOON
        killer.join()
        go_on.set()
        world.wait_until(lambda: not any(_passes(world, [0, 1])), SOON)
    world.wait_until(lambda: not any(_contexts(world, [0, 1])), SOON)


def _passes(world: World, workers: list[int]) -> list[int]:
    return [int(world.run(i, autograd._get_debug_info)["num_current_backward_passes"]) for i in workers]


def _contexts(world: World, workers: list[int]) -> list[int]:
    return [int(world.run(i, autograd._get_debug_info)["num_autograd_contexts"]) for i in workers]


def test_the_worker_that_began_dies_in_the_pass(world: World) -> None:
    """What it began ends on the others, and its context is released there."""
    slow.set()
    failed = threading.Event()

    def make_a_pass() -> None:
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", mined_twice_removed, args=(leaf(0),))
            autograd.backward(context_id, [result.sum()])

    def begin() -> None:
        with world.acting(0), pytest.raises(RuntimeError):
            make_a_pass()
        failed.set()

    thread = threading.Thread(target=begin)
    thread.start()
    assert reached.wait(10)
    world.kill(0)
    assert failed.wait(SOON)
    go_on.set()
    thread.join()
    world.wait_until(lambda: not any(_passes(world, [1, 2])), SOON)
    world.wait_until(lambda: not any(_contexts(world, [1, 2])), SOON)


def weighed_here_and_mined(x: Tensor) -> Tensor:
    """A loss: of what worker 2 makes of it, slowly, and of what worker 0 sent."""
    return (rpc.rpc_sync("worker2", mined, args=(x,)) + x).sum()


def test_the_worker_of_the_root_dies_in_the_pass(world: World) -> None:
    """It did not make the context, which goes on. Worker 2 will never hear of the pass again."""
    slow.set()
    x = leaf(0)
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", weighed_here_and_mined, args=(x,))
        killer = threading.Thread(target=lambda: reached.wait(10) and world.kill(1))
        killer.start()
        with pytest.raises(RuntimeError, match="worker1"):
            loss.backward(context_id)
        killer.join()
        go_on.set()
        world.wait_until(lambda: not any(_passes(world, [0, 2])), SOON)
        slow.clear()
        autograd.backward(context_id, [rpc.rpc_sync("worker2", mined, args=(x,)).sum()])
    world.wait_until(lambda: not any(_contexts(world, [0, 2])), SOON)


def test_a_context_is_released_in_the_middle_of_a_pass(world: World) -> None:
    slow.set()
    ids: Queue[int] = Queue()

    def make_a_pass() -> str:
        with world.acting(0):
            context_id = autograd._new_context()._context_id()
            result = rpc.rpc_sync("worker1", mined_twice_removed, args=(leaf(0),))
            ids.put(context_id)
            with pytest.raises(RuntimeError) as caught:
                autograd.backward(context_id, [result.sum()])
            return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        words = pool.submit(make_a_pass)
        context_id = ids.get(timeout=10)
        assert reached.wait(10)
        autograd._release_context(context_id)
        go_on.set()
        assert "context" in words.result(SOON)
    wait_for_no_passes(world)
    wait_for_no_contexts(world)
