"""Work on a GPU that ends long after the host went on: whoever does not wait for it sees what was there before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")

CYCLES = 40_000_000  # about 20 ms
SIZE = 1 << 18


def delay() -> None:
    torch.cuda._sleep(CYCLES)


def late(value: float, size: int = SIZE) -> torch.Tensor:
    """A tensor that is `value` everywhere, but not yet."""
    tensor = torch.zeros(size, device="cuda:0")
    delay()
    return tensor.fill_(value)


def seen(tensor: torch.Tensor) -> float:
    """What the current stream sees of a tensor whose elements are all the same; not a number if they are not."""
    low, high = tensor.min().item(), tensor.max().item()
    return low if low == high else float("nan")


def on_another_stream(function: Callable[..., R], *args: Any) -> R:
    """Run it on a stream that has nothing to do with the current one."""
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        return function(*args)


def on_another_thread(function: Callable[..., R], *args: Any) -> R:
    """Run it on a thread, and there on a stream of its own."""
    found: list[R] = []
    thread = threading.Thread(target=lambda: found.append(on_another_stream(function, *args)))
    thread.start()
    thread.join(60.0)
    return found[0]


def clutter(size: int = SIZE) -> None:
    """Use the memory that has just become free, at once and on this stream."""
    for _ in range(4):
        torch.full((size,), -1.0, device="cuda:0")
