"""What PyTorch offers within one process goes on working when part of the graph is elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import (
    assert_close,
    gradient,
    leaf,
    matrix,
    my_weight,
    own,
    weight_of,
)


def weigh(x: Tensor) -> Tensor:
    return torch.tanh(x @ my_weight())


# Grad mode.


@pytest.mark.parametrize("style", ["sync", "async", "remote"])
def test_a_call_under_no_grad_is_no_part_of_the_graph(world: World, style: str) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        with torch.no_grad():
            match style:
                case "sync":
                    silent = rpc.rpc_sync("worker1", weigh, args=(x,))
                case "async":
                    silent = rpc.rpc_async("worker1", weigh, args=(x,)).wait()
                case _:
                    silent = rpc.remote("worker1", weigh, args=(x,)).to_here()
        assert not silent.requires_grad
        heard = rpc.rpc_sync("worker1", torch.mul, args=(x, silent))
        autograd.backward(context_id, [heard.sum()])
        assert_close(gradient(world, 0, context_id, x), silent)
        assert world.run(1, autograd.get_gradients, context_id) == {}


def weigh_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return rpc.rpc_sync("worker2", weigh, args=(x,)) * x


def test_a_nested_call_under_no_grad(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        silent = rpc.rpc_sync("worker1", weigh_without_grad, args=(x,))
        assert not silent.requires_grad
        autograd.backward(context_id, [(x * silent).sum()])
        assert_close(gradient(world, 0, context_id, x), silent)


def test_fast_mode_after_a_call_under_no_grad(world: World) -> None:
    """Such a call owes nobody a gradient, so nobody waits for it."""
    x = leaf(0)
    with autograd.context() as context_id:
        with torch.no_grad():
            silent = rpc.rpc_sync("worker1", weigh, args=(x,))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, silent)).sum()], mode="fast")
        assert_close(gradient(world, 0, context_id, x), silent)


def mixed(x: Tensor, count: Tensor, constant: Tensor, label: str) -> Tensor:
    assert x.requires_grad
    assert not constant.requires_grad
    assert not count.requires_grad
    assert label == "label"
    return x * count * constant


def test_integers_and_constants_among_the_arguments(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", mixed, args=(x, torch.tensor(2), matrix(1), "label"))
        autograd.backward(context_id, [result.sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * matrix(1))


def half_integers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, torch.arange(3), x.detach()


def test_integers_and_constants_among_the_results(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        doubled, numbers, detached = rpc.rpc_sync("worker1", half_integers, args=(x,))
        assert not numbers.requires_grad
        assert not detached.requires_grad
        autograd.backward(context_id, [(doubled * numbers * detached).sum()])
        assert_close(gradient(world, 0, context_id, x), (2 * torch.arange(3) * x).detach())


# What a function does with its arguments.


def change_in_place(x: Tensor) -> Tensor:
    x.mul_(3)
    x[0].add_(1)
    return x * my_weight()


def test_a_callee_changes_its_argument_in_place(world: World) -> None:
    x = leaf(0)
    before = x.detach().clone()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", change_in_place, args=(x,)).sum()])
        assert_close(x.detach(), before)
        assert_close(gradient(world, 0, context_id, x), 3 * weight_of(world, 1).detach())


def test_the_caller_changes_a_result_in_place(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.mul, args=(x, 2.0))
        result.mul_(x)
        autograd.backward(context_id, [result.sum()])
        assert_close(gradient(world, 0, context_id, x), 4 * x.detach())


def change_one_of_two(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(3)
    return x * 2 + y


def test_a_callee_changes_one_of_two_arguments_in_place(world: World) -> None:
    x, y = leaf(0), leaf(1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", change_one_of_two, args=(x, y)).sum()])
        assert (gradient(world, 0, context_id, x) == 6).all()
        assert (gradient(world, 0, context_id, y) == 1).all()


class Cube(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def cube(x: Tensor) -> Tensor:
    result: Tensor = Cube.apply(x)
    return result


def test_custom_functions_on_both_sides(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [cube(rpc.rpc_sync("worker1", cube, args=(cube(x),))).sum()])
        assert_close(gradient(world, 0, context_id, x), 27 * x.detach() ** 26)


def ask_elsewhere_in_backward(x: Tensor) -> Tensor:
    result: Tensor = Asking.apply(x)
    return result


class Asking(torch.autograd.Function):
    """Its backward makes a call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return rpc.rpc_sync("worker2", torch.mul, args=(gradient, 2.0))


def test_a_backward_function_may_call(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", ask_elsewhere_in_backward, args=(Asking.apply(x),))
        autograd.backward(context_id, [result.sum()])
        assert (gradient(world, 0, context_id, x) == 4).all()


def deep(x: Tensor) -> Tensor:
    for _ in range(5000):
        x = x + 1
    return x * my_weight()


def test_a_graph_deeper_than_the_stack(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = deep(rpc.rpc_sync("worker1", deep, args=(x,)))
        autograd.backward(context_id, [result.sum()])
        assert_close(
            gradient(world, 0, context_id, x), (weight_of(world, 0) * weight_of(world, 1)).detach()
        )


# Numbers of other kinds.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(world: World, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.mul, args=(x, x))
        autograd.backward(context_id, [result.sum().abs()])
        found = gradient(world, 0, context_id, x)
        assert found.dtype == dtype
        assert_close(found, torch.full_like(found, 2))


def my_layer() -> nn.Linear:
    def make() -> nn.Linear:
        torch.manual_seed(5)
        return nn.Linear(4, 4)

    return own("layer", make)


def apply_in_mixed_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: Tensor = my_layer()(x)
    return result


def test_mixed_precision_on_both_sides(world: World) -> None:
    """Activations cross in bfloat16, gradients too; those of parameters are float32 like the parameters."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    here, there = my_layer(), world.run(1, my_layer)

    def everything_here() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = here(there(here(x)))
        return result.float().pow(2).sum()

    with autograd.context() as context_id:
        with torch.autocast("cpu", torch.bfloat16):
            middle = rpc.rpc_sync("worker1", apply_in_mixed_precision, args=(here(x),))
            assert middle.dtype == torch.bfloat16
            result = here(middle)
        autograd.backward(context_id, [result.float().pow(2).sum()])
        owners = [(0, x), *((0, p) for p in here.parameters()), *((1, p) for p in there.parameters())]
        expected = torch.autograd.grad(everything_here(), [tensor for _, tensor in owners])
        for (worker, tensor), wanted in zip(owners, expected, strict=True):
            found = gradient(world, worker, context_id, tensor)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


# Other layouts under no_grad.


def wants_gradient(x: Tensor) -> bool:
    return x.requires_grad


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
def test_what_is_sent_under_no_grad_arrives_without_a_wish_for_gradients(world: World, layout: torch.layout) -> None:
    dense = matrix(0)
    x = dense if layout is torch.strided else dense.to_sparse(layout=layout)  # type: ignore[call-overload]
    x.requires_grad_()
    assert rpc.rpc_sync("worker1", wants_gradient, args=(x,))  # no context: as with PyTorch
    with autograd.context(), torch.no_grad():
        assert not rpc.rpc_sync("worker1", wants_gradient, args=(x,))
