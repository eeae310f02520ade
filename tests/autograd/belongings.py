"""What the workers of a hand-written test own, by worker and name, and what such tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World

T = TypeVar("T")

STARTING = 120.0  # seconds for worker processes to start, and for what each does first; torch with CUDA takes long to import

_owned: dict[tuple[str, str], Any] = {}  # a process may be several workers


def forget_all() -> None:
    """The end of a test."""
    _owned.clear()


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def run_a_first_pass() -> None:
    """A process alone. Its first pass may import much more of torch: not when a call has a deadline that would pass."""
    _Same.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


def own(name: str, make: Callable[[], T]) -> T:
    """This worker's thing of that name; made when first asked for."""
    key = (rpc.get_worker_info().name, name)
    if key not in _owned:
        _owned[key] = make()
    thing: T = _owned[key]
    return thing


def matrix(seed: int, side: int = 3) -> Tensor:
    """Some numbers, always the same for a seed."""
    return torch.randn(side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(seed: int, side: int = 3) -> Tensor:
    """Some numbers that want a gradient."""
    return matrix(seed, side).requires_grad_()


def my_weight(seed: int | None = None) -> Tensor:
    """A weight of the worker that asks; another one for each seed."""
    seed = rpc.get_worker_info().id if seed is None else seed
    return own(f"weight {seed}", lambda: leaf(100 + seed))


def weight_of(world: World, worker: int, seed: int | None = None) -> Tensor:
    """The same, asked for by the test."""
    return world.run(worker, my_weight, seed)


def my_gradient(context_id: int, of: Tensor) -> Tensor | None:
    """A gradient on this worker, or None if it has none."""
    return autograd.get_gradients(context_id).get(of)


def gradient(world: World, worker: int, context_id: int, of: Tensor) -> Tensor:
    """A gradient on some worker; it must be there."""
    found = world.run(worker, my_gradient, context_id, of)
    assert found is not None, f"worker{worker} has no such gradient"
    return found


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    """Two gradients are equal, or both are missing."""
    assert (actual is None) == (expected is None), f"{actual} is not {expected}"
    if actual is not None and expected is not None:
        torch.testing.assert_close(actual, expected)


def counts(world: World, name: str) -> list[int]:
    """One of the numbers of the debug info, for each worker."""
    return [int(world.run(i, autograd._get_debug_info)[name]) for i in range(len(world))]


def passes(world: World) -> list[int]:
    """How many passes each worker takes part in now."""
    return counts(world, "num_current_backward_passes")


def contexts(world: World) -> list[int]:
    """How many contexts each worker knows."""
    return counts(world, "num_autograd_contexts")


def wait_for_no_passes(world: World, timeout: float = 5.0) -> None:
    world.wait_until(lambda: not any(passes(world)), timeout)


def wait_for_no_contexts(world: World, timeout: float = 5.0) -> None:
    world.wait_until(lambda: not any(contexts(world)), timeout)
