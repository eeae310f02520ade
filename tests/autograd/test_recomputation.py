"""Parts of a graph that are computed again in the pass, or compiled, on either side of a call."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import (
    assert_close,
    gradient,
    leaf,
    my_gradient,
    my_weight,
    own,
    wait_for_no_passes,
    weight_of,
)
from tests.thorough import THOROUGH


def weigh(x: Tensor) -> Tensor:
    return torch.tanh(x @ my_weight())


# Recomputation.


def checkpointed(x: Tensor, use_reentrant: bool) -> Tensor:
    result: Tensor = checkpoint(weigh, x, use_reentrant=use_reentrant)
    return result


def test_checkpointing_on_the_callee(world: World) -> None:
    x = leaf(0)
    weight = weight_of(world, 1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", checkpointed, args=(x, False)).sum()])
        expected = torch.autograd.grad(torch.tanh(x @ weight).sum(), [x, weight])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 1, context_id, weight), expected[1])


def test_checkpointing_on_the_caller(world: World) -> None:
    x = leaf(0)
    weights = weight_of(world, 0), weight_of(world, 1)
    with autograd.context() as context_id:
        middle = checkpointed(x, use_reentrant=False)
        result = checkpointed(rpc.rpc_sync("worker1", weigh, args=(middle,)), use_reentrant=False)
        autograd.backward(context_id, [result.sum()])
        alone = torch.tanh(torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]) @ weights[0])
        expected = torch.autograd.grad(alone.sum(), [x, *weights])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 0, context_id, weights[0]), expected[1])
        assert_close(gradient(world, 1, context_id, weights[1]), expected[2])


def around_a_call(x: Tensor) -> Tensor:
    return weigh(rpc.rpc_sync("worker2", weigh, args=(weigh(x),)))


def checkpointed_around_a_call(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(around_a_call, x, use_reentrant=False)
    return result


@pytest.mark.parametrize("where", ["caller", "callee"])
def test_checkpointing_around_a_call(world: World, where: str) -> None:
    """The call is made again in the middle of the pass; what it brings is only looked at."""
    x = leaf(0)
    me = 0 if where == "caller" else 1
    weights = weight_of(world, me), weight_of(world, 2)
    with autograd.context() as context_id:
        if where == "caller":
            result = checkpointed_around_a_call(x)
        else:
            result = rpc.rpc_sync("worker1", checkpointed_around_a_call, args=(x,))
        autograd.backward(context_id, [result.sum()])
        alone = torch.tanh(torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]) @ weights[0])
        expected = torch.autograd.grad(alone.sum(), [x, *weights])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, me, context_id, weights[0]), expected[1])
        assert_close(gradient(world, 2, context_id, weights[1]), expected[2])


# Compiled parts.


def _compiled(backend: str) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * x.sin()

    return torch.compile(function, backend=backend)


def apply_compiled(x: Tensor, backend: str) -> Tensor:
    return own("compiled", lambda: _compiled(backend))(x, my_weight())


has_toolchain = shutil.which("g++") is not None and THOROUGH


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor", marks=pytest.mark.skipif(not has_toolchain, reason="needs a C++ compiler, and make test-long")
        ),
    ],
)
@pytest.mark.may_leak("torch.compile keeps processes and descriptors of its own")
def test_compiled_parts_on_both_sides(world: World, backend: str) -> None:
    for worker in range(2):
        world.run(worker, rpc._set_rpc_timeout, 0)  # compiling takes its time
    x = leaf(0)
    weights = weight_of(world, 0), weight_of(world, 1)
    with autograd.context() as context_id:
        result = apply_compiled(rpc.rpc_sync("worker1", apply_compiled, args=(x, backend)), backend)
        autograd.backward(context_id, [result.sum()])
        middle = torch.tanh(x @ weights[1]) * x.sin()
        expected = torch.autograd.grad((torch.tanh(middle @ weights[0]) * middle.sin()).sum(), [x, *weights])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(gradient(world, 0, context_id, weights[0]), expected[1])
        assert_close(gradient(world, 1, context_id, weights[1]), expected[2])


def test_reentrant_checkpointing_gives_right_gradients_or_says_why_not(world: World) -> None:
    """It runs a backward of its own inside the pass, which knows of no context."""
    x = leaf(0)
    weight = weight_of(world, 1)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", checkpointed, args=(x, True))
        try:
            autograd.backward(context_id, [result.sum()])
        except RuntimeError as error:
            wait_for_no_passes(world)
            if "use_reentrant" not in str(error):
                raise
            return
        assert weight.grad is None
        expected = torch.autograd.grad(torch.tanh(x @ weight).sum(), [x, weight])
        assert_close(gradient(world, 0, context_id, x), expected[0])
        assert_close(world.run(1, my_gradient, context_id, weight), expected[1])
