"""Gathers the device memory of a message when it is packed, and hands it out when it is unpacked. Lends nothing itself.

The storages of a message that are on devices form *lots*, one for each device they come from; all of a lot arrive on one
device. In the pickle a storage is a pair of numbers, its lot and its place in it. How a lot gets there is decided when the
message is packed and its size known, by the `Route` to the receiver: its memory is lent to the receiver (by a reference),
or copied into buffers of the message. The *manifest*, at the end of the body, says which:

    list    for each lot:
            u8      0: its bytes are in buffers; 1: its memory is lent
            u8      length of the name of the device where it arrives
            u32     the number of its first buffer; the length of the reference, if it is lent
            u32     how many buffers it has; 0, if it is lent
            the name (ASCII), the reference
    u32     length of the list

The list is no pickle: a pickle says how long the unpickler's memo has to be, and damage there takes hundreds of megabytes.

One more at the end, if its device has a question mark before it, is a probe: the receiver tries to open it, which shows if
memory can be lent to it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import torch

from remora.devices import copies
from remora.devices.staging import Download, Upload, plainly, upload
from remora.errors import SerializationError
from remora.wire.buffer_pool import spare_buffers
from remora.wire.raw_memory import allocate, storage_view

Region = tuple[torch.UntypedStorage, int, int]  # storage, start, number of bytes
Manifest = list[tuple[str, bytes | tuple[int, int]]]  # of each lot: where it arrives; a reference, or which buffers
Place = tuple[int, int]  # of a storage: its lot, and where in it

_PROBE = "?"
_NONE: Mapping[int, Upload] = MappingProxyType({})
_LENGTH = struct.Struct("<I")
_LOT = struct.Struct("<BBII")


class Route(Protocol):
    """The route of the device memory in messages to one peer."""

    moves_cpu: bool  # tensors on the CPU do not arrive on the CPU

    def target(self, device: torch.device) -> torch.device:
        """Return the device on which a tensor on `device` arrives. Raises if there is none."""

    def lend(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        """Return a reference to a lot that is to arrive on `target`; None if it has to go in buffers."""

    def retract(self, reference: bytes) -> None:
        """Take back what was lent for a message that is never sent."""

    def probe(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        """Return a reference for the receiver to try, if it has not been tried yet."""


class DeviceBuffers:
    """The device memory of a message that is being packed."""

    __slots__ = ("_lots", "_route", "lent")

    def __init__(self, route: Route) -> None:
        self._route = route
        self.lent: list[bytes] = []  # references, when it is closed
        self._lots: dict[torch.device, tuple[int, list[Region]]] = {}

    def add(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Place:
        """Add some bytes of a storage to the message."""
        number, regions = self._lots.setdefault(storage.device, (len(self._lots), []))
        regions.append((storage, start, nbytes))
        return number, len(regions) - 1

    def close(self, first_buffer: int, undo: list[Callable[[], None]]) -> tuple[bytes, Download | None]:
        """Return the manifest, and what goes in buffers of the message from number `first_buffer` on, if anything does."""
        manifest: Manifest = []
        parts: list[torch.Tensor] = []
        probe: Manifest = []
        with plainly():
            for device, (_, regions) in self._lots.items():
                target = self._route.target(device)
                reference = self._route.lend(regions, target)
                if reference is not None:
                    undo.append(partial(self._route.retract, reference))
                    self.lent.append(reference)
                    manifest.append((str(target), reference))
                    continue
                manifest.append((str(target), (first_buffer + len(parts), len(regions))))
                parts += [copies.span(*region) for region in regions]
                tried = None if probe else self._route.probe(regions, target)
                if tried is not None:
                    undo.append(partial(self._route.retract, tried))
                    probe.append((f"{_PROBE}{target}", tried))
            return write_manifest(manifest + probe), Download(parts, _warm) if parts else None


def _warm(nbytes: int) -> torch.Tensor:
    return copies.span(spare_buffers.take(nbytes), 0, nbytes)


def write_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as it stands at the end of a body."""
    listed = b""
    for name, where in manifest:
        place = name.encode("ascii")
        if isinstance(where, bytes):
            listed += _LOT.pack(1, len(place), len(where), 0) + place + where
        else:
            listed += _LOT.pack(0, len(place), *where) + place
    return listed + _LENGTH.pack(len(listed))


def split(body: bytes | bytearray | memoryview, sizes: int = 0) -> tuple[bytes, Manifest]:
    """Return the body without its manifest, and the manifest. Behind it are the sizes of so many buffers.
    SerializationError if the manifest is damaged."""
    start, manifest = _manifest_of(body, sizes)
    return bytes(memoryview(body)[:start]), manifest


def _manifest_of(body: bytes | bytearray | memoryview, sizes: int) -> tuple[int, Manifest]:
    end = len(body) - 8 * sizes - _LENGTH.size
    length = _LENGTH.unpack_from(body, end)[0] if end >= 0 else 0
    if not 0 < length <= end:
        raise SerializationError(f"a message of {len(body)} bytes announces {length} bytes of a list of device memory")
    return end - length, _read_manifest(memoryview(body)[end - length : end])


