"""Measures the bytes of a value's tensors on each device, without running any code of the program."""

from __future__ import annotations

from typing import Any

import torch

MOST_PARTS = 10_000  # of containers and modules; beyond that the size is not known
DEEPEST = 8

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (
    torch.Tensor, torch.nn.Parameter,
)  # fmt: skip


class _TooMany(Exception):
    """There are more parts than are looked at."""


class _Measure:
    def __init__(self) -> None:
        self.bytes: int | None = None
        self.device: str | None = None
        self._parts = 0

    def look(self, value: Any, depth: int = 0) -> None:
        """Add a value, if it is of a kind whose size is known: exactly that, as a subclass may have methods of its own."""
        self._parts += 1
        if self._parts > MOST_PARTS or depth > DEEPEST:
            raise _TooMany
        kind = type(value)
        if kind in _TENSORS:
            self._look_at_tensor(value)
        elif kind in (bytes, bytearray, str):
            self._add(len(value))
        elif kind in (list, tuple, set, frozenset):
            for part in list(value):
                self.look(part, depth + 1)
        elif kind is dict:
            for part in value.copy().values():
                self.look(part, depth + 1)
        elif issubclass(kind, torch.nn.Module):
            self._look_at_module(value, depth)

    def _look_at_module(self, module: Any, depth: int) -> None:
        """Its parameters and buffers where torch keeps them: `state_dict` would run hooks."""
        state = object.__getattribute__(module, "__dict__")
        for name in ("_parameters", "_buffers", "_modules"):
            table = state.get(name)
            for part in dict(table).values() if isinstance(table, dict) else ():
                if part is not None:
                    self.look(part, depth + 1)

    def _look_at_tensor(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._add(tensor.numel() * tensor.element_size())
            if self.device is None:
                self.device = str(tensor.device)

    def _add(self, size: int) -> None:
        self.bytes = size + (self.bytes or 0)


def measure(value: Any) -> tuple[int | None, str | None]:
    """Return (bytes, device) of the tensors, bytes and texts in a value; None where that is not known."""
    found = _Measure()
    try:
        found.look(value)
    except (_TooMany, RuntimeError):  # it changes at this moment, or a tensor has no memory that could be measured
        return None, found.device
    return found.bytes, found.device
