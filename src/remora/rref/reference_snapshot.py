"""A snapshot of the values that a worker owns and the references that it holds, for people who look for a leak."""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.names import Name, type_name
from remora.rref.measure import measure
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId


@dataclass(frozen=True)
class OwnedValue:
    """A value on this worker that other workers hold."""

    id: RRefId
    _value: Value = field(repr=False)
    age: float  # seconds
    holders: list[str]
    unconfirmed: int = 0  # references to it that others have and that are not counted yet, as far as is known
    maker: Name | None = None  # the function that made it
    site: str = ""  # where the reference was made, if that is recorded

    @property
    def type(self) -> str:
        """The type of the value, or its state if it is not there."""
        if not self._value.ready:
            return "being made"
        if self._value.error is not None:
            return f"failed: {self._value.error!r}"
        return type_name(type(self._value.peek()))

    @property
    def size(self) -> int | None:
        """The bytes of its tensors, if it is a tensor, a module or a container of tensors; None for anything else."""
        return self.measured[0]

    @property
    def measured(self) -> tuple[int | None, str | None]:
        """Its size, and the device of its tensors, or of the first of them."""
        return measure(self._value.peek())

    @property
    def state(self) -> str:
        """The state of the value: "ready", "being made" or "failed"."""
        if not self._value.ready:
            return "being made"
        return "ready" if self._value.error is None else "failed"

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
    maker: Name | None = None  # the function that it was asked to be made by
    site: str = ""

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

