"""A worker dies between the search of a pass and its gradients: those behind it end the pass, though nobody tells them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import leaf, my_weight, own

SOON = 5.0


def weigh(x: Tensor) -> Tensor:
    return x @ my_weight()


def die() -> Callable[[], None]:
    raise AssertionError("the test says how")


def weighed_by_another(x: Tensor) -> Tensor:
    """Worker 1 dies when the gradient of this comes, and worker 2 never gets its own."""
    result = rpc.rpc_sync("worker2", weigh, args=(x * 2,))
    kill = own("end", die)
    result.register_hook(lambda gradient: kill())  # type: ignore[no-untyped-call]
    return result * 2


def test_a_worker_dies_before_it_passes_gradients_on(world: World) -> None:
    world.run(1, own, "end", lambda: lambda: world.kill(1))
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", weighed_by_another, args=(leaf(0),))
        with pytest.raises(RuntimeError, match="worker1"):
            autograd.backward(context_id, [result.sum()])
        world.wait_until(lambda: not any(_count(world, i, "num_current_backward_passes") for i in (0, 2)), SOON)
    world.wait_until(lambda: not any(_count(world, i, "num_autograd_contexts") for i in (0, 2)), SOON)


def _count(world: World, worker: int, name: str) -> int:
    return int(world.run(worker, autograd._get_debug_info)[name])
