"""A function whose backward fails, or waits, when a test tells it to, on whichever worker of this process it runs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from remora import rpc
from tests.autograd.belongings import my_weight

broken = threading.Event()
slow = threading.Event()
go_on = threading.Event()
reached = threading.Event()


def clear() -> None:
    """Nothing fails, nothing waits."""
    for flag in (broken, slow, go_on, reached):
        flag.clear()


class Mine(torch.autograd.Function):
    """A function whose backward fails, or waits, when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        reached.set()
        if broken.is_set():
            raise ValueError("stepped on a mine")
        if slow.is_set():
            go_on.wait(30)
        return gradient * 2


def mined(x: Tensor) -> Tensor:
    result: Tensor = Mine.apply(x) * my_weight()
    return result


def mined_twice_removed(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", mined, args=(x * my_weight(),))
