"""One module, many calls in one context: what comes to its parameters is added as it comes, and not kept."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.autograd import backward_pass, segments
from remora.testing.world import World
from tests.autograd import belongings
from tests.autograd.belongings import assert_close, gradient, leaf, my_weight, own, weight_of
from tests.eventually import eventually

CALLS = 12
PATIENCE = 20.0


class Watched(torch.autograd.Function):
    """Gives a gradient of its own for its second input, and counts how many of those live at once."""

    alive: list[weakref.ref[Tensor]] = []
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        found = grad.clone()
        Watched.alive = [each for each in Watched.alive if each() is not None]
        Watched.alive.append(weakref.ref(found))
        Watched.most = max(Watched.most, len(Watched.alive))
        return grad, found


def add_weight(x: Tensor) -> Tensor:
    result: Tensor = Watched.apply(x, my_weight())
    return result


def test_the_gradients_of_many_calls_are_not_kept(world: World) -> None:
    Watched.alive, Watched.most = [], 0
    x = leaf(0)
    gc.collect()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", add_weight, args=(x,)) for _ in range(CALLS)]
        autograd.backward(context_id, [torch.stack(results).sum()])
        assert (gradient(world, 1, context_id, weight_of(world, 1)) == CALLS).all()
        assert (gradient(world, 0, context_id, x) == CALLS).all()
    assert Watched.most <= 3  # the sum, what is being added to it, and what a thread beside it has


def parts() -> list[Tensor]:
    return own("parts", lambda: [torch.ones(3, dtype=torch.float64).requires_grad_() for _ in range(3)])


def tied(x: Tensor, number: int) -> Tensor:
    """Leaves that are used here, in the result and in the next call, in different ways."""
    first, second, third = parts()
    return x * first + (second * third if number % 2 else first * second)


@pytest.mark.parametrize("hooked", [(), (0,), (1,), (0, 1, 2)])
def test_leaves_that_calls_use_in_different_ways(world: World, hooked: tuple[int, ...]) -> None:
    seen: list[Tensor] = []
    leaves = world.run(1, parts)
    for number in hooked:
        leaves[number].register_hook(seen.append)
    x = torch.full((3,), 2.0, dtype=torch.float64).requires_grad_()
    with autograd.context() as context_id:
        for turn in (1, 2):  # the second pass adds to the first
            state = x * 1
            for number in range(4):
                state = rpc.rpc_sync("worker1", tied, args=(state, number))
            autograd.backward(context_id, [state.sum()])
            state = x * 1
            for number in range(4):
                first, second, third = leaves
                state = state * first + (second * third if number % 2 else first * second)
            expected = torch.autograd.grad(state.sum(), [x, *leaves])
            assert (gradient(world, 0, context_id, x) == turn * expected[0]).all()
            for each, wanted in zip(leaves, expected[1:], strict=True):
                assert (gradient(world, 1, context_id, each) == turn * wanted).all()
                assert each.grad is None
    assert len(seen) == 4 * len(hooked)  # ours, and those that `grad` runs


def scaled_part(factor: float) -> Tensor:
    return (parts()[0] * factor).sum()


def test_a_leaf_that_gets_another_type_between_two_calls(world: World) -> None:
    """It has two accumulators then, and the gradients of both count."""
    changed = world.run(1, parts)[0]
    with autograd.context() as context_id:
        first = rpc.rpc_sync("worker1", scaled_part, args=(2.0,))
        changed.data = changed.data.float()
        second = rpc.rpc_sync("worker1", scaled_part, args=(3.0,))
        autograd.backward(context_id, [first + second])
        assert (gradient(world, 1, context_id, changed) == 5).all()


class Meeting(torch.autograd.Function):
    """The backward of a call waits for another thread that does the same. If turns begin at 0, the first does not."""

    barrier = threading.Barrier(2)
    turns = itertools.count()
    threads: set[int] = set()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if next(Meeting.turns):
            Meeting.threads.add(threading.get_ident())
            Meeting.barrier.wait(PATIENCE)
        return grad * 2


def meet(x: Tensor) -> Tensor:
    result: Tensor = Meeting.apply(x * my_weight())
    return result


@pytest.mark.parametrize("wants", [True, False])
def test_threads_share_calls_that_take_long(world: World, monkeypatch: pytest.MonkeyPatch, wants: bool) -> None:
    """Whether they end at leaves alone, or give a gradient to the caller."""
    monkeypatch.setattr(backward_pass, "LONG", 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 2)
    Meeting.barrier, Meeting.turns, Meeting.threads = threading.Barrier(2), itertools.count(), set()
    x = leaf(0) if wants else leaf(0).detach()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", meet, args=(x,)) for _ in range(5)]
        autograd.backward(context_id, [torch.stack(results).sum()])
        weight = weight_of(world, 1)
        if wants:
            assert torch.equal(gradient(world, 0, context_id, x), 10 * weight.detach())
        assert torch.equal(gradient(world, 1, context_id, weight), 10 * x.detach())
    assert len(Meeting.threads) == 2


@pytest.mark.parametrize("wants", [True, False])
def test_threads_share_all_calls_whose_leaves_are_large(world: World, monkeypatch: pytest.MonkeyPatch, wants: bool) -> None:
    """The first one, too: nothing has to be found out about it."""
    monkeypatch.setattr(backward_pass, "MANY", 1)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 2)
    Meeting.barrier, Meeting.turns, Meeting.threads = threading.Barrier(2), itertools.count(1), set()
    x = leaf(0) if wants else leaf(0).detach()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", meet, args=(x,)) for _ in range(4)]
        autograd.backward(context_id, [torch.stack(results).sum()])
        assert torch.equal(gradient(world, 1, context_id, weight_of(world, 1)), 8 * x.detach())
    assert len(Meeting.threads) == 2


@pytest.mark.parametrize(("processors", "team", "threads"), [(2, 2, 1), (2, 1, 2), (16, 4, 4), (2, 8, 1)])
def test_threads_and_those_of_torch_fit_on_the_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, team: int, threads: int
) -> None:
    monkeypatch.setattr(backward_pass, "PROCESSORS", processors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: team)
    assert backward_pass.threads_that_fit() == threads


class Crowding(torch.autograd.Function):
    """The first backward has a function of the program wait for a slot, which ends after the pass."""

    turns = itertools.count()
    ended = threading.Event()
    blocked: list[rpc.Future[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if not next(Crowding.turns):
            worker = rpc._get_current_rpc_agent()
            Crowding.blocked.append(rpc.rpc_async(worker.get_worker_info(), await_end, timeout=4 * PATIENCE))
            eventually(lambda: worker.agent.pool.user_tasks)
        return grad * 2


def await_end() -> bool:
    return Crowding.ended.wait(PATIENCE)


def crowd(x: Tensor) -> Tensor:
    result: Tensor = Crowding.apply(x * my_weight())
    return result


def test_a_pass_does_not_wait_for_threads_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the program may have all slots, and wait for what comes after the pass."""
    monkeypatch.setattr(backward_pass, "LONG", 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 2)
    belongings.forget_all()
    Crowding.turns, Crowding.blocked = itertools.count(), []
    Crowding.ended.clear()
    with World(2, threads=1, timeout=4 * PATIENCE) as world, world.acting(0):
        x = leaf(0)
        with autograd.context() as context_id:
            results = [rpc.rpc_sync("worker1", crowd, args=(x,)) for _ in range(5)]
            autograd.backward(context_id, [torch.stack(results).sum()])
            Crowding.ended.set()
            assert Crowding.blocked[0].wait(), "the pass waited for a thread that had nothing left to do"
            assert torch.equal(gradient(world, 1, context_id, weight_of(world, 1)), 10 * x.detach())
    belongings.forget_all()


