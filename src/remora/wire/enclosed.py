"""The attachments of a message, beside its body: buffers, device memory, references. No pickling here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from remora.devices.staging import Upload
from remora.wire.device_buffers import Landing


class Reason(Enum):
    """The reason that a message cannot be unpacked."""

    NO_MEMORY = auto()  # this worker has no memory for its buffers
    NOT_MAPPED = auto()  # its buffers are in shared memory of the sender that could not be mapped here
    DAMAGED = auto()  # what it says of its memory or its references makes no sense


class Missing(NamedTuple):
    """Stands in the place of the buffers of a message that cannot be unpacked."""

    reason: Reason
    details: str = ""  # for the error of its call, if it is DAMAGED


class Late(Protocol):
    """Memory that may not be filled yet (`remora.agent.memory.late_fill`)."""

    def settled_or_later(self, deadline: float, resume: Callable[[], None]) -> bool:
        """Return True if `wait` returns at once. If not, call `resume` when it does."""

    def wait(self, deadline: float) -> str:
        """Wait until the memory can be used. Return the reason if it cannot."""


class Arrival(Protocol):
    """The references in a message, as the layer above took note of them (`remora.rref.codec`)."""

    @property
    def pending(self) -> Sequence[object]:
        """The references that their owners have yet to count."""

    def when_confirmed(self, ready: Callable[[], None]) -> None:
        """Call `ready` when the owners count all of them."""


class Enclosed(NamedTuple):
    """The attachments of one message."""

    buffers: Sequence[torch.UntypedStorage] | Missing = ()  # the memory of tensors
    uploads: Mapping[int, Upload] = MappingProxyType({})  # buffers that were copied to their device as they came, by number
    landing: Landing | None = None  # the device memory that the message refers to
    arrival: Arrival | None = None  # its references
    late: Late | None = None  # to wait for before the buffers are used


NOTHING_ENCLOSED = Enclosed()  # compared by identity: most messages have nothing else
