"""Turns messages to bytes of a stream and back: a fixed header, a body, raw buffers. Knows no sockets.

    header (52 bytes, little endian)
        u32 checksum
        u64 length of the body, times GUARD
        u16 type      u16 flags      u32 number of buffers
        u64 call      u64 number     u64 acknowledgement    f64 seconds until the deadline (0: none)
    body        a pickle, then one u64 for the length of each buffer
    buffers     the memory of tensors, one after the other

The type is in clear, so that faults can be chosen by type without unpickling anything. `number` is 0 for control frames that
belong to one connection alone (PING, PONG, ACK) and are not repeated on the next.

**Damage.** The length is checked as soon as the header is here: a reader that waits for bytes that never come is deaf. Sent
is its product with a prime, and what is no multiple of that was damaged on the way (any change within 23 neighbouring bits,
and all but one in 16 million others). The checksum (Adler-32) covers the rest of the header and the body, of a body of more
than WHOLE bytes the first ENDS bytes and the last, with the lengths of all buffers. It is checked before anything of the
message is believed, and finds every one or two flipped bits. Of other damage it misses one in about 200,000 if that is
confined to three or four neighbouring bytes, and less the more bytes are changed. (CRC-32 finds all of that kind, and takes
110 ns longer for a small frame, at each end: 1.5 % of a call.) Not covered: the middle of a large body, and the buffers,
which are the numbers in tensors; to check those would halve the speed of a fast link.

**Memory** grows with what arrives. Nothing is reserved for a body of more than the stream buffer until its first bytes are
here, and then never more than is here already (but for a first step of a megabyte). A buffer gets its memory when the one
before it is full; of what is reserved for it the kernel gives each page when bytes come for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from zlib import adler32

import torch

from remora.devices.staging import Upload
from remora.errors import ProtocolError
from remora.vocabulary.messages import Flag
from remora.wire import device_buffers, raw_memory
from remora.wire.enclosed import NOTHING_ENCLOSED, Enclosed, Missing, Reason

HEADER = struct.Struct("<IQHHIQQQd")
HEADER_SIZE = HEADER.size
GUARD = (1 << 24) - 3  # a prime: what is sent of a length is its product with this
MAX_BUFFERS = 1 << 20
MAX_BYTES = 1 << 44  # in the buffers of a message
WHOLE = 4096  # bytes of a body that are all covered by the checksum: to check them takes a microsecond
ENDS = 512  # bytes at either end of a larger body that are covered

# Flags, as plain numbers: the hot path tests them.
FAILED, ASYNC, REFERENCES = int(Flag.FAILED), int(Flag.ASYNC), int(Flag.REFERENCES)
RECORDED, SHARED, DEVICE_BUFFERS, TRACED = int(Flag.RECORDED), int(Flag.SHARED), int(Flag.DEVICE_BUFFERS), int(Flag.TRACED)

_CHECKED = struct.Struct("<QHHIQQQd")  # the header without the checksum
_CHECK = struct.Struct("<I")
_CHECK_SIZE, _CHECKED_SIZE = _CHECK.size, _CHECKED.size
_STREAM_BUFFER = 1 << 18
_SMALLEST_BUFFER = 2 * (HEADER_SIZE + ENDS)
_FIRST_STEP = 1 << 20  # bytes that a large body is given at first
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_INLINE = 1 << 15  # buffers up to this size in all may wait in the stream buffer and be copied out of it
_DAMAGED = "a frame does not match its checksum: it was damaged in transit"

_pack_checked, _pack_check = _CHECKED.pack, _CHECK.pack

Body = bytes | bytearray | memoryview


def encode(
    kind: int, flags: int, count: int, call: int, number: int, ack: int, timeout: float, length: int, rest: bytes
) -> bytes:
    """Return a message as bytes: `rest` is its body, of that length, and perhaps its buffers behind it."""
    head = _pack_checked(length * GUARD, kind, flags, count, call, number, ack, timeout)
    if length <= WHOLE and not count:
        data = head + rest
        return _pack_check(adler32(data)) + data
    return b"".join((_pack_check(_checksum(adler32(head), rest, length, count)), head, rest))


def _checksum(state: int, data: bytes | bytearray, length: int, count: int) -> int:
    """Return the checksum of a frame: that of its header is `state`, its body the first bytes of `data`."""
    if length <= WHOLE:
        return adler32(data[:length], state)
    tail = _tail(count) if count else ENDS
    return adler32(data[length - tail : length], adler32(data[:ENDS], state))


def _tail(count: int) -> int:
    """Return the number of bytes at the end of a large body that the checksum covers, with the lengths of all buffers."""
    return max(ENDS, 8 * count)


class Frame:
    """One message as it arrived. It does not change: a layer that adds something makes another one (`opened`).

    The type checker holds every field to that. To have the class refuse changes (a frozen dataclass) takes 400 ns longer
    for each message, which is one percent of a call; `tests/wire/test_frames_are_frozen.py` sees that none is changed.
    """

    __slots__ = ("ack", "body", "call", "enclosed", "flags", "kind", "number", "size", "timeout")

    def __init__(
        self,
        kind: int,
        flags: int,
        call: int,
        number: int,
        ack: int,
        timeout: float,
        body: Body,
        size: int,
        enclosed: Enclosed = NOTHING_ENCLOSED,
    ) -> None:
        self.kind: Final = kind
        self.flags: Final = flags
        self.call: Final = call
        self.number: Final = number
        self.ack: Final = ack
        self.timeout: Final = timeout
        self.body: Final = body
        self.size: Final = size  # in bytes, with its buffers
        self.enclosed: Final = enclosed

    def opened(self, body: Body, size: int, enclosed: Enclosed) -> Frame:
        """Return the message with another body, and with what its body referred to."""
        return Frame(self.kind, self.flags, self.call, self.number, self.ack, self.timeout, body, size, enclosed)

    def __repr__(self) -> str:
        return f"<Frame {self.kind:#x} call={self.call} number={self.number} ack={self.ack} {self.size}B>"


class Damaged(ProtocolError):
    """A stream is damaged from here on. `frames` came before that, complete."""

    def __init__(self, what: str, frames: list[Frame]) -> None:
        super().__init__(what)
        self.frames = frames


def lengths(buffers: Sequence[memoryview]) -> bytes:
    """Return the lengths of the buffers, which are appended to the body."""
    return struct.pack(f"<{len(buffers)}Q", *map(len, buffers))


class FrameReader:
    """Turns a stream of bytes into frames: `room` is where the next bytes go, `received(n)` says that n came. (An error ends
    the stream.)"""

    def __init__(self, capacity: int = _STREAM_BUFFER) -> None:
        # Of memory that was never touched the kernel gives us none: most links never need more than a page of it, and to
        # clear 256 KiB for each was most of the cost of a new one.
        self._capacity = max(capacity, _SMALLEST_BUFFER)
        self._buffer = mmap.mmap(-1, self._capacity, **_PRIVATE)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._midway = False  # what comes next is not a header: it belongs to a frame that did not come as a whole
        self._part: memoryview | None = None  # memory of that frame which is to be filled next
        self._more: Callable[[], memoryview | None] | None = None  # what is to be filled after that; None: all is there
        self._partial: _Partial | None = None  # the frame
        self._body: _Body | None = None  # its body, if that is what is being filled, or passed over
        self._skip = 0  # bytes to throw away: they did not fit into memory
        self.room = self._view  # never empty

    @property
    def missing(self) -> int:
        """Return the number of bytes that are still to come into `room` for certain; 0 between frames. For any thread."""
        part, body = self._part, self._body
        if part is None:
            return 0
        return len(part) if body is None else len(part) + body.beyond

    def received(self, n: int) -> list[Frame]:
        """Take n bytes from `room`, and return the frames that they complete."""
        if n >= HEADER_SIZE and not self._end and not self._midway:
            buffer = self._buffer
            check, guarded, kind, flags, count, call, number, ack, timeout = HEADER.unpack_from(buffer)
            length = n - HEADER_SIZE
            if guarded == length * GUARD and not count:  # one message alone, as most are
                if length <= WHOLE:
                    data = buffer[_CHECK_SIZE:n]
                    state, body = adler32(data), data[_CHECKED_SIZE:]
                else:
                    body = buffer[HEADER_SIZE:n]
                    state = _checksum(adler32(buffer[_CHECK_SIZE:HEADER_SIZE]), body, length, 0)
                if state != check:
                    raise Damaged(_DAMAGED, [])
                return [Frame(kind, flags, call, number, ack, timeout, body, length)]
        frames: list[Frame] = []
        part = self._part
        if part is None:
            self._end += n
        elif n < len(part):
            self._part = self.room = part[n:]
            return frames
        else:
            self._part = None
            self._go_on(frames)
        if self._part is None:
            self._parse(frames)
        self.room = self._make_room()
        return frames

    def _make_room(self) -> memoryview:
        if self._part is not None:
            return self._part
        if self._start == self._end:
            self._start = self._end = 0
        elif self._capacity - self._end < HEADER_SIZE or self._start > self._capacity // 2:
            self._compact()
        return self._view[self._end :]

    def drop(self) -> None:
        """Drop an incomplete frame: nothing more will come."""
        self._part = self._more = self._partial = self._body = None
        self.room = self._view

    def _compact(self) -> None:
        rest = self._end - self._start
        self._buffer[:rest] = self._buffer[self._start : self._end]
        self._start, self._end = 0, rest

    def _parse(self, frames: list[Frame]) -> None:
        if self._midway and not self._pass_over(frames):
            return
        buffer, start, end = self._buffer, self._start, self._end
        while end - start >= HEADER_SIZE:
            check, guarded, kind, flags, count, call, number, ack, timeout = HEADER.unpack_from(buffer, start)
            length, rest = divmod(guarded, GUARD)
            if rest:
                raise Damaged("the length of a frame is not valid: it was damaged in transit", frames)
            if count > MAX_BUFFERS or count * 8 > length:
                raise Damaged(f"a frame announces {count} buffers in a body of {length} bytes", frames)
            body_at = start + HEADER_SIZE
            body_end = body_at + length
            if body_end > end and (length + HEADER_SIZE <= self._capacity or end - body_at < ENDS):
                break  # it fits: wait until it is all there; or until there is enough of it to begin with
            if not count and length <= WHOLE:
                data = buffer[start + _CHECK_SIZE : body_end]
                if adler32(data) != check:
                    raise Damaged(_DAMAGED, frames)
                frames.append(Frame(kind, flags, call, number, ack, timeout, data[_CHECKED_SIZE:], length))
                start = body_end
                continue
            head = kind, flags, call, number, ack, timeout
            state = adler32(buffer[start + _CHECK_SIZE : body_at])
            if body_end > end:
                self._start = body_at
                self._midway = True
                self._body = _Body(head, length, count, check, state, buffer[body_at : body_at + ENDS])
                self._more = self._body.more
                self._go_on(frames)
                return
            body = buffer[body_at:body_end]
            if _checksum(state, body, length, count) != check:
                raise Damaged(_DAMAGED, frames)
            if count:
                sizes = _sizes(body, count, frames)
                total = sum(sizes)
                if body_end + total > end and total <= _INLINE and HEADER_SIZE + length + total <= self._capacity:
                    break
                self._start = body_end
                self._begin_buffers(_Partial(head, length, body, sizes), frames)
                self._go_on(frames)
                if self._midway:
                    return
                start = self._start
            else:
                frames.append(Frame(*head, body, length))
                start = body_end
        self._start = start

    # What does not come as a whole.

    def _begin_buffers(self, partial: _Partial, frames: list[Frame]) -> None:
        """Copy the buffers out of the stream if they are there; else have their memory filled."""
        at, total = self._start, sum(partial.sizes)
        if self._end - at >= total and total <= _INLINE:
            view = self._view
            for size in partial.sizes:
                partial.buffers.append(raw_memory.from_bytes(view[at : at + size]))
                at += size
            self._start = at
            self._midway = False
            frames.append(partial.frame())
            return
        self._midway = True
        self._partial, self._more = partial, self._more_buffers
        try:
            unloading = device_buffers.unloading(partial.body, partial.sizes) if partial.head[1] & DEVICE_BUFFERS else None
        except (RuntimeError, MemoryError):
            self._give_up_buffers(partial)
        else:
            if unloading is not None:
                partial.buffers, partial.uploads = unloading.buffers, unloading.uploads
                self._more = unloading.space

    def _more_buffers(self) -> memoryview | None:
        """Return memory for the next buffer, when the last one is full. None when all are there."""
        partial = self._partial
        assert partial is not None
        while partial.fits and len(partial.buffers) < len(partial.sizes):
            size = partial.sizes[len(partial.buffers)]
            try:
                storage, view = raw_memory.allocate(size)
            except (RuntimeError, MemoryError):  # torch raises RuntimeError when an allocation fails
                self._give_up_buffers(partial)
                return None
            partial.buffers.append(storage)
            if size:
                return view
        return None

    def _give_up_buffers(self, partial: _Partial) -> None:
        """Discard the buffers of a message: there is no memory for the next one."""
        self._skip = sum(partial.sizes[len(partial.buffers) :])
        partial.fits = False
        partial.buffers = []

    def _go_on(self, frames: list[Frame]) -> None:
        """Go on with the next part after one was filled, and with what is in the stream buffer already. If nothing of the
        frame is still to come, it is complete."""
        while self._more is not None:
            part = self._part = self._next_part()
            if part is None:
                self._more = None
                self._complete(frames)
                continue
            n = min(len(part), self._end - self._start)
            part[:n] = self._view[self._start : self._start + n]
            self._start += n
            if n < len(part):
                self._part = part[n:] if n else part
                return
            self._part = None

    def _next_part(self) -> memoryview | None:
        assert self._more is not None
        try:
            return self._more()
        except MemoryError:
            body = self._body
            if body is None:
                raise
            if _tail(body.count) > self._capacity:
                raise ProtocolError(
                    f"a message of {body.length} bytes with {body.count} buffers does not fit into memory"
                ) from None
            self._skip = body.length - body.present - _tail(body.count)
            body.give_up()
            return None

    def _complete(self, frames: list[Frame]) -> None:
        """Finish the body, or the buffers, or a frame for which there is no memory: nothing more is to be filled."""
        partial, body = self._partial, self._body
        if body is not None:
            if body.given_up:
                self._pass_over(frames)
                return
            self._body = None
            data = body.checked(frames)
            partial = _Partial(body.head, body.length, data, _sizes(data, body.count, frames))
            if body.count:
                self._begin_buffers(partial, frames)
                return
        assert partial is not None
        self._partial = None
        frames.append(partial.frame())
        self._start = self._drop()
        self._midway = self._skip > 0

    def _pass_over(self, frames: list[Frame]) -> bool:
        """Discard the bytes that are to be skipped. Return True if frames come next."""
        self._start = self._drop()
        if self._skip:
            return False
        body = self._body
        if body is not None:
            tail = _tail(body.count)
            if self._end - self._start < tail:
                return False
            last = self._buffer[self._start : self._start + tail]
            body.check_end(last, frames)
            self._start += tail
            self._body = None
            partial = _Partial(body.head, body.length, b"", _sizes(last, body.count, frames), fits=False)
            self._skip = sum(partial.sizes)
            frames.append(partial.frame())
            self._start = self._drop()
        self._midway = self._skip > 0
        return not self._midway

    def _drop(self) -> int:
        n = min(self._skip, self._end - self._start)
        self._skip -= n
        return self._start + n


_Head = tuple[int, int, int, int, int, float]  # of a frame: type, flags, call, number, acknowledgement, timeout


class _Partial:
    """A frame with buffers, or with a large body, while its buffers arrive."""

    __slots__ = ("body", "buffers", "fits", "head", "size", "sizes", "uploads")

    def __init__(self, head: _Head, length: int, body: Body, sizes: Sequence[int], fits: bool = True) -> None:
        self.head = head
        self.body = body
        self.sizes = sizes  # of its buffers
        self.size = length + sum(sizes)
        self.fits = fits  # there is memory for it
        self.buffers: list[torch.UntypedStorage] = []  # those that are here
        self.uploads: Mapping[int, Upload] = {}

    def frame(self) -> Frame:
        """Return the frame: all of it is here, or passed over."""
        if not self.fits:
            enclosed = Enclosed(Missing(Reason.NO_MEMORY))
        else:
            enclosed = Enclosed(self.buffers, self.uploads) if self.sizes else NOTHING_ENCLOSED
        return Frame(*self.head, self.body, self.size, enclosed)


class _Body:
    """A body that is larger than the stream buffer, while it arrives."""

    __slots__ = ("_check", "_data", "_state", "count", "given_up", "head", "length", "present")

    def __init__(self, head: _Head, length: int, count: int, check: int, state: int, begin: bytes) -> None:
        self.head = head
        self.length = length
        self.count = count
        self.present = 0  # bytes of it that are here, when those that there is memory for are
        self.given_up = False  # there is no memory for it
        self._check = check
        self._state = adler32(begin, state)  # of the header and the first bytes
        self._data = bytearray()

    def more(self) -> memoryview | None:
        """Return memory for more of it: as much as is here already, except for the first step. None when all is here."""
        have = len(self._data)
        if have == self.length:
            return None
        self.present = have
        size = min(self.length, max(2 * have, _FIRST_STEP))
        if size > self.length - _tail(self.count):  # what is at the end is kept together: see `FrameReader._pass_over`
            size = self.length
        # Not `extend`: the reader may have a view of it.
        grown = bytearray(size)
        grown[:have] = self._data
        self._data = grown
        return memoryview(grown)[have:]

    @property
    def beyond(self) -> int:
        """Return the number of bytes that will come beyond those that there is memory for."""
        return self.length - len(self._data)

    def give_up(self) -> None:
        self.given_up = True
        self._data = bytearray()

    def checked(self, frames: list[Frame]) -> bytearray:
        """Return all of it, if the checksum is right. `frames` came before."""
        with memoryview(self._data) as view:
            self.check_end(view[-_tail(self.count) :], frames)
        return self._data

    def check_end(self, last: bytes | memoryview, frames: list[Frame]) -> None:
        if adler32(last, self._state) != self._check:
            raise Damaged(_DAMAGED, frames)


def _sizes(body: bytes | bytearray, count: int, frames: list[Frame]) -> tuple[int, ...]:
    """Return the sizes of the buffers, which are at the end of a body. `frames` came before."""
    sizes = struct.unpack_from(f"<{count}Q", body, len(body) - 8 * count)
    if sum(sizes) > MAX_BYTES:
        raise Damaged(f"a frame announces {sum(sizes)} bytes in {count} buffers", frames)
    return sizes