class Counted(torch.autograd.Function):
    """Takes note of the run of the engine in which each backward is."""

    runs: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        Counted.runs.append(torch._C._current_graph_task_id())
        return grad * 2


def count(x: Tensor) -> Tensor:
    result: Tensor = Counted.apply(x * my_weight())
    return result


@pytest.mark.parametrize(("threads", "wants", "runs"), [(1, False, 1), (1, True, 2), (2, False, 5), (2, True, 5)])
def test_calls_are_run_in_one_go_where_one_thread_fits(
    world: World, monkeypatch: pytest.MonkeyPatch, threads: int, wants: bool, runs: int
) -> None:
    monkeypatch.setattr(backward_pass, "LONG", 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: threads)
    Counted.runs = []
    x = leaf(0) if wants else leaf(0).detach()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", count, args=(x,)) for _ in range(5)]
        autograd.backward(context_id, [torch.stack(results).sum()])
        assert torch.equal(gradient(world, 1, context_id, weight_of(world, 1)), 10 * x.detach())
    assert len(Counted.runs) == 5
    assert len(set(Counted.runs)) == runs


def test_gradients_for_others_go_out_while_calls_are_run_in_one_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for those of the first call need not wait for all others."""
    monkeypatch.setattr(backward_pass, "LONG", 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 1)
    Counted.runs = []
    run_before: list[int] = []  # how many calls had been run when gradients went out
    deliver = backward_pass.Pass._deliver

    def delivered(self: backward_pass.Pass, received: segments.Received, out: Any) -> None:
        if Counted.runs:  # the roots' worker delivers, too, before any call is run
            run_before.append(len(Counted.runs))
        deliver(self, received, out)

    monkeypatch.setattr(backward_pass.Pass, "_deliver", delivered)
    inputs = [leaf(number) for number in range(5)]
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", count, args=(x,)) for x in inputs]
        autograd.backward(context_id, [torch.stack(results).sum()])
        for x in inputs:
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * weight_of(world, 1).expand_as(x))
        total = 2 * torch.stack(inputs).sum(0).detach()
        assert_close(gradient(world, 1, context_id, weight_of(world, 1)), total)
    assert run_before == [1, 2, 3, 4, 5]


def fail_in_third(x: Tensor, number: int) -> Tensor:
    result: Tensor = Failing.apply(x, number) * my_weight()
    return result


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.number == 3:
            raise ValueError("the third one")
        return grad * 2, None


def test_an_error_in_a_call_that_another_thread_runs_ends_the_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_pass, "LONG", 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 4)
    x = leaf(0)
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", fail_in_third, args=(x, number)) for number in range(8)]
        with pytest.raises(ValueError, match="the third one"):
            autograd.backward(context_id, [torch.stack(results).sum()])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("hooked", [(), (0,), (1, 2)])
def test_large_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch, quick: bool, wants: bool, hooked: tuple[int, ...]
) -> None:
    """Taken before they come to the accumulator, gradients are those that would have come there, with a leaf that a call
    uses twice, ones that are broadcast, and ones with a hook."""
    monkeypatch.setattr(segments, "LARGE", 1)
    monkeypatch.setattr(backward_pass, "LONG", 60.0 if quick else 0.0)
    monkeypatch.setattr(backward_pass, "threads_that_fit", lambda: 3)
    seen: list[Tensor] = []
    leaves = world.run(1, parts)
    for number in hooked:
        leaves[number].register_hook(lambda gradient: seen.append(gradient.clone()))
    xs = [torch.full((2, 3), 2.0 + i, dtype=torch.float64).requires_grad_(wants) for i in range(7)]
    with autograd.context() as context_id:
        for turn in (1, 2):
            outputs = [rpc.rpc_sync("worker1", layer, args=(x,)) for x in xs]
            autograd.backward(context_id, [torch.stack(outputs).sum()])
            monkeypatch.undo() if turn == 2 else None
            found = [gradient(world, 1, context_id, each).clone() for each in leaves]
            expected = torch.autograd.grad(sum(network(x, leaves).sum() for x in xs), [*leaves, *(xs if wants else [])])
            for ours, wanted in zip(found, expected, strict=False):
                assert torch.equal(ours, turn * wanted)
            for x, wanted in zip(xs if wants else [], expected[3:], strict=True):
                assert torch.equal(gradient(world, 0, context_id, x), turn * wanted)
            assert all(each.grad is None for each in leaves)
    assert len(seen) == 4 * len(hooked)  # ours, and those that `grad` runs


def layer(x: Tensor) -> Tensor:
    return network(x, parts())


def network(x: Tensor, leaves: list[Tensor]) -> Tensor:
    first, second, third = leaves
    return torch.addcmul(second, x * first, first) + third.expand(2, 3)


def scale_by_own(x: Tensor, number: int) -> Tensor:
    return x * parts()[number]


def test_a_large_leaf_of_one_call_with_a_hook(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other call uses it, so it waits for nothing; its hook has to see its gradient, and may change it."""
    monkeypatch.setattr(segments, "LARGE", 1)
    leaves = world.run(1, parts)
    leaves[0].register_hook(lambda gradient: gradient * 10)
    x = torch.full((3,), 2.0, dtype=torch.float64).requires_grad_()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync("worker1", scale_by_own, args=(x, number)) for number in range(2)]
        autograd.backward(context_id, [torch.stack(results).sum()])
        assert (gradient(world, 1, context_id, leaves[0]) == 20).all()
        assert (gradient(world, 1, context_id, leaves[1]) == 2).all()
