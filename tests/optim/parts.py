"""Parameters on other workers, optimizers to watch, and the same training in one process and on many workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from remora import autograd, rpc
from remora.optim import DistributedOptimizer
from remora.rpc import RRef


def parameter(seed: int) -> Tensor:
    """Some numbers, always the same for a seed."""
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def parameters_on(*workers: str) -> list[RRef[Tensor]]:
    """A parameter on each of the workers."""
    return [rpc.remote(worker, parameter, args=(seed,)) for seed, worker in enumerate(workers)]


def parameters_here(count: int) -> list[Tensor]:
    """The same parameters, in this process."""
    return [parameter(seed) for seed in range(count)]


def target(step: int) -> Tensor:
    return torch.full((3, 2), float(step % 3))


def distance(tensor: Tensor, step: int) -> Tensor:
    """A loss with another gradient in every step."""
    return (tensor - target(step)).pow(2).sum() * (1 + step)


def remote_distance(rref: RRef[Tensor], step: int) -> Tensor:
    return distance(rref.local_value(), step)


def losses_of(rrefs: Sequence[RRef[Tensor]], step: int) -> list[Tensor]:
    """The loss of each parameter, computed where it is."""
    return [rpc.rpc_sync(rref.owner(), remote_distance, args=(rref, step)) for rref in rrefs]


def train_here(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: Iterator[int] | range,
    after_step: Callable[[], object] = lambda: None,
) -> list[Tensor]:  # fmt: skip
    """What the parameters are after these steps."""
    for step in steps:
        optimizer.zero_grad()
        torch.stack([distance(each, step) for each in parameters]).sum().backward()
        optimizer.step()
        after_step()
    return [each.detach().clone() for each in parameters]


def train_remotely(
    optimizer: DistributedOptimizer, rrefs: Sequence[RRef[Tensor]], steps: Iterator[int] | range,
    after_step: Callable[[], object] = lambda: None,
) -> list[Tensor]:  # fmt: skip
    """The same with parameters of other workers."""
    for step in steps:
        with autograd.context() as context_id:
            autograd.backward(context_id, losses_of(rrefs, step))
            optimizer.step(context_id)
        after_step()
    return values_of(rrefs)


def values_of(rrefs: Sequence[RRef[Tensor]]) -> list[Tensor]:
    return [rref.to_here().detach() for rref in rrefs]


def step_once(optimizer: DistributedOptimizer, rrefs: Sequence[RRef[Tensor]], step: int = 1) -> None:
    train_remotely(optimizer, rrefs, range(step, step + 1))


class Broken(torch.optim.Optimizer):
    """Cannot step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError(f"out of order on {rpc.get_worker_info().name}")


class Unbuildable(torch.optim.Optimizer):
    """Cannot be made."""

    def __init__(self, params: Any) -> None:
        raise KeyError("no such thing")


class Replacing(torch.optim.Optimizer):
    """Gives parameters new memory, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data = each.data - group["lr"] * each.grad


class Counting(torch.optim.Optimizer):
    """Subtracts a multiple of the gradient that grows with each step; the count is kept in its groups, as some do."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()  # type: ignore[misc]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] * group["steps"])


class Remembering(torch.optim.SGD):
    """Has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["steps"] = self.state.get("steps", 0) + 1


class Meeting(torch.optim.SGD):
    """SerialQueue when `expected` of its kind are in `step` at the same time, and raises if they never are."""

    barrier: ClassVar[threading.Barrier]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.barrier.wait(10.0)
        super().step()


class Watched(torch.optim.Optimizer):
    """Subtracts the gradient in two moves, with others given every chance to come in between."""

    inside: ClassVar[list[int]] = []
    seen: ClassVar[set[int]] = set()

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.append(1)
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                before = each.detach().clone()
                threading.Event().wait(0.001)
                each.data.copy_(before - each.grad)
        self.seen.add(len(self.inside))
        self.inside.pop()
