"""Hooks run once in a pass, on the sum of what came from everywhere, wherever they hang."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import assert_close, gradient, leaf, matrix, my_weight, own, weight_of

seen: list[Tensor] = []


def weigh(x: Tensor) -> Tensor:
    return x * my_weight()


def test_on_a_leaf_that_is_used_here_and_by_several_calls(world: World) -> None:
    x, gradients = leaf(0), []
    x.register_hook(gradients.append)
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(i, torch.mul, args=(x, float(i))) for i in (1, 2, 1)]
        autograd.backward(context_id, [torch.stack([x, *results]).sum()])
        (only,) = gradients
        assert (only == 5).all()
        assert (gradient(world, 0, context_id, x) == 5).all()


def test_a_hook_that_changes_the_gradient_gets_the_sum(world: World) -> None:
    x = leaf(0)
    middle = x * 2
    middle.register_hook(torch.square)
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(i, torch.mul, args=(middle, float(i))) for i in (1, 2)]
        autograd.backward(context_id, [(middle + results[0] + results[1]).sum()])
        assert (gradient(world, 0, context_id, x) == 2 * (1 + 1 + 2) ** 2).all()


def watch(x: Tensor) -> Tensor:
    """Look at the gradient of what was received; it is used twice."""
    assert x.grad_fn is not None
    assert "RecvRpcBackward" in x.grad_fn.name()
    x.register_hook(seen.append)
    return x * 3 + x * my_weight()


def test_on_a_received_tensor(world: World) -> None:
    seen.clear()
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", watch, args=(x,)).sum()])
        (only,) = seen
        assert_close(only, 3 + weight_of(world, 1).detach())
        assert_close(gradient(world, 0, context_id, x), 3 + weight_of(world, 1).detach())


def double_gradient(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x * 3


def test_a_hook_on_a_received_tensor_changes_what_is_sent_back(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double_gradient, args=(x,)).sum()])
        assert (gradient(world, 0, context_id, x) == 6).all()


def test_on_a_result(world: World) -> None:
    x, gradients = leaf(0), []
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", weigh, args=(x,))
        result.register_hook(gradients.append)
        autograd.backward(context_id, [(result + result).sum()])
        (only,) = gradients
        assert (only == 2).all()


def test_after_accumulation(world: World) -> None:
    """It runs once in each pass, and `.grad` is there for it to see: what the context holds."""
    x, gradients = leaf(0), []
    x.register_post_accumulate_grad_hook(lambda leaf: gradients.append(leaf.grad.clone()))
    with autograd.context() as context_id:
        loss = torch.stack([rpc.rpc_sync(i, torch.mul, args=(x, float(i))) for i in (1, 2)]).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        assert [each.unique().item() for each in gradients] == [3, 6]
        assert x.grad is None
        assert (gradient(world, 0, context_id, x) == 6).all()


def test_a_hook_after_accumulation_may_drop_the_gradient(world: World) -> None:
    """As programs do that step an optimizer in it."""
    x, steps = leaf(0), []

    def step(leaf: Tensor) -> None:
        steps.append(leaf.grad)
        leaf.grad = None

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2.0)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        assert (gradient(world, 0, context_id, x) == 2).all()
        x.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            autograd.backward(context_id, [loss], retain_graph=True)
            assert x.grad is None
            assert autograd.get_gradients(context_id) == {}
        assert [each.unique().item() for each in steps] == [4, 2]


def test_on_the_node_of_a_leaf(world: World) -> None:
    """Where DistributedDataParallel hangs its hooks."""
    x, calls = leaf(0), []
    accumulator = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_prehook(lambda gradients: calls.append("before"))
    accumulator.register_hook(lambda *_: calls.append("after"))
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(i, torch.mul, args=(x, 2.0)) for i in (1, 2)]
        autograd.backward(context_id, [(results[0] + results[1]).sum()])
    assert calls == ["before", "after"]


def test_on_a_node_whose_gradient_comes_from_two_calls(world: World) -> None:
    x, calls = leaf(0), []
    middle = x * 2
    assert middle.grad_fn is not None
    middle.grad_fn.register_prehook(lambda gradients: calls.append(gradients[0].unique().tolist()))  # type: ignore[arg-type]
    middle.grad_fn.register_hook(lambda found, given: calls.append(given[0].unique().tolist()))
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(i, torch.mul, args=(middle, float(i))) for i in (1, 2)]
        autograd.backward(context_id, [(results[0] + results[1]).sum()])
    assert calls == [[3.0], [3.0]]


def test_after_a_node_that_sends_on_to_what_waits_for_others(world: World) -> None:
    """The product can be differentiated before the gradient of one factor is complete: that one was sent, too."""
    x, found = leaf(0), []
    factor = torch.tanh(x)
    product = x * factor
    assert product.grad_fn is not None

    def hook(gradients: Any, _: Any) -> Any:
        found.extend(gradients)
        return tuple(2 * gradient for gradient in gradients)

    product.grad_fn.register_hook(hook)
    with autograd.context() as context_id:
        elsewhere = rpc.rpc_sync("worker1", torch.mul, args=(factor, 5.0))
        autograd.backward(context_id, [(product + elsewhere).sum()])
        assert_close(found[0], factor.detach())
        assert_close(found[1], x.detach())
        slope = 1 - factor.detach() ** 2
        assert_close(gradient(world, 0, context_id, x), 2 * factor.detach() + (2 * x.detach() + 5) * slope)


class Once(torch.autograd.Function):
    """Gives no gradient for its second input, and counts how often it was asked."""

    asked = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Once.asked += 1
        return gradient, None


def test_a_function_runs_once_though_it_gives_nothing_to_what_waits_for_others(world: World) -> None:
    x, y = leaf(0), leaf(1)
    Once.asked = 0
    middle = y * 2
    with autograd.context() as context_id:
        elsewhere = rpc.rpc_sync("worker1", torch.mul, args=(middle, 5.0))
        autograd.backward(context_id, [(Once.apply(x, middle) + elsewhere).sum()])
        assert Once.asked == 1
        assert (gradient(world, 0, context_id, y) == 10).all()


def my_layer() -> nn.Linear:
    def make() -> nn.Linear:
        layer = nn.Linear(3, 3, dtype=torch.float64)
        layer.register_full_backward_hook(_watch_module)
        layer.register_full_backward_pre_hook(_watch_module_before)
        return layer

    return own("layer", make)


def _watch_module(module: nn.Module, found: Any, given: Any) -> None:
    seen.extend([found[0], given[0]])


def _watch_module_before(module: nn.Module, given: Any) -> tuple[Tensor]:
    seen.append(given[0])
    return (given[0] * 2,)


def apply_layer(x: Tensor) -> Tensor:
    result: Tensor = my_layer()(x)
    return result


def test_full_backward_hooks_of_a_module(world: World) -> None:
    seen.clear()
    x = leaf(0)
    layer = world.run(1, my_layer)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", apply_layer, args=(x,)).sum()])
        before, found, given = seen
        ones = torch.ones_like(x).detach()
        assert_close(before, ones)
        assert_close(given, 2 * ones)
        assert_close(found, 2 * ones @ layer.weight.detach())
        assert_close(gradient(world, 0, context_id, x), found)


def test_retain_grad_of_what_is_computed(world: World) -> None:
    """Asked for by name, for this tensor: it is no leaf, so its gradient is in no context."""
    x = leaf(0)
    middle = x * 2
    middle.retain_grad()
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(i, torch.mul, args=(middle, float(i))) for i in (1, 2)]
        autograd.backward(context_id, [(results[0] + results[1]).sum()])
        assert middle.grad is not None
        assert (middle.grad == 3).all()
        assert list(autograd.get_gradients(context_id)) == [x]


def test_a_hook_may_call(world: World) -> None:
    """A tensor hook runs on the worker's threads like any function of the program."""
    x = leaf(0)
    x.register_hook(lambda gradient: rpc.rpc_sync("worker2", torch.mul, args=(gradient, 2.0)))
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, matrix(1))).sum()])
        assert_close(gradient(world, 0, context_id, x), 2 * matrix(1))
