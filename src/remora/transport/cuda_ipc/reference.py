"""The reference to exported memory in a message: bytes that the fetching process reads. Opens nothing."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from remora.transport.cuda_ipc.driver import HANDLE_BYTES, UUID_BYTES

Region = tuple[torch.UntypedStorage, int, int]  # storage, first byte, how many

SLOTS = 256  # exports at a time that one exporter can count

_HEAD = struct.Struct(f"<QIIQII{UUID_BYTES}sI")
_PLACE = struct.Struct(f"<{HANDLE_BYTES}sQQQ")


class Unreachable(OSError):
    """The memory that a reference names cannot be opened."""


class Place(NamedTuple):
    """A piece of an allocation: the allocation's handle and number, and the place of the piece in it."""

    handle: bytes
    allocation: int
    offset: int
    size: int


class Reference(NamedTuple):
    """One export: its number, its page of flags, slot and use, the device, and the pieces of memory."""

    number: int
    slot: int
    use: int
    flags: tuple[int, int, int]
    device: bytes
    places: list[Place]

    @property
    def process(self) -> int:
        """Return the process that owns the memory."""
        return self.flags[1]

    def pack(self) -> bytes:
        head = _HEAD.pack(self.number, self.slot, self.use, *self.flags, self.device, len(self.places))
        return head + b"".join(_PLACE.pack(at.handle, at.allocation, at.offset, at.size) for at in self.places)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Reference:
        """Read a reference; Unreachable if the bytes are not one."""
        try:
            number, slot, use, flags, process, descriptor, device, count = _HEAD.unpack_from(data)
            places = [Place(*_PLACE.unpack_from(data, _HEAD.size + i * _PLACE.size)) for i in range(count)]
        except struct.error as error:
            raise Unreachable(f"a reference to device memory is cut short: {error}") from None
        if slot >= SLOTS:
            raise Unreachable(f"a reference to device memory names slot {slot} of {SLOTS}")
        return cls(number, slot, use, (flags, process, descriptor), device, places)


def number_of(reference: bytes | memoryview) -> int:
    """Return the number under which the exporter holds what a reference names."""
    number: int = _HEAD.unpack_from(reference)[0]
    return number
