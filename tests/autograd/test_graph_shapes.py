"""Graphs over several workers, by their shapes: each gradient is the one that a single process computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import assert_close, gradient, leaf, matrix, my_gradient, my_weight, own, weight_of


def weigh(x: Tensor) -> Tensor:
    """Something that uses a weight of the worker that runs it."""
    return torch.tanh(x @ my_weight())


def weigh_both(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x @ my_weight() * y)


@pytest.mark.parametrize("kept", ["first", "second"])
def test_one_of_two_results_is_not_used_by_the_loss(world: World, kept: str) -> None:
    """torch.distributed.autograd waits for ever here."""
    x = leaf(0)
    with autograd.context() as context_id:
        results = {name: rpc.rpc_sync("worker1", weigh, args=(x,)) for name in ("first", "second")}
        autograd.backward(context_id, [results[kept].sum()])
        found = gradient(world, 0, context_id, x), gradient(world, 1, context_id, weight_of(world, 1))
    weight = weight_of(world, 1)
    expected = torch.autograd.grad(torch.tanh(x @ weight).sum(), [x, weight])
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_nothing_remote_is_used_by_the_loss(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", weigh, args=(x,))
        autograd.backward(context_id, [(x * x).sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * x.detach())
        assert world.run(1, autograd.get_gradients, context_id) == {}


def call_on_and_ignore(x: Tensor) -> Tensor:
    rpc.rpc_sync("worker2", weigh, args=(x,))
    return weigh(x)


def test_a_callee_does_not_use_what_it_called_for(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", call_on_and_ignore, args=(x,)).sum()])
        (expected,) = torch.autograd.grad(torch.tanh(x @ weight_of(world, 1)).sum(), x)
        assert_close(gradient(world, 0, context_id, x), expected)
        assert world.run(2, autograd.get_gradients, context_id) == {}


def several(x: Tensor) -> dict[str, Tensor]:
    return {"weighed": weigh(x), "other": x * my_weight(7), "alone": my_weight(8) * 2}


def test_some_of_several_outputs_are_not_used(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        outputs = rpc.rpc_sync("worker1", several, args=(x,))
        autograd.backward(context_id, [outputs["other"].sum()])
        assert_close(gradient(world, 0, context_id, x), weight_of(world, 1, 7).detach())
        assert_close(gradient(world, 1, context_id, weight_of(world, 1, 7)), x.detach())
        for unused in (None, 8):
            assert world.run(1, my_gradient, context_id, weight_of(world, 1, unused)) is None


def test_residual_around_a_call(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        middle = x * 2
        result = middle + rpc.rpc_sync("worker1", weigh, args=(middle,))
        autograd.backward(context_id, [result.sum()])
        weight = weight_of(world, 1)
        expected = torch.autograd.grad((2 * x + torch.tanh(2 * x @ weight)).sum(), [x, weight])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 1, context_id, weight), expected[1])


def test_residual_around_many_calls_in_a_row(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        value = x
        for worker in (1, 2) * 4:
            value = value + rpc.rpc_sync(worker, weigh, args=(value,))
        autograd.backward(context_id, [value.sum()])
        weights = weight_of(world, 1), weight_of(world, 2)
        expected = x
        for weight in weights * 4:
            expected = expected + torch.tanh(expected @ weight)
        expectations = torch.autograd.grad(expected.sum(), [x, *weights])
        found = [gradient(world, 0, context_id, x), *(gradient(world, i, context_id, weights[i - 1]) for i in (1, 2))]
        for actual, wanted in zip(found, expectations, strict=True):
            assert_close(actual, wanted)


def my_cell() -> nn.RNNCell:
    def make() -> nn.RNNCell:
        torch.manual_seed(rpc.get_worker_info().id)
        return nn.RNNCell(3, 3, dtype=torch.float64)

    return own("cell", make)


def step(x: Tensor, hidden: Tensor) -> Tensor:
    result: Tensor = my_cell()(x, hidden)
    return result


def test_an_rnn_whose_state_goes_to_and_fro(world: World) -> None:
    inputs = [matrix(seed) for seed in range(6)]
    first = leaf(20)
    mine, theirs = my_cell(), world.run(1, my_cell)
    with autograd.context() as context_id:
        hidden = first
        for x in inputs:
            hidden = rpc.rpc_sync("worker1", step, args=(x, mine(x, hidden)))
        autograd.backward(context_id, [hidden.sum()])
        hidden = first
        for x in inputs:
            hidden = theirs(x, mine(x, hidden))
        owners = [(0, first), *((0, p) for p in mine.parameters()), *((1, p) for p in theirs.parameters())]
        expected = torch.autograd.grad(hidden.sum(), [tensor for _, tensor in owners])
        for (worker, tensor), wanted in zip(owners, expected, strict=True):
            assert_close(gradient(world, worker, context_id, tensor), wanted)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_diamond(world: World, mode: str) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        middle = torch.sin(x)
        sides = [rpc.rpc_async(worker, weigh, args=(middle,)) for worker in ("worker1", "worker2")]
        joined = rpc.rpc_sync("worker1", weigh_both, args=tuple(side.wait() for side in sides))
        autograd.backward(context_id, [joined.sum()], mode=mode)
        weights = weight_of(world, 1), weight_of(world, 2)
        left, right = (torch.tanh(torch.sin(x) @ weight) for weight in weights)
        expected = torch.autograd.grad(torch.tanh(left @ weights[0] * right).sum(), [x, *weights])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 1, context_id, weights[0]), expected[1])
        assert_close(gradient(world, 2, context_id, weights[1]), expected[2])


def bounce(x: Tensor, depth: int) -> Tensor:
    """Use a weight of ours, on the way there and on the way back."""
    if depth == 0:
        return weigh(x)
    caller = 1 - rpc.get_worker_info().id
    return weigh(x) + rpc.rpc_sync(caller, bounce, args=(weigh(x), depth - 1))


def bounce_here(x: Tensor, weights: tuple[Tensor, Tensor], depth: int) -> Tensor:
    weighed = torch.tanh(x @ weights[0])
    return weighed if depth == 0 else weighed + bounce_here(torch.tanh(x @ weights[0]), weights[::-1], depth - 1)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_ping_pong_of_depth_ten(world: World, mode: str) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", bounce, args=(x, 10)).sum()], mode=mode)
        weights = weight_of(world, 1), weight_of(world, 0)
        expected = torch.autograd.grad(bounce_here(x, weights, 10).sum(), [x, *weights])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 1, context_id, weights[0]), expected[1])
        assert_close(gradient(world, 0, context_id, weights[1]), expected[2])


def test_several_roots_and_one_of_them_twice(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        one = rpc.rpc_sync("worker1", weigh, args=(x,)).sum()
        two = rpc.rpc_sync("worker2", weigh, args=(x,)).sum()
        autograd.backward(context_id, [one, two, one, x.sum()])
        ones, twos = (torch.tanh(x @ weight_of(world, i)).sum() for i in (1, 2))
        (expected,) = torch.autograd.grad([ones, twos, ones, x.sum()], x)
        assert_close(gradient(world, 0, context_id, x), expected)
        (expected,) = torch.autograd.grad(2 * torch.tanh(x @ weight_of(world, 1)).sum(), weight_of(world, 1))
        assert_close(gradient(world, 1, context_id, weight_of(world, 1)), expected)


def loss_of(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", weigh, args=(x,)).sum()


def test_the_root_is_on_another_worker(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        rpc.remote("worker1", loss_of, args=(x,)).backward(context_id)
        expected = torch.autograd.grad(torch.tanh(x @ weight_of(world, 2)).sum(), [x, weight_of(world, 2)])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 2, context_id, weight_of(world, 2)), expected[1])


def test_the_root_is_a_reference_to_a_value_here(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        rpc.RRef(loss_of(x)).backward(context_id)
        (expected,) = torch.autograd.grad(torch.tanh(x @ weight_of(world, 2)).sum(), x)
        assert_close(gradient(world, 0, context_id, x), expected)


def give_weight() -> Tensor:
    return my_weight()


def give_back(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def test_a_parameter_returned_as_it_is(world: World) -> None:
    x = matrix(0)
    with autograd.context() as context_id:
        weight = rpc.rpc_sync("worker1", give_weight)
        assert weight.requires_grad
        assert not weight.is_leaf
        autograd.backward(context_id, [(weight * x).sum()])
        assert_close(gradient(world, 1, context_id, weight_of(world, 1)), x)


def test_an_argument_returned_as_it_is(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        one, two = rpc.rpc_sync("worker1", give_back, args=(x,))
        autograd.backward(context_id, [(one * two).sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * x.detach())
        assert world.run(1, autograd.get_gradients, context_id) == {}


def test_a_tensor_passed_twice_in_one_call(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, x)).sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * x.detach())


def test_a_parameter_as_argument_keeps_its_link(world: World) -> None:
    mine = nn.Parameter(matrix(0))
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(mine,)).sum()])
        (expected,) = torch.autograd.grad(torch.tanh(mine @ weight_of(world, 1)).sum(), mine)
        assert_close(gradient(world, 0, context_id, mine), expected)


def test_a_call_to_oneself(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker0", weigh, args=(x,)).sum()])
        expected = torch.autograd.grad(torch.tanh(x @ my_weight()).sum(), [x, my_weight()])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 0, context_id, my_weight()), expected[1])


def test_no_call_at_all(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(x * x).sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * x.detach())
        assert list(autograd.get_gradients(context_id)) == [x]


def fetch(reference: rpc.RRef[Tensor]) -> Tensor:
    return reference.to_here()


def test_one_result_fetched_by_three_workers(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        reference = rpc.remote("worker1", weigh, args=(x,))
        values = [reference.to_here(), *(rpc.rpc_sync(i, fetch, args=(reference,)) for i in (1, 2))]
        autograd.backward(context_id, [torch.stack(values).prod(0).sum()])
        weight = weight_of(world, 1)
        expected = torch.autograd.grad((torch.tanh(x @ weight) ** 3).sum(), [x, weight])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 1, context_id, weight), expected[1])


def test_a_long_chain_of_calls(world: World) -> None:
    """No recursion as deep as the program was long, on any worker."""
    x = leaf(0)
    with autograd.context() as context_id:
        value = x
        for _ in range(200):
            value = rpc.rpc_sync("worker1", torch.add, args=(value, x))
        autograd.backward(context_id, [value.sum()])
        assert_close(gradient(world, 0, context_id, x), torch.full_like(x, 201.0).detach())
