"""Messages as bytes in a stream: a fixed header, a body, raw buffers. Knows no sockets: bytes go in, frames come out.

    header (48 bytes, little endian)
        u64 length of the body      u16 type      u16 flags      u32 number of buffers
        u64 call                    u64 number    u64 acknowledgement    f64 seconds until the deadline (0: none)
    body        a pickle, then one u64 for the length of each buffer
    buffers     the memory of tensors, one after the other

The type is in clear, so that faults can be chosen by type without unpickling anything. `number` is 0 for words that
belong to one connection alone (PING, PONG, ACK) and are not repeated on the next.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any

import torch

from remora.errors import ProtocolError
from remora.wire import cargo, memory, packed

HEADER = struct.Struct("<QHHIQQQd")
HEADER_SIZE = HEADER.size
MAX_BUFFERS = 1 << 24

# Flags.
FAILED = 1  # the body of a response is a failure, not a value
ASYNC = 2  # the function returns a future, and its value is the result
SHARED = 16  # the body ends with where its buffers are, in memory of the sender: see `remora.agent.bulk`
RECORDED = 8  # the body holds the value and what a recording says of it: see `remora.agent.recording`
CARGO = packed.CARGO  # the body ends with where the memory of its tensors on devices is: see `remora.wire.cargo`
REFERENCES = 4  # the body begins with a preamble: see `remora.wire.preamble`

_STREAM_BUFFER = 1 << 18
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_INLINE = 1 << 15  # buffers up to this size in all may wait in the stream buffer and be copied out of it


class Frame:
    """One message as it arrived. `buffers` are the memory of tensors; None if it did not fit into this machine's."""

    __slots__ = (
        "ack", "arrival", "body", "buffers", "call", "filling", "flags", "kind", "landing", "loans", "number", "size",
        "timeout",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        flags: int,
        call: int,
        number: int,
        ack: int,
        timeout: float,
        body: bytes | bytearray | memoryview,
        size: int,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.call = call
        self.number = number
        self.ack = ack
        self.timeout = timeout
        self.body = body
        self.size = size
        self.buffers: Sequence[torch.UntypedStorage] | None = ()
        self.loans: Any = None  # what holds its shared memory, while that is being borrowed
        self.filling: Any = None  # what to wait for before the buffers are used, if they are in shared memory
        self.landing: Any = None  # the device memory that came with it, or the uploads to it: see `remora.wire.cargo`
        self.arrival: Any = None  # what the layer above made of its preamble

    def __repr__(self) -> str:
        return f"<Frame {self.kind:#x} call={self.call} number={self.number} ack={self.ack} {self.size}B>"


class Damaged(ProtocolError):
    """A stream makes no sense from here on. `frames` came before that, whole."""

    def __init__(self, what: str, frames: list[Frame]) -> None:
        super().__init__(what)
        self.frames = frames


def lengths(buffers: Sequence[memoryview]) -> bytes:
    """What is appended to a body that has buffers."""
    return struct.pack(f"<{len(buffers)}Q", *map(len, buffers))


class FrameReader:
    """Turns a stream of bytes into frames: `space()` is where the next bytes go, `received(n)` says that n came."""

    def __init__(self, capacity: int = _STREAM_BUFFER) -> None:
        # Of memory that was never touched the kernel gives us none: most links never need more than a page of it, and to
        # clear 256 KiB for each was most of the cost of a new one.
        self._buffer = mmap.mmap(-1, capacity, **_PRIVATE)
        self._view = memoryview(self._buffer)
        self._capacity = capacity
        self._start = 0
        self._end = 0
        self._frame: Frame | None = None  # whose parts are being filled
        self._body_missing = False  # the part being filled is the body, and buffers follow
        self._count = 0  # how many
        self._parts: list[memoryview] = []  # memory still to be filled, in order
        self._unloading: cargo.Unloading | None = None  # where the next parts come from, if some are for devices
        self._skip = 0  # bytes to throw away: they did not fit into memory
        self._sizes_of: tuple[Frame, int] | None = None  # whose body did not: the sizes of its buffers come next

    def space(self) -> memoryview:
        """Where to put the next bytes; never empty."""
        if self._parts:
            return self._parts[0]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._capacity - self._end < HEADER_SIZE or self._start > self._capacity // 2:
            self._compact()
        return self._view[self._end :]

    @property
    def missing(self) -> int:
        """How many bytes are still to come into `space()` for certain; 0 between frames. Any thread may ask."""
        try:
            return len(self._parts[0]) if self._parts else 0
        except IndexError:  # it has just come
            return 0

    def received(self, n: int) -> list[Frame]:
        """Take note of n bytes in `space()`; the frames they complete."""
        if n >= HEADER_SIZE and not self._end and not self._parts and not self._skip and self._sizes_of is None:
            length, kind, flags, count, call, number, ack, timeout = HEADER.unpack_from(self._buffer)
            if HEADER_SIZE + length == n and not count:  # one small message alone, as most are
                body = bytes(self._view[HEADER_SIZE:n])
                return [Frame(kind, flags, call, number, ack, timeout, body, length)]
        frames: list[Frame] = []
        if self._parts:
            part = self._parts[0]
            if n < len(part):
                self._parts[0] = part[n:]
                return frames
            del self._parts[0]
            self._filled(frames)
        else:
            self._end += n
        if not self._parts:
            self._parse(frames)
        return frames

    def drop(self) -> None:
        """Nothing more will come: let go of a frame that came half."""
        self._parts = []
        self._frame = self._unloading = self._sizes_of = None

    def _compact(self) -> None:
        rest = self._end - self._start
        self._buffer[:rest] = self._buffer[self._start : self._end]
        self._start, self._end = 0, rest

    def _parse(self, frames: list[Frame]) -> None:
        buffer, view, end = self._buffer, self._view, self._end
        start = self._start
        if self._skip or self._sizes_of is not None:
            if not self._pass_over(frames):
                return
            start = self._start
        unpack = HEADER.unpack_from
        while end - start >= HEADER_SIZE:
            length, kind, flags, count, call, number, ack, timeout = unpack(buffer, start)
            if count > MAX_BUFFERS or count * 8 > length:
                raise Damaged(f"a frame announces {count} buffers in a body of {length} bytes", frames)
            body_at = start + HEADER_SIZE
            body_end = body_at + length
            if body_end > end:
                if length + HEADER_SIZE <= self._capacity:
                    break  # it fits: wait until it is all there
                self._start = body_at
                self._fill_body(Frame(kind, flags, call, number, ack, timeout, b"", length), length, count, frames)
                return
            frame = Frame(kind, flags, call, number, ack, timeout, bytes(view[body_at:body_end]), length)
            if count:
                sizes = _sizes(frame.body, count)
                total = sum(sizes)
                frame.size += total
                if body_end + total > end and total <= _INLINE and HEADER_SIZE + length + total <= self._capacity:
                    break
                self._start = body_end
                if not self._take_buffers(frame, sizes, total):
                    return
                start = self._start
            else:
                start = body_end
            frames.append(frame)
        self._start = start

    def _fill_body(self, frame: Frame, length: int, count: int, frames: list[Frame]) -> None:
        try:
            frame.body = bytearray(length)
        except MemoryError:
            self._give_up_body(frame, length, count)
            self._pass_over(frames)
            return
        self._frame = frame
        self._body_missing = count > 0
        self._count = count
        self._parts = [memoryview(frame.body)]
        self._move_present()

    def _take_buffers(self, frame: Frame, sizes: Sequence[int], total: int) -> bool:
        """Copy the buffers out of the stream if they are there; else prepare their memory. True if complete."""
        at = self._start
        if self._end - at >= total and total <= _INLINE:
            view, buffers = self._view, []
            for size in sizes:
                buffers.append(memory.from_bytes(view[at : at + size]))
                at += size
            frame.buffers = buffers
            self._start = at
            return True
        try:
            self._unloading = cargo.unloading(frame.body, sizes) if frame.flags & CARGO else None
            pairs = [memory.allocate(size) for size in sizes] if self._unloading is None else []
        except (RuntimeError, MemoryError):  # torch raises RuntimeError when an allocation fails
            frame.buffers = None
            self._skip = total
            self._start = self._drop()
            return True
        frame.buffers = [storage for storage, _ in pairs]
        self._frame = frame
        self._parts = [view for _, view in pairs if len(view)]
        if self._unloading is not None:
            frame.buffers, frame.landing = self._unloading.buffers, self._unloading.uploads
            self._unload()
        self._body_missing = False
        self._move_present()
        if self._parts:
            return False
        self._frame = None
        return True

    def _move_present(self) -> None:
        """Move what is already in the stream buffer into the parts it belongs to."""
        while self._parts and self._start < self._end:
            part = self._parts[0]
            n = min(len(part), self._end - self._start)
            part[:n] = self._view[self._start : self._start + n]
            self._start += n
            if n < len(part):
                self._parts[0] = part[n:]
                continue
            del self._parts[0]
            if not self._parts and self._unloading is not None:
                self._unload()

    def _unload(self) -> None:
        """What came is on its way to a device: there is room for more, or all is there."""
        assert self._unloading is not None, "something is for a device"
        space = self._unloading.space()
        if space is None:
            self._unloading = None
        else:
            self._parts = [space]

    def _filled(self, frames: list[Frame]) -> None:
        """A part is full; if it was the last one, the frame is complete (or its buffers follow)."""
        if not self._parts and self._unloading is not None:
            self._unload()
        if self._parts:
            return
        frame = self._frame
        assert frame is not None
        self._frame = None
        if self._body_missing:
            self._body_missing = False
            sizes = _sizes(frame.body, self._count)
            total = sum(sizes)
            frame.size += total
            if not self._take_buffers(frame, sizes, total):
                return
        frames.append(frame)

    def _give_up_body(self, frame: Frame, length: int, count: int) -> None:
        """The body does not fit into memory: throw it away, but for the sizes at its end, if buffers follow it."""
        if count * 8 > self._capacity:
            raise ProtocolError(f"a message of {length} bytes with {count} buffers does not fit into memory")
        frame.buffers = None
        self._skip = length - 8 * count
        self._sizes_of = (frame, count)

    def _pass_over(self, frames: list[Frame]) -> bool:
        """Throw away what is to be thrown away. True if frames come next."""
        self._start = self._drop()
        if self._skip:
            return False
        if self._sizes_of is not None:
            frame, count = self._sizes_of
            if self._end - self._start < 8 * count:
                return False
            sizes = struct.unpack_from(f"<{count}Q", self._buffer, self._start)
            self._start += 8 * count
            self._skip = sum(sizes)
            frame.size += self._skip
            self._sizes_of = None
            frames.append(frame)
            self._start = self._drop()
        return not self._skip

    def _drop(self) -> int:
        n = min(self._skip, self._end - self._start)
        self._skip -= n
        return self._start + n


def _sizes(body: bytes | bytearray | memoryview, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", body, len(body) - 8 * count)
