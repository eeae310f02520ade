"""Where gradients end up: in the context, summed, never in `.grad`, sparse or dense, without a needless copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import assert_close, gradient, leaf, matrix, my_weight, own, weight_of


def weigh(x: Tensor) -> Tensor:
    return x @ my_weight()


def test_two_passes_accumulate_in_the_same_tensor(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", weigh, args=(x,)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        first = gradient(world, 1, context_id, weight_of(world, 1))
        once = first.clone()
        autograd.backward(context_id, [loss], retain_graph=True)
        assert gradient(world, 1, context_id, weight_of(world, 1)) is first
        autograd.backward(context_id, [loss])
        assert_close(first, 3 * once)
        assert_close(gradient(world, 0, context_id, x), 3 * (torch.ones_like(x) @ weight_of(world, 1).t()).detach())


def test_a_graph_that_was_not_retained_cannot_be_used_again(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", weigh, args=(x,))
        autograd.backward(context_id, [result.sum()])
        before = gradient(world, 0, context_id, x).clone()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            autograd.backward(context_id, [result.sum()])
        assert_close(gradient(world, 0, context_id, x), before)


def test_other_calls_may_be_made_after_a_pass(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        for _ in range(3):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(x,)).sum()])
        expected = 3 * torch.ones_like(x) @ weight_of(world, 1).t()
        assert_close(gradient(world, 0, context_id, x), expected.detach())


def test_grad_is_left_alone(world: World) -> None:
    x = leaf(0)
    mine, theirs = torch.full_like(x, 5.0), torch.full_like(x, 6.0)
    x.grad, weight_of(world, 1).grad = mine, theirs
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(x,)).sum()])
        assert x.grad is mine
        assert weight_of(world, 1).grad is theirs
        assert (mine == 5).all()
        assert (theirs == 6).all()
        assert gradient(world, 0, context_id, x) is not mine


def test_contexts_do_not_mix(world: World) -> None:
    x = leaf(0)
    found = []
    for factor in (1.0, 10.0):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, factor)).sum()])
            found.append(gradient(world, 0, context_id, x))
    assert (found[0] == 1).all()
    assert (found[1] == 10).all()


# Sparse gradients.


def my_table() -> Tensor:
    def make() -> Tensor:
        return torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()

    return own("table", make)


def rows(indices: Tensor, sparse: bool) -> Tensor:
    return nn.functional.embedding(indices, my_table(), sparse=sparse)


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True), (True, False, True)])
def test_sparse_and_dense_gradients_of_one_table(world: World, order: tuple[bool, ...]) -> None:
    """One pass after the other; PyTorch loses the dense one that comes after a sparse one."""
    indices = torch.tensor([0, 2, 2])
    table = world.run(1, my_table)
    with autograd.context() as context_id:
        for number, sparse in enumerate(order, 1):
            found = rpc.rpc_sync("worker1", rows, args=(indices, sparse))
            autograd.backward(context_id, [number * found.sum()])
        total = gradient(world, 1, context_id, table)
        assert total.is_sparse == all(order)
        expected = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64).view(4, 1).expand(4, 3)
        assert_close(total.to_dense(), expected * sum(range(1, len(order) + 1)))


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)])
def test_a_table_used_twice_in_one_pass(world: World, order: tuple[bool, bool]) -> None:
    indices = torch.tensor([1, 1, 3])
    table = world.run(1, my_table)
    with autograd.context() as context_id:
        found = [rpc.rpc_sync("worker1", rows, args=(indices, sparse)) for sparse in order]
        autograd.backward(context_id, [torch.stack(found).sum()])
        total = gradient(world, 1, context_id, table)
        expected = torch.tensor([0.0, 4.0, 0.0, 2.0], dtype=torch.float64).view(4, 1).expand(4, 3)
        assert_close(total.to_dense(), expected)


def test_sparse_gradients_travel(world: World) -> None:
    """A table that is an argument: its gradient comes back in a message."""
    table = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 0])
    with autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", nn.functional.embedding, args=(indices, table), kwargs={"sparse": True})
        autograd.backward(context_id, [(2 * found).sum()])
        total = gradient(world, 0, context_id, table)
        assert total.is_sparse
        expected = torch.tensor([2.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(4, 1).expand(4, 3)
        assert_close(total.to_dense(), expected)


# Copies.


class Passing(torch.autograd.Function):
    """Hands its gradient on, to all its inputs, and remembers where it was."""

    addresses: list[int] = []

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.inputs = len(inputs)
        return torch.stack(inputs).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        Passing.addresses.append(gradient.data_ptr())
        return (gradient,) * ctx.inputs


def pass_weight(x: Tensor) -> Tensor:
    return Passing.apply(my_weight()) * x


def test_a_gradient_that_nobody_else_has_is_not_copied(world: World) -> None:
    x = leaf(0)
    Passing.addresses.clear()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", pass_weight, args=(Passing.apply(x),))
        autograd.backward(context_id, [result.sum()])
        found = [gradient(world, 0, context_id, x), gradient(world, 1, context_id, weight_of(world, 1))]
        assert {each.data_ptr() for each in found} == set(Passing.addresses)


def test_a_gradient_for_two_leaves_is_not_shared_by_them(world: World) -> None:
    x, y = leaf(0), leaf(1)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.mul, args=(Passing.apply(x, y), 2.0))
        autograd.backward(context_id, [result.sum()], retain_graph=True)
        assert gradient(world, 0, context_id, x).data_ptr() != gradient(world, 0, context_id, y).data_ptr()
        autograd.backward(context_id, [result.sum()])
        assert (gradient(world, 0, context_id, x) == 4).all()
        assert (gradient(world, 0, context_id, y) == 4).all()


def test_an_expanded_gradient_is_stored_as_numbers_of_its_own(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(x,))])
        found = gradient(world, 0, context_id, x)
        found[0, 0] = 7
        assert found.sum() == 7 + x.numel() - 1
        assert found.is_contiguous()


def test_a_gradient_that_a_hook_kept_is_not_added_to(world: World) -> None:
    x, kept = leaf(0), []
    x.register_hook(kept.append)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3.0)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        assert [each.unique().item() for each in kept] == [3, 3]
        assert (gradient(world, 0, context_id, x) == 6).all()


def test_get_gradients_of_a_transposed_parameter_keeps_its_layout(world: World) -> None:
    """The gradient of a dense parameter has the strides of the parameter, as in a single process."""
    x = matrix(0).t().requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, matrix(1))).sum()])
        found = gradient(world, 0, context_id, x)
        (x * matrix(1)).sum().backward()
        assert x.grad is not None
        assert found.stride() == x.grad.stride()
        assert_close(found, x.grad)
