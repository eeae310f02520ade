"""Memory that processes of one host share: lent with a message, used in place by its receiver, and given back. No messages.

The lender copies tensors into a *segment* and says in its message where they are; the borrower maps the segment and makes
tensors of it without copying anything. When the last of those is gone the segment can be given back, and be lent again: its
pages are there already, which makes the copy several times as fast as one into fresh memory.

A segment has no name in the file system, so nothing is left behind however a process ends: the borrower opens it by way of
the lender's `/proc/<pid>/fd`. Where that is not possible (another host, user or container, or a system without it) nothing
is lent, and what does not fit under the limit is not lent either: messages then go the usual way.

To copy a few hundred kilobytes takes as long as the message takes to its receiver. So a small segment may be filled when the
message about it has been sent. How often it was filled is written in it, and whoever wants to use it waits for that.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import struct
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from remora.errors import SerializationError
from remora.wire.memory import address_of

SMALLEST = 1 << 17
IDLE = 10.0  # seconds after which memory that nobody uses is returned to the system
# What has just been given back is still in the cache of the borrower's core, and to write there takes three times as long
# as where it is not. So several segments of a size take turns, until that is as much as such a cache holds.
TURNS, IN_TURN = 4, 1 << 21  # segments, bytes
# What is not larger is copied when the message has been sent, where others see writes in the order in which they are made.
LATER = IN_TURN // 2 if platform.machine() in ("x86_64", "AMD64") else 0
_ALIGNED = 64
_STAMP = struct.Struct("<Q")  # at the beginning of a segment: its number
FILLED = 8  # … and here, how often it was filled
REFERENCE = struct.Struct("<QIIQII")  # number, process, descriptor, size, how often it is filled then, how many places
PLACE = struct.Struct("<QQ")

POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once: far quicker than one by one, as they are touched
_numbers = itertools.count(int.from_bytes(os.urandom(5), "little")).__next__


def identity() -> str:
    """What two processes must have in common to share memory; empty if this one cannot."""
    try:
        probe = os.memfd_create("remora-probe")
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{probe}", os.O_RDWR))
        finally:
            os.close(probe)
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except (OSError, AttributeError):
        return ""


class Segment:
    """Some memory of the lender."""

    __slots__ = (
        "_filled", "address", "descriptor", "filling", "map", "number", "returned", "size", "times", "used_at",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.number = _numbers()
        self.size = size
        self.times = 0
        self.filling = False  # it was lent, and not everything is in it yet,
        self.returned = False  # but its borrower does not want it any more
        self.used_at = 0.0
        self.descriptor = os.memfd_create(f"remora-{self.number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # or a write would end the process when memory is short
            mapped = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | POPULATE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.map: mmap.mmap | None = mapped  # until it is returned to the system
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._filled = ctypes.c_uint64.from_address(self.address + FILLED)
        _STAMP.pack_into(mapped, 0, self.number)

    def refer(self, buffers: Sequence[memoryview]) -> bytes:
        """What the borrower has to know to find these here, when they are (`fill`)."""
        self.times = (self.times + 1) & 0xFFFFFFFF
        places: list[bytes] = []
        at = _ALIGNED
        for buffer in buffers:
            size = buffer.nbytes
            places.append(PLACE.pack(at, size))
            at += -(-size // _ALIGNED) * _ALIGNED
        head = REFERENCE.pack(self.number, os.getpid(), self.descriptor, self.size, self.times, len(places))
        return head + b"".join(places)

    def fill(self, buffers: Sequence[memoryview], but: range = range(0)) -> None:
        """Copy the buffers here, but for some."""
        kept = self.map  # whoever fills it keeps it, also if it is returned to the system meanwhile: its borrower is dead
        if kept is None:
            return
        at = self.address + _ALIGNED
        for number, buffer in enumerate(buffers):
            size = buffer.nbytes
            if size and number not in but:
                ctypes.memmove(at, address_of(buffer), size)  # without the interpreter lock
            at += -(-size // _ALIGNED) * _ALIGNED

    def tell(self) -> None:
        """All of it is here: the borrower may use it."""
        kept = self.map
        if kept is not None:
            self._filled.value = self.times

    @property
    def told(self) -> bool:
        """Whether the borrower may use it, and change what is in it."""
        kept = self.map
        return kept is None or self._filled.value == self.times

    def places(self, reference: bytes, numbers: range) -> list[torch.Tensor]:
        """The memory that some of the buffers have here, for whoever asks to fill it."""
        region: Any = (ctypes.c_char * self.size).from_address(self.address)
        region.kept = self.map
        if region.kept is None:
            raise SerializationError("the worker that the memory was lent to is gone")
        found = [PLACE.unpack_from(reference, REFERENCE.size + number * PLACE.size) for number in numbers]
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():  # (whatever the program does on this thread)
            return [torch.frombuffer(region, dtype=torch.uint8, offset=at, count=size) for at, size in found]

    def close(self) -> None:
        """Return it to the system, when nobody here fills it any more. A borrower that uses it keeps it for itself."""
        self.map = None
        os.close(self.descriptor)


def _rounded(size: int) -> int:
    """A size that messages of about the same size have in common: at most an eighth more."""
    step = max(1 << max(size.bit_length() - 4, 0), SMALLEST)
    return -(-size // step) * step


def number_of(message: bytes | bytearray | memoryview, at: int) -> int:
    """The number of the segment that a reference in a message is to."""
    number: int = REFERENCE.unpack_from(message, at)[0]
    return number


def size_of(message: bytes | bytearray | memoryview, at: int) -> int:
    """The size of the segment that a reference in a message is to."""
    size: int = REFERENCE.unpack_from(message, at)[3]
    return size


def room_for(buffers: Iterable[memoryview]) -> int:
    """The size that a segment needs to take these."""
    room = _ALIGNED
    for buffer in buffers:
        room += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
    return room


class Lender:
    """The segments of one worker."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes, lent and free together
        self._lock = threading.Lock()
        self._total = 0
        self._free: list[Segment] = []
        self._lent: dict[int, tuple[Segment, Hashable]] = {}

    def lend(self, size: int, borrower: Hashable) -> Segment | None:
        """A segment of at least this size for a message to `borrower`; None if there is none to be had. Whoever asks for it
        says when it is `filled`."""
        with self._lock:
            segment = self._find(size)
            if segment is None:
                segment = self._make(_rounded(size))
            if segment is not None:
                segment.filling, segment.returned = True, False
                self._lent[segment.number] = (segment, borrower)
        return segment

    def filled(self, segment: Segment, now: float) -> None:
        """Nobody here writes to it any more: it may be lent again, as soon as it is given back."""
        with self._lock:
            segment.filling = False
            if segment.returned and self._lent.pop(segment.number, None) is not None:
                self._free_again(segment, now)

    def _find(self, size: int) -> Segment | None:
        """The smallest that fits, and of those the one that came back first; None if another one should be made."""
        found: Segment | None = None
        fitting = 0
        most = max(4 * size, SMALLEST)
        for segment in self._free:
            if size <= segment.size <= most:
                fitting += 1
                if found is None or segment.size < found.size:
                    found = segment
        if found is None:
            return None
        turns = min(IN_TURN // found.size, TURNS)
        if fitting < turns and self._total + found.size <= self.limit:
            return None
        self._free.remove(found)
        return found

    def _make(self, size: int) -> Segment | None:
        while self._free and self._total + size > self.limit:
            self._discard(self._free.pop(0))
        if self._total + size > self.limit:
            return None
        try:
            segment = Segment(size)
        except OSError:
            self.limit = self._total  # the system has no more to give: do not ask again
            return None
        self._total += size
        return segment

    def take_back(self, numbers: Iterable[int], borrower: Hashable, now: float) -> None:
        """The borrower does not use these any more."""
        with self._lock:
            for number in numbers:
                segment, to = self._lent.get(number, (None, None))
                if segment is not None and (to is borrower or to == borrower):
                    if segment.filling:
                        segment.returned = True
                    else:
                        del self._lent[number]
                        self._free_again(segment, now)

    def _free_again(self, segment: Segment, now: float) -> None:
        segment.used_at = now
        self._free.append(segment)

    def forget(self, borrower: Hashable) -> None:
        """The borrower is gone, or cannot say any more what it uses: what it has is not lent to others."""
        with self._lock:
            for number, (segment, to) in list(self._lent.items()):
                if to == borrower:
                    del self._lent[number]
                    self._discard(segment)

    def trim(self, now: float) -> None:
        """Return to the system what has not been used for a while."""
        with self._lock:
            for segment in [each for each in self._free if now - each.used_at > IDLE]:
                self._free.remove(segment)
                self._discard(segment)

    def _discard(self, segment: Segment) -> None:
        self._total -= segment.size
        segment.close()

    def close(self) -> None:
        """Return everything."""
        with self._lock:
            for segment in (*self._free, *(segment for segment, _ in self._lent.values())):
                self._discard(segment)
            self._free.clear()
            self._lent.clear()

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's, without asking anybody."""
        for segment in (*self._free, *(segment for segment, _ in self._lent.values())):
            segment.close()

    def counts(self) -> tuple[int, int]:
        """(bytes in all, segments lent)."""
        with self._lock:
            return self._total, len(self._lent)