def _read_manifest(listed: memoryview) -> Manifest:
    found: Manifest = []
    at = 0
    try:
        while at < len(listed):
            lent, name, first, count = _LOT.unpack_from(listed, at)
            if lent and not first:  # (an empty reference marks a lot that was fetched)
                raise SerializationError("the list of device memory of a message has an empty reference")
            middle = at + _LOT.size + name
            place = str(listed[middle - name : middle], "ascii")
            at = middle + first if lent else middle
            found.append((place, bytes(listed[middle:at]) if lent else (first, count)))
    except (struct.error, UnicodeDecodeError) as error:
        raise SerializationError(f"the list of device memory of a message is damaged: {error}") from None
    if at != len(listed):
        raise SerializationError(f"the list of device memory of a message ends at byte {at} of {len(listed)}")
    return found


class Unloading:
    """The buffers of a message as they come in: those for devices piece by piece, the others as a whole."""

    __slots__ = ("_number", "buffers", "uploads")

    def __init__(self, sizes: Sequence[int], uploads: dict[int, Upload]) -> None:
        self.uploads = uploads  # by the number of the buffer
        self.buffers = [allocate(0 if number in uploads else size)[0] for number, size in enumerate(sizes)]
        self._number = -1  # of the buffer that is being filled

    def space(self) -> memoryview | None:
        """Return the memory for the next bytes, when the last space is full; None when all have come."""
        found = None
        uploading = self.uploads.get(self._number)
        if uploading is not None:
            uploading.filled()
            found = _view(uploading.space())
        while found is None and self._number + 1 < len(self.buffers):
            self._number += 1
            if self._number not in self.uploads:
                found = storage_view(self.buffers[self._number])
            else:
                found = _view(self.uploads[self._number].space())
            found = found or None  # an empty one is full
        return found


def _view(chunk: torch.Tensor | None) -> memoryview | None:
    return None if chunk is None else storage_view(chunk.untyped_storage())


def unloading(body: bytes | bytearray | memoryview, sizes: Sequence[int]) -> Unloading | None:
    """Return an `Unloading` for the buffers of a message; None if none of them is to be copied to a device as it comes."""
    try:
        uploads = {
            number: found
            for place, where in _manifest_of(body, len(sizes))[1]
            if isinstance(where, tuple)
            for number in range(where[0], where[0] + where[1])
            if (found := upload(sizes[number], torch.device(place))) is not None
        }
    except Exception:  # the error appears when the message is unpacked
        return None
    return Unloading(sizes, uploads) if uploads else None


class Lender(Protocol):
    """The lender of what references name, on the side of the receiver."""

    def fetch(self, reference: bytes, device: torch.device) -> list[torch.UntypedStorage]:
        """Return copies of a lot, on `device`."""

    def try_out(self, reference: bytes, device: torch.device) -> None:
        """Try to open the memory that a reference names."""

    def give_back(self, reference: bytes) -> None:
        """Return memory that is not wanted. Destructors call this."""


class Landing:
    """The device memory of a received message. What is not fetched from it is returned when the message is dropped."""

    __slots__ = ("_found", "_lender", "_lots", "_probe", "_uploads")

    def __init__(self, manifest: Manifest, lender: Lender, uploads: Mapping[int, Upload] = _NONE) -> None:
        self._uploads = uploads  # what was copied to its device as it came, by the number of the buffer
        self._probe = manifest.pop() if manifest[-1][0].startswith(_PROBE) else None
        self._lots = [reference for _, reference in manifest]
        self._lender = lender
        self._found: dict[int, list[torch.UntypedStorage]] = {}

    def storage(
        self, place: Place, device: torch.device, buffers: Sequence[torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """Return the memory of one storage, on its device."""
        if self._probe is not None:
            self._try_out()
        lot, index = place
        if not 0 <= lot < len(self._lots):
            raise SerializationError(f"a message with {len(self._lots)} lots of device memory has no lot {lot}")
        reference = self._lots[lot]
        if isinstance(reference, tuple):
            number = reference[0] + index
            if not 0 <= index < reference[1] or not 0 <= number < len(buffers):
                raise SerializationError(f"lot {lot} of device memory has no storage {index}")
            if number in self._uploads:
                return self._uploads[number].storage()
            host = buffers[number]
            return host if device.type == "cpu" else copies.to_device(host, device)
        if reference:
            self._lots[lot] = b""  # fetched: it need not be returned
            self._found[lot] = self._lender.fetch(reference, device)
        found = self._found[lot]
        if not 0 <= index < len(found):
            raise SerializationError(f"lot {lot} of device memory has no storage {index}")
        return found[index]

    def _try_out(self) -> None:
        assert self._probe is not None
        (place, reference), self._probe = self._probe, None
        try:
            self._lender.try_out(cast(bytes, reference), torch.device(place[len(_PROBE) :]))
        except Exception:  # then nothing is lent to us
            pass

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return
        references = self._lots if self._probe is None else [*self._lots, self._probe[1]]
        for reference in references:
            if isinstance(reference, bytes) and reference:
                self._lender.give_back(reference)
