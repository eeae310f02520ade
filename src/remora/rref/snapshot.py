"""A snapshot of the values that a worker owns and the references that it holds, for people who look for a leak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId


@dataclass(frozen=True)
class OwnedValue:
    """A value on this worker that other workers hold."""

    id: RRefId
    _value: Value = field(repr=False)
    age: float  # seconds
    holders: list[str]

    @property
    def type(self) -> str:
        """The type of the value, or its state if it is not there."""
        if not self._value.ready:
            return "being made"
        if self._value.error is not None:
            return f"failed: {self._value.error!r}"
        kind = type(self._value.peek())
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def size(self) -> int | None:
        """The bytes of its tensors, if it is a tensor, a module or a container of tensors; None for anything else."""
        return _size(self._value.peek())

    def __str__(self) -> str:
        size = "" if self.size is None else f", {self.size} bytes"
        return f"{self.id} {self.type}{size}, {self.age:.1f} s old, held by {', '.join(self.holders)}"


@dataclass(frozen=True)
class HeldReference:
    """A reference on this worker to a value of another."""

    id: RRefId
    fork: ForkId
    owner: str
    state: str  # pending, confirmed, leaving or unusable
    age: float

    def __str__(self) -> str:
        return f"{self.id} of {self.owner}, {self.state}, {self.age:.1f} s old"


@dataclass(frozen=True)
class Snapshot:
    """All of them. It prints."""

    owned: list[OwnedValue]
    held: list[HeldReference]

    def __str__(self) -> str:
        lines = [f"{len(self.owned)} values owned here that others hold:", *(f"  {value}" for value in self.owned)]
        lines += [f"{len(self.held)} references held here:", *(f"  {held}" for held in self.held)]
        return "\n".join(lines)


def _size(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, torch.nn.Module):
        return sum(_size(tensor) or 0 for tensor in value.state_dict().values() if isinstance(tensor, torch.Tensor))
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        parts = [_size(part) for part in (value.values() if isinstance(value, dict) else value)]
        return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None
    return None
