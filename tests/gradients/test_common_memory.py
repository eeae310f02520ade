"""Tensors with a history that have memory in common when they arrive, and are changed in place there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.gradients.belongings import assert_close, gradient, leaf

Parts = Callable[[Tensor], list[Tensor]]


def product(tensors: list[Tensor]) -> Tensor:
    first, second = tensors
    return (first * second).sum()


def first_changed(tensors: list[Tensor]) -> Tensor:
    tensors[0].mul_(3.0)
    return product(tensors)


def second_changed(tensors: list[Tensor]) -> Tensor:
    tensors[1].mul_(3.0)
    return product(tensors)


def last_row_and_lower_rows(tensor: Tensor) -> list[Tensor]:
    return [tensor[2], tensor[1:]]


def whole_and_transposed(tensor: Tensor) -> list[Tensor]:
    return [tensor, tensor.t()]


def rows(tensor: Tensor) -> list[Tensor]:
    return [tensor[0], tensor[1]]


def windows(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten()[2:5], tensor.flatten()[4:7]]


def columns(tensor: Tensor) -> list[Tensor]:
    return [tensor[:, 0], tensor[:, 1]]


@pytest.mark.parametrize("change", [first_changed, second_changed])
@pytest.mark.parametrize("parts", [last_row_and_lower_rows, whole_and_transposed, windows])
def test_a_change_of_one_in_place_is_refused_where_the_gradient_of_the_other_would_be_wrong(
    world: World, parts: Parts, change: Callable[[list[Tensor]], Tensor]
) -> None:
    x = leaf(0)
    with autograd.context(), pytest.raises(RuntimeError, match=r"is a view and .* modified inplace"):
        rpc.rpc_sync("worker1", change, args=(parts(x * 2),))


@pytest.mark.parametrize(
    ("parts", "change"),
    [(parts, change) for parts in (rows, columns) for change in (product, first_changed, second_changed)]
    + [(last_row_and_lower_rows, product), (whole_and_transposed, product), (windows, product)],
)
def test_others_get_the_gradients_of_one_process(
    world: World, parts: Parts, change: Callable[[list[Tensor]], Tensor]
) -> None:
    x = leaf(0)
    (expected,) = torch.autograd.grad(change(parts(x * 2)), x)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", change, args=(parts(x * 2),))])
        assert_close(gradient(world, 0, context_id, x), expected)
    with autograd.context() as context_id:
        autograd.backward(context_id, [change(rpc.rpc_sync("worker1", parts, args=(x * 2,)))])
        assert_close(gradient(world, 0, context_id, x), expected)
