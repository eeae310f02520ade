"""Measures the bytes of a value's tensors on each device, without running any code of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch

MOST_PARTS = 10_000  # of containers and modules; beyond that the size is not known
DEEPEST = 8

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (
    torch.Tensor, torch.nn.Parameter,
)  # fmt: skip
_TEXTS = bytes, bytearray, str


class _TooMany(Exception):
    """There are more parts than are looked at."""


def _leaves(value: Any, parts_seen: count[int], depth: int = 0) -> Iterator[Any]:
    """Yield what has a size in a value, if it is of a kind whose size is known: exactly that, as a subclass may have methods
    of its own."""
    if next(parts_seen) > MOST_PARTS or depth > DEEPEST:
        raise _TooMany
    if type(value) in _TENSORS or type(value) in _TEXTS:
        yield value
    else:
        for part in _parts(value):
            yield from _leaves(part, parts_seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return list(value)
    if kind is dict:
        return list(value.copy().values())
    if not issubclass(kind, torch.nn.Module):
        return ()
    state = object.__getattribute__(value, "__dict__")  # where torch keeps them: `state_dict` would run hooks
    tables = [state.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return [part for table in tables if isinstance(table, dict) for part in dict(table).values() if part is not None]


def measure(value: Any) -> tuple[int | None, str | None]:
    """Return (bytes, device) of the tensors, bytes and texts in a value; None where that is not known."""
    size: int | None = None
    device: str | None = None
    try:
        for leaf in _leaves(value, count(1)):
            if type(leaf) in _TEXTS:
                size = len(leaf) + (size or 0)
                continue
            with torch._C.DisableTorchFunctionSubclass():
                size = leaf.numel() * leaf.element_size() + (size or 0)
                device = device or str(leaf.device)
    except (_TooMany, RuntimeError):  # it changes at this moment, or a tensor has no memory that could be measured
        return None, device
    return size, device
