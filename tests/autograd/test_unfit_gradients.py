"""A leaf that its old gradient does not fit any more: a pass does not look at `.grad`, and one that fails is not the end of
all passes through that leaf."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import assert_close, gradient, leaf, matrix, own

SOON = 5.0


def bias() -> Tensor:
    return own("bias", lambda: torch.zeros(3, dtype=torch.float64).requires_grad_())


def shifted(x: Tensor) -> Tensor:
    return x + bias()


def test_a_leaf_that_was_resized_and_has_its_old_gradient(world: World) -> None:
    other = world.run(1, bias)
    other.grad = old = torch.ones(3, dtype=torch.float64)
    other.data = torch.zeros(5, dtype=torch.float64)
    x = torch.zeros(5, dtype=torch.float64).requires_grad_()

    def train() -> Tensor:
        with world.acting(0), autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", shifted, args=(x,)).sum()])
            return gradient(world, 1, context_id, other)

    assert_close(train(), torch.ones(5, dtype=torch.float64))
    assert other.grad is old


def test_a_gradient_of_another_shape_is_not_added_to_that_of_the_context(world: World) -> None:
    """Torch would broadcast it."""
    first, changed, last = leaf(0), leaf(1), leaf(2)
    first.grad = last.grad = mine = torch.full_like(first, 7.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.add, args=(first * changed, last)).sum()])
        before = gradient(world, 0, context_id, changed).clone()
        changed.data = changed.data[0].float()  # another type, too: or torch would go on with the old shape
        with pytest.raises(RuntimeError, match=r"shape \[3\] cannot be added to that of shape \[3, 3\]"):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.add, args=(first * changed, last)).sum()])
        assert_close(gradient(world, 0, context_id, changed), before)
        with ThreadPoolExecutor(1) as pool:  # another thread than the one that failed
            pool.submit(_plain_pass, world, first).result(SOON)
    assert changed.grad is None
    assert first.grad is mine
    assert last.grad is mine


def test_a_gradient_of_another_type_is_added_as_in_one_process(world: World) -> None:
    changed, factor = leaf(0), matrix(1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(changed, factor)).sum()])
        changed.data = changed.data.float()
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(changed, factor)).sum()])
        assert_close(gradient(world, 0, context_id, changed), factor + factor.float())


def cut(leaf: Tensor) -> None:
    leaf.data = torch.zeros(2, dtype=leaf.dtype)


def test_a_hook_that_makes_something_else_of_its_leaf(world: World) -> None:
    first, changed, last = leaf(0), leaf(1), leaf(2)
    first.grad = changed.grad = last.grad = mine = torch.full_like(first, 7.0)
    changed.register_post_accumulate_grad_hook(cut)  # type: ignore[no-untyped-call]
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match=r"gradient of size '\[3, 3\]' to a tensor of size '\[2\]'"):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.add, args=(first * changed, last)).sum()])
        assert changed.grad is None
        assert first.grad is mine
        assert last.grad is mine
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_plain_pass, world, first).result(SOON)


def _plain_pass(world: World, x: Tensor) -> None:
    with world.acting(0), autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 2.0)).sum()])
