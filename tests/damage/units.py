"""A stream between two workers, cut into what it consists of: messages of the handshake, then frames."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remora.protocol import conversation
from remora.transport.fault_link import Splitter
from remora.wire import frames

_SIZES = {"B": 1, "?": 1, "H": 2, "I": 4, "Q": 8, "d": 8, "f": 4, "i": 4, "q": 8}
GREETINGS = 2  # messages of each end in a handshake that succeeds


@dataclass(frozen=True, slots=True)
class Unit:
    """One message of a handshake (`kind` is negative) or one frame."""

    data: bytes
    kind: int
    number: int = 0

    @property
    def is_frame(self) -> bool:
        return self.kind >= 0

    @property
    def header_size(self) -> int:
        return frames.HEADER_SIZE if self.is_frame else conversation.HEADER.size


def fields(unit: Unit) -> list[tuple[int, int]]:
    """(offset, bytes) of each number in the header of a unit."""
    layout = frames.HEADER if unit.is_frame else conversation.HEADER
    found: list[tuple[int, int]] = []
    offset, digits = 0, ""
    for code in layout.format.lstrip("<>="):
        if code.isdigit():
            digits += code
            continue
        if code == "s":
            found.append((offset, int(digits or "1")))
            offset += int(digits or "1")
        else:
            for _ in range(int(digits or "1")):
                found.append((offset, _SIZES[code]))
                offset += _SIZES[code]
        digits = ""
    return found


def is_covered(unit: Unit) -> bool:
    """Whether a seal covers all of it: that of the handshake, or the checksum of a small frame without buffers."""
    if not unit.is_frame:
        return True
    fields = frames.HEADER.unpack_from(unit.data)
    return not fields[4] and len(unit.data) - frames.HEADER_SIZE <= frames.WHOLE


def resealed(unit: Unit, mutate: Callable[[bytes], bytes]) -> bytes:
    """A frame with another body and the right checksum: what a member with a bug sends."""
    _, guarded, kind, flags, count, call, number, ack, timeout = frames.HEADER.unpack_from(unit.data)
    end = frames.HEADER_SIZE + guarded // frames.GUARD
    tail = end - 8 * count
    body = mutate(unit.data[frames.HEADER_SIZE : tail]) + unit.data[tail:end]
    return frames.encode(kind, flags, count, call, number, ack, timeout, len(body), body + unit.data[end:])


class Cutter:
    """Cuts one direction of a connection into units."""

    def __init__(self) -> None:
        self._greetings = 0
        self._data = bytearray()
        self._splitter = Splitter()

    def feed(self, data: bytes) -> Iterator[Unit]:
        """What these bytes complete."""
        if self._greetings < GREETINGS:
            self._data += data
            while self._greetings < GREETINGS and (unit := self._greeting()) is not None:
                self._greetings += 1
                yield unit
            if self._greetings < GREETINGS:
                return
            data, self._data = bytes(self._data), bytearray()
        for kind, number, frame in self._splitter.feed(data):
            yield Unit(frame, kind, number)

    def _greeting(self) -> Unit | None:
        have = len(self._data)
        if have < conversation.HEADER.size:
            return None
        (length,) = struct.unpack_from(">H", self._data, conversation.HEADER.size - 4)
        size = conversation.HEADER.size + length + conversation.SEAL_SIZE
        if have < size:
            return None
        unit = Unit(bytes(self._data[:size]), -self._data[5])
        del self._data[:size]
        return unit
