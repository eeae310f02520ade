"""Runs a body of the language step by step; how calls and passes are made is for others to say.

A body runs as a generator: it yields the calls it waits for and is sent their results. So the same steps can run on a
thread that waits, in a coroutine, or in the callbacks of futures.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.autograd.language import (
    Backward,
    Body,
    Call,
    Calls,
    Counted,
    Hook,
    HookKind,
    Leaf,
    LeafHookKind,
    Op,
    Program,
)
from tests.autograd.operations import OPERATIONS, SIDE

SerialQueue = Generator[list[Any], list[list[Tensor]], list[Tensor]]
Seen = tuple[str, Tensor]  # where a hook hangs, and the gradient it was called with


@dataclass
class Place:
    """A worker as a program sees it: its parameters, and what the hooks that hang there have seen."""

    number: int
    workers: int  # how many there are
    parameters: list[Tensor] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    accumulators: list[Any] = field(default_factory=list)  # kept, or the hooks on them would go

    def see(self, where: str, gradient: Tensor | None) -> None:
        """Take note of a gradient. One that a function refused to give is nothing to see: within a process it is passed
        on as None, between workers nothing is."""
        if gradient is not None:
            self.seen.append((where, gradient.detach().clone()))


def place_for(program: Program, number: int) -> Place:
    """A worker with its parameters, which depend on its number only, and the hooks that hang on them."""
    place = Place(number, program.workers)
    for index in range(program.parameters):
        start = 1.0 + 3.7 * number + 1.3 * index
        matrix = torch.linspace(start, start + 2, SIDE * SIDE, dtype=torch.float64).sin().view(SIDE, SIDE)
        values = matrix if index % 2 == 0 else matrix[0].float()  # a row, of less precision
        place.parameters.append(values.clone().requires_grad_())
    for worker, index, kind in program.leaf_hooks:
        if worker == number:
            _hang_on_leaf(place, index, kind)
    return place


def _hang_on_leaf(place: Place, index: int, kind: LeafHookKind) -> None:
    parameter, where = place.parameters[index], f"worker{place.number} parameter {index} {kind}"
    match kind:
        case "look":
            parameter.register_hook(_looking(place, where))
        case "bend":
            parameter.register_hook(_bending(place, where))  # type: ignore[arg-type]
        case "after":
            parameter.register_post_accumulate_grad_hook(lambda leaf: place.see(where, leaf.grad))
        case "after node":
            accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            accumulator.register_hook(lambda found, given: _see_all(place, where, given))
            place.accumulators.append(accumulator)


def _looking(place: Place, where: str) -> Callable[[Tensor], None]:
    return lambda gradient: place.see(where, gradient)


def _bending(place: Place, where: str) -> Callable[[Tensor], Tensor | None]:
    """Not linear: the sum of what it makes of two parts is not what it makes of their sum."""

    def hook(gradient: Tensor | None) -> Tensor | None:
        place.see(where, gradient)
        return None if gradient is None else torch.tanh(gradient)

    return hook


def hang(place: Place, value: Tensor, kind: HookKind, where: str) -> None:
    """Hang a hook on a value that is computed (those on leaves hang from the start) and wants a gradient."""
    if value.grad_fn is None or ("node" in kind and _arrived(value)):
        return
    match kind:
        case "look":
            value.register_hook(_looking(place, where))
        case "bend":
            value.register_hook(_bending(place, where))  # type: ignore[arg-type]
        case "before node":
            value.grad_fn.register_prehook(lambda gradients: _see_all(place, where, gradients))  # type: ignore[arg-type]
        case "after node":
            value.grad_fn.register_hook(lambda found, given: _see_both(place, where, found, given))
        case "bend node":
            value.grad_fn.register_hook(lambda found, given: _bend_all(place, where, found, given))


def _arrived(value: Tensor) -> bool:
    """Whether a value came from another worker: its node is another one, with other inputs, in each world."""
    name = value.grad_fn.name() if value.grad_fn is not None else ""
    return "RecvRpcBackward" in name or name == "CloneBackward0"


_Gradients = tuple[Tensor | None, ...]


def _see_all(place: Place, where: str, gradients: _Gradients) -> None:
    for number, gradient in enumerate(gradients):
        place.see(f"{where} [{number}]", gradient)


def _see_both(place: Place, where: str, found: _Gradients, given: _Gradients) -> None:
    _see_all(place, f"{where} found", found)
    _see_all(place, f"{where} given", given)


def _bend_all(place: Place, where: str, found: _Gradients, given: _Gradients) -> _Gradients:
    _see_both(place, where, found, given)
    return tuple(None if gradient is None else torch.tanh(gradient) for gradient in found)


class _CountedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Place, where: str, one: Tensor, other: Tensor) -> Tensor:
        ctx.place, ctx.where = place, where
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # type: ignore[override]
        ctx.place.see(ctx.where, gradient)
        if gradient is None:
            return None, None, None, None
        one, other = ctx.saved_tensors
        _, _, one_wanted, other_wanted = ctx.needs_input_grad
        return None, None, other * gradient if one_wanted else None, one * gradient if other_wanted else None


class Conductor(Protocol):
    """How calls and passes are made."""

    def call(self, place: Place, call: Call, inputs: list[Tensor], path: str) -> Any:
        """Begin a call; what is returned is waited for, by whoever runs the body, until it is a list of values."""

    def backward(self, place: Place, step: Backward, roots: list[Tensor]) -> None:
        """Make a pass."""


def run(body: Body, inputs: list[Tensor], place: Place, path: str, conductor: Conductor) -> SerialQueue:
    """The steps of a body; its value is what the body returns. `path` says who was called from where."""
    values = list(inputs)
    for number, step in enumerate(body.steps):
        where = f"{path}/{number}"
        match step:
            case Op(name, at):
                values += OPERATIONS[name](*[values[i] for i in at])
            case Leaf(index):
                values.append(place.parameters[index])
            case Counted(one, other):
                values.append(_CountedProduct.apply(place, where, values[one], values[other]))
            case Hook(at, kind):
                hang(place, values[at], kind, where)
            case Calls(calls):
                begun = [
                    conductor.call(place, call, [values[i] for i in call.inputs], f"{where}.{nth}")
                    for nth, call in enumerate(calls)
                ]
                for results in (yield begun):
                    values += results
            case Backward(roots):
                conductor.backward(place, step, [values[i] for i in roots if values[i].requires_grad])
    return [values[i] for i in body.results]
