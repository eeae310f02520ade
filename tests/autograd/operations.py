"""The local operations of the language: of matrices, and of what can be stretched to one, with small values.

Values are two-by-two matrices, or rows, or numbers, of either precision. What several of them are stretched for, torch
must sum up again on the way back; so some operations stretch their arguments themselves and some leave it to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SIDE = 2


@dataclass(frozen=True)
class Operation:
    """A function of some values; `arity` None takes any number, and `many` says it gives back as many as it takes."""

    function: Callable[..., Tensor | Sequence[Tensor]]
    arity: int | None = 1
    gives: int = 1
    many: bool = False

    def outputs(self, inputs: int) -> int:
        return inputs if self.many else self.gives

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        result = self.function(*inputs)
        return [result] if isinstance(result, Tensor) else list(result)


def full(x: Tensor) -> Tensor:
    """A value as a matrix of double precision."""
    return x.double().expand(SIDE, SIDE)


class Square(torch.autograd.Function):
    """A function whose backward is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Pair(torch.autograd.Function):
    """Two inputs, two outputs; wants to know which of them nobody used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, (x - y) / 2

    @staticmethod
    def backward(ctx: Any, product: Tensor | None, difference: Tensor | None) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        if product is None and difference is None:
            return None, None
        if product is None:
            assert difference is not None
            return difference / 2, -difference / 2
        if difference is None:
            return y * product, x * product
        return y * product + difference / 2, x * product - difference / 2


class ZeroFilled(torch.autograd.Function):
    """Two outputs; gets zeros for the one that nobody used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + y) / 2, (x - y) / 2

    @staticmethod
    def backward(ctx: Any, total: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return (total + difference) / 2, (total - difference) / 2


class Refusal(torch.autograd.Function):
    """Gives no gradient, though its input wants one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


class Mined(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("stepped on a mine")


def _changed_in_place(x: Tensor) -> Tensor:
    copy = full(x).clone()
    copy.mul_(0.5)
    copy[0].add_(full(x)[1] / 2)  # through a view
    return copy


def _without_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return x * y


def _recomputed(x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda v, w: torch.tanh(v * w) * v, x, y, use_reentrant=False)
    return result


OPERATIONS: dict[str, Operation] = {
    "add": Operation(lambda x, y: (x + y) / 2, 2),
    "mul": Operation(lambda x, y: x * y, 2),
    "matmul": Operation(lambda x, y: full(x) @ full(y) / 2, 2),
    "affine": Operation(lambda x, y, z: torch.addmm(x.double(), full(y), full(z)) / 3, 3),
    "tanh": Operation(torch.tanh),
    "sum": Operation(lambda x: x.sum() / 4),
    "half": Operation(lambda x: x.float()),
    "cat": Operation(lambda *xs: torch.cat([full(x) for x in xs]).view(-1, SIDE, SIDE).mean(0), None),
    "stack": Operation(lambda *xs: torch.stack([full(x) for x in xs]).prod(0), None),
    "split": Operation(lambda x: torch.cat([full(x), full(x * x)]).split(SIDE), 1, gives=2),
    "unbind": Operation(lambda *xs: torch.stack([full(x) for x in xs]).unbind(), None, many=True),
    "transpose": Operation(lambda x: full(x).t()),
    "row": Operation(lambda x: full(x)[0]),
    "expand": Operation(lambda x: x.expand(SIDE, SIDE)),
    "in_place": Operation(_changed_in_place),
    "detach": Operation(lambda x: x.detach()),
    "no_grad": Operation(_without_grad, 2),
    "square": Operation(Square.apply),
    "pair": Operation(lambda x, y: Pair.apply(full(x), full(y)), 2, gives=2),
    "zero_filled": Operation(lambda x, y: ZeroFilled.apply(full(x), full(y)), 2, gives=2),
    "checkpoint": Operation(_recomputed, 2),
    "refuse": Operation(Refusal.apply),
    "mine": Operation(Mined.apply),
}
