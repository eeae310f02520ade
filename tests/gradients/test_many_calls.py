"""One module, many calls in one context: what comes to its parameters is added as it comes, and not kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.gradients.belongings import gradient, leaf, my_weight, own, weight_of

CALLS = 12


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
