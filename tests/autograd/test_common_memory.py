"""Tensors with a history that have memory in common when they arrive, and are changed in place there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import assert_close, gradient, leaf

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


# One of them has no history.


def square_and_change_the_other(squared: Tensor, other: Tensor) -> Tensor:
    result = (squared * squared).sum()
    other.mul_(10.0)
    return result


def change_the_other_and_square(squared: Tensor, other: Tensor) -> Tensor:
    other.mul_(10.0)
    return (squared * squared).sum()


def change_and_square_the_other_first(other: Tensor, squared: Tensor) -> Tensor:
    return square_and_change_the_other(squared, other)


def same(tensor: Tensor) -> Tensor:
    return tensor.detach()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.detach().t()


def last_row(tensor: Tensor) -> Tensor:
    return tensor.detach()[-1]


@pytest.mark.parametrize(
    ("other_of", "side"),
    # Inside the message, and beside it. (A small part of something large is sent apart if it comes first, as with PyTorch.)
    [(same, 3), (transposed, 3), (last_row, 3), (same, 200), (transposed, 200)],
)
def test_a_change_of_memory_that_a_history_needs_is_refused_as_in_one_process(
    world: World, other_of: Callable[[Tensor], Tensor], side: int
) -> None:
    x = leaf(0, side)
    middle = x * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square_and_change_the_other(middle, other_of(middle)).backward()  # type: ignore[no-untyped-call]
    for call, turn in ((square_and_change_the_other, 1), (change_and_square_the_other_first, -1)):
        middle = x * 2
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", call, args=(middle, other_of(middle))[::turn])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                autograd.backward(context_id, [result])


@pytest.mark.parametrize("other_of", [same, transposed, last_row])
def test_a_change_before_it_is_used_is_seen(world: World, other_of: Callable[[Tensor], Tensor]) -> None:
    x = leaf(0)
    middle = x * 2
    (expected,) = torch.autograd.grad(change_the_other_and_square(middle, other_of(middle)), x)
    middle = x * 2
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", change_the_other_and_square, args=(middle, other_of(middle)))
        autograd.backward(context_id, [result])
        assert_close(gradient(world, 0, context_id, x), expected)


def change_the_one_with_a_history(squared: Tensor, other: Tensor) -> Tensor:
    squared.mul_(3.0)
    return (squared * squared + other.sum()).sum()


def test_the_one_with_a_history_may_be_changed(world: World) -> None:
    x = leaf(0)
    middle = x * 2
    (expected,) = torch.autograd.grad(change_the_one_with_a_history(middle, middle.detach()), x)
    middle = x * 2
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", change_the_one_with_a_history, args=(middle, middle.detach()))
        autograd.backward(context_id, [result])
        assert_close(gradient(world, 0, context_id, x), expected)
