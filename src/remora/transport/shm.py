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
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from remora.wire.memory import address_of

SMALLEST = 1 << 17
IDLE = 10.0  # seconds after which memory that nobody uses is returned to the system
# What has just been given back is still in the cache of the borrower's core, and to write there takes three times as long
# as where it is not. So several segments of a size take turns, until that is as much as such a cache holds.
TURNS, IN_TURN = 4, 1 << 21  # segments, bytes
# What is not larger is copied when the message has been sent, where others see writes in the order in which they are made.
LATER = IN_TURN // 2 if platform.machine() in ("x86_64", "AMD64") else 0
PATIENCE = 1e-3  # seconds to look for the end of a copy without sleeping
_ALIGNED = 64
_STAMP = struct.Struct("<Q")  # at the beginning of a segment: its number
_FILLED = 8  # … and here, how often it was filled
_REFERENCE = struct.Struct("<QIIQII")  # number, process, descriptor, size, how often it is filled then, how many places
_PLACE = struct.Struct("<QQ")

_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once: far quicker than one by one, as they are touched
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_frombuffer = torch.frombuffer
_nothing: Callable[[], torch.UntypedStorage] = partial(torch.UntypedStorage, 0)
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
            mapped = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | _POPULATE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.map: mmap.mmap | None = mapped  # until it is returned to the system
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._filled = ctypes.c_uint64.from_address(self.address + _FILLED)
        _STAMP.pack_into(mapped, 0, self.number)

    def refer(self, buffers: Sequence[memoryview]) -> bytes:
        """What the borrower has to know to find these here, when they are (`fill`)."""
        self.times = (self.times + 1) & 0xFFFFFFFF
        places: list[bytes] = []
        at = _ALIGNED
        for buffer in buffers:
            size = buffer.nbytes
            places.append(_PLACE.pack(at, size))
            at += -(-size // _ALIGNED) * _ALIGNED
        head = _REFERENCE.pack(self.number, os.getpid(), self.descriptor, self.size, self.times, len(places))
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
            raise OSError("the memory was returned to the system: its borrower is gone")
        found = [_PLACE.unpack_from(reference, _REFERENCE.size + number * _PLACE.size) for number in numbers]
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
    number: int = _REFERENCE.unpack_from(message, at)[0]
    return number


def size_of(message: bytes | bytearray | memoryview, at: int) -> int:
    """The size of the segment that a reference in a message is to."""
    size: int = _REFERENCE.unpack_from(message, at)[3]
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


class Borrower:
    """What one worker has of the segments of one other."""

    def __init__(self) -> None:
        self._maps: dict[int, _Mapping] = {}
        self._lock = threading.Lock()
        self.unused: deque[int] = deque()  # numbers of segments to be given back; filled by destructors, so without a lock

    def take(self, reference: bytes | memoryview, now: float) -> tuple[list[torch.UntypedStorage], Filling | None]:
        """The memory that a message refers to, and what to wait for before it is used, if anything. OSError or ValueError if
        it cannot be had."""
        number, process, descriptor, size, times, count = _REFERENCE.unpack_from(reference)
        places = [_PLACE.unpack_from(reference, _REFERENCE.size + index * _PLACE.size) for index in range(count)]
        with self._lock:
            mapping = self._maps.get(number)
            if mapping is None:
                mapping = self._maps[number] = self._open(number, process, descriptor, size)
            mapping.used_at = now
        for at, length in places:
            if at + length > mapping.size:
                raise ValueError("a message refers to memory beyond its segment")
        region: Any = mapping.kind.from_address(mapping.address)
        region.loan = _Loan(mapping, number, self.unused)
        storages = [
            _frombuffer(region, dtype=torch.uint8, offset=at, count=length).untyped_storage() if length else _nothing()
            for at, length in places
        ]
        return storages, None if mapping.filled.value == times else Filling(mapping, times)

    def _open(self, number: int, process: int, descriptor: int, size: int) -> _Mapping:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != size:
                raise ValueError("a segment does not have the size it should have")
            found = _Mapping(opened, size)
        finally:
            os.close(opened)
        if ctypes.c_uint64.from_address(found.address).value != number:
            raise ValueError("a segment is not the one that was lent")
        return found

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while; what tensors still use stays for as long as they do."""
        with self._lock:
            for number in [number for number, mapping in self._maps.items() if now - mapping.used_at > 2 * IDLE]:
                del self._maps[number]

    def close(self) -> None:
        """Unmap everything that no tensor uses."""
        with self._lock:
            self._maps.clear()

    def given_back(self) -> list[int]:
        """The segments that are not used any more; the lender has to be told."""
        numbers: list[int] = []
        while self.unused:
            numbers.append(self.unused.popleft())
        return numbers


class Filling:
    """What a message lent us, while it is still being copied there."""

    __slots__ = ("_mapping", "_times")

    def __init__(self, mapping: _Mapping, times: int) -> None:
        self._mapping = mapping
        self._times = times

    def wait(self, lender_lives: Callable[[], bool]) -> bool:
        """Return when all of it is there: in no time, unless the lender was stopped in the midst of it; False if it died."""
        filled, times = self._mapping.filled, self._times
        patience = time.monotonic() + PATIENCE
        while filled.value != times:
            if not lender_lives():
                return bool(filled.value == times)
            if time.monotonic() < patience:
                os.sched_yield()  # the lender may wait for this very processor,
                select.select((), (), (), 0.0)  # or, on another thread, for the interpreter
            else:
                time.sleep(PATIENCE)
        return True


class _Loan:
    """What a message lent us. It ends with the last tensor that uses it."""

    __slots__ = ("_mapping", "_number", "_unused")

    def __init__(self, mapping: _Mapping, number: int, unused: deque[int]) -> None:
        self._mapping = mapping  # stays for as long
        self._number = number
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self._number)


class _Mapping:
    """A segment in our address space. Not Python's `mmap`: that would keep a descriptor open for each."""

    __slots__ = ("address", "filled", "kind", "size", "used_at")

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = 0
        self.kind: Any = ctypes.c_char * size
        self.used_at = 0.0
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _POPULATE, descriptor, 0)
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
        self.address: int = address
        self.filled = ctypes.c_uint64.from_address(address + _FILLED)  # how often it was
        self.size = size

    def __del__(self, unmap: Callable[[int, int], object] = _munmap) -> None:  # (there may be no globals any more)
        if self.size:
            unmap(self.address, self.size)
