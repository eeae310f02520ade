"""Lends memory to processes of one host: the receiver of a message uses it in place, and returns it. No messages.

A worker has an *arena* for each peer that it lends memory to: a file without a name (`memfd`), of which both map all. It
copies tensors into *segments* of the arena and says in its message where they are; the peer makes tensors there without
copying anything (`borrower`). When the last tensor in a segment is gone, the peer returns the segment, and it is lent again:
its pages exist already, which makes the copy several times as fast as a copy into fresh memory. However many segments there
are, each end needs one descriptor. Each large tensor has a segment to itself, so a small tensor does not keep it on loan.

An arena has no name in the file system, so nothing is left behind however a process ends: the borrower opens it by way of
the lender's `/proc/<pid>/fd` (`open_sealed`, which opens nothing else). Its size is sealed, so neither end can make the
other's memory vanish. Memory is taken from the system for each segment when it is made, and returned when it was not used
for a while (the file has holes). An arena belongs to one pair of workers: when the borrower is gone its arena is closed, and
what a borrower still uses stays with it.

The lender trusts nothing in an arena, because the borrower can write to it: what is lent, and where, is in its own tables.
The borrower trusts nothing in a reference before it has checked it against the file (`borrower`).

Where all that is not possible (another host, user or container, or a system without it) nothing is lent, and what does not
fit under the limit is not lent either: messages then go the usual way. So they do while the system has no memory or
descriptors to give; it is asked again after a second.

Threads: a segment is handed from one to the next by atomic operations of dicts and deques; one lock guards the making and
unmaking of segments, and no thread waits for it, since a thread could find it held by itself (a destructor, a handler).
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import platform
import stat
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from remora.errors import SerializationError
from remora.options import FAST_PATHS
from remora.wire.buffer_pool import everywhere
from remora.wire.raw_memory import address_of
from remora.wire.raw_memory import madvise as madvise
from remora.wire.raw_memory import populate as populate

PAGE = mmap.PAGESIZE
IDLE = 10.0  # seconds after which memory that no message uses is returned to the system
PAUSE = 1.0  # seconds until the system is asked again when it had no memory or descriptors to give
# Buffers smaller than this share a segment, which is no larger than that: what is kept of a message keeps little else.
ALONE, TOGETHER = 1 << 16, 1 << 17  # bytes
# What has just been given back is still in the cache of the borrower's core, and to write there takes three times as long
# as where it is not. So several segments of a size take turns, until that is as much as such a cache holds.
TURNS, IN_TURN = 4, 1 << 21  # segments, bytes
# What is not larger is copied when the message has been sent, where others see writes in the order in which they are made.
LATER = IN_TURN // 2 if FAST_PATHS.late_fill and platform.machine() in ("x86_64", "AMD64") else 0
ALIGNED = 64  # bytes: where a buffer begins
HEAD = 64  # bytes at the beginning of a segment: for `LateFill`
_STAMP = struct.Struct("<Q")  # at the beginning of an arena: its number
# Number, process, descriptor and size of the arena; bytes lent; what `LateFill` counts (0: all is there); number of places.
REFERENCE = struct.Struct("<QIIQQII")
# Among the numbers of loans that are given back: the borrower has no descriptors or memory at present,
SHORT = 1 << 60
UNUSABLE = SHORT + 1  # or cannot use what we lend at all.
PLACE = struct.Struct("<QQQ")  # number of the loan, offset in the arena, bytes

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
SEALS = sum(getattr(fcntl, name, 0) for name in _SEALS)
_numbers = itertools.count(int.from_bytes(os.urandom(5), "little")).__next__

try:
    HOST_MEMORY = os.sysconf("SC_PHYS_PAGES") * PAGE  # bytes; no worker lends more, so no arena is larger than twice that
except (AttributeError, ValueError, OSError):
    HOST_MEMORY = 1 << 40

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_memory(descriptor: int, size: int, flags: int, address: int = 0, offset: int = 0) -> int:
    """Map a part of a file, and return its address. (Python's `mmap` would keep a descriptor open for each.)"""
    found = _mmap(address or None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
    return int(found)


_mappings: dict[int, weakref.ref[Mapping]] = {}  # all of this process


class Mapping:
    """An arena in our address space, and its descriptor, for as long as this object lives.

    A forked child has neither: before a fork, the parent makes private copies of what the child should see (`borrower`).
    """

    __slots__ = ("__weakref__", "address", "descriptor", "process", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        self.process = 0
        self.descriptor = descriptor  # ours from here on
        self.size = size
        try:
            self.address = map_memory(descriptor, size, mmap.MAP_SHARED)
        except BaseException:
            os.close(descriptor)
            raise
        self.process = os.getpid()
        madvise(self.address, size, mmap.MADV_DONTFORK)
        _mappings[id(self)] = weakref.ref(self)

    def __del__(
        self,
        unmap: Callable[[int, int], object] = _munmap,
        close: Callable[[int], None] = os.close,
        process: Callable[[], int] = os.getpid,
        mappings: dict[int, Any] = _mappings,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:  # (there may be no globals any more)
        if not is_finalizing() and self.process == process():  # a child may have other things there, and under that number
            mappings.pop(id(self), None)
            unmap(self.address, self.size)
            close(self.descriptor)


def _forget_mappings() -> None:
    """Close the parent's descriptors, in a forked child."""
    for reference in list(_mappings.values()):
        mapping = reference()
        if mapping is not None:
            os.close(mapping.descriptor)
    _mappings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_mappings)


def seal(descriptor: int, size: int) -> None:
    """Give a new memfd its size, for good."""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


@lru_cache(maxsize=1)
def _memory_device() -> int:
    """Return the device number that all memfds of this kernel have, and no file with a name. (Memfds of huge pages have
    another: a fault there ends the process when there are no huge pages left.)"""
    probe = os.memfd_create("remora-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(probe).st_dev
    finally:
        os.close(probe)


def open_sealed(process: int, descriptor: int, size: int) -> int:
    """Open memory of another process of this user that has this size for good. Raises ValueError if the descriptor is
    anything else. The check comes before anything is opened: `O_PATH` names a file without opening it, so no device, pipe or
    file of the user's notices."""
    named = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(named)
        if not stat.S_ISREG(found.st_mode) or found.st_dev != _memory_device() or found.st_uid != os.geteuid():
            raise ValueError(f"descriptor {descriptor} of process {process} is not memory that this user shares (memfd)")
        opened = os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(named)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("its size is not sealed, so its owner could take it away while it is used")
        actual = os.fstat(opened).st_size
        if actual != size:
            raise ValueError(f"it has {actual} bytes, and not the {size} that were named")
    except BaseException:
        os.close(opened)
        raise
    return opened


def has_holes(descriptor: int, start: int, end: int) -> bool:
    """Return True if a part of a memfd has no memory yet: a process that touches it would have to allocate it."""
    return os.lseek(descriptor, start, os.SEEK_HOLE) < end


def identity() -> str:
    """Return what two processes must have in common to share memory; empty if this one cannot."""
    try:
        return _identity() if _shares() else ""
    except (OSError, AttributeError, ValueError):
        return ""


def _identity() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


def _shares() -> bool:
    """Return True if all that sharing needs works here."""
    probe = os.memfd_create("remora-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        seal(probe, 2 * PAGE)
        os.pwrite(probe, b"x", 0)
        opened = open_sealed(os.getpid(), probe, 2 * PAGE)
        try:
            return not has_holes(opened, 0, PAGE) and has_holes(opened, 0, 2 * PAGE)
        finally:
            os.close(opened)
    finally:
        os.close(probe)


class Segment:
    """Some memory of an arena."""

    __slots__ = ("offset", "size", "times", "used_at")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.times = 0  # how often it was filled late
        self.used_at = 0.0


class Arena:
    """The memory that a worker lends to one peer."""

    __slots__ = ("_gaps", "free", "lent", "map", "number", "total")

    def __init__(self, size: int) -> None:
        self.number = int.from_bytes(os.urandom(8), "little")  # the borrower knows the arena by it: no other has it
        self.total = 0  # bytes of its segments; changes under the lock of the `Lender`, like the gaps between them
        self._gaps = [(PAGE, size - PAGE)]  # offset, bytes; in order
        self.free: dict[int, deque[Segment]] = {}  # by size; the first to come back is the first
        # By the number of the loan, which is never used again. The thread that takes an entry out of it frees the segment.
        self.lent: dict[int, tuple[Segment, Placement]] = {}
        descriptor = os.memfd_create("remora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            seal(descriptor, size)
            os.posix_fallocate(descriptor, 0, PAGE)
        except BaseException:
            os.close(descriptor)
            raise
        # Until it is closed. A thread that uses it keeps it for that time, also if it is closed meanwhile.
        self.map: Mapping | None = Mapping(descriptor, size)
        ctypes.c_uint64.from_address(self.map.address).value = self.number

    def make(self, size: int) -> Segment | None:
        """Make a segment; None if there is no gap for it. OSError if the system has no memory."""
        mapping = self.map
        for index, (offset, room) in enumerate(self._gaps):
            if room >= size and mapping is not None:
                # Take it from the system now: else a write would end the process when memory is short.
                os.posix_fallocate(mapping.descriptor, offset, size)
                if not populate(mapping.address + offset, size):  # an older system
                    ctypes.memset(mapping.address + offset, 0, size)  # the borrower takes what was never touched for a hole
                self._gaps[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self.total += size
                return Segment(offset, size)
        return None

    def unmake(self, segment: Segment) -> None:
        """Return the memory of a segment to the system: a hole of the file. The borrower sees the same hole."""
        mapping = self.map
        if mapping is not None:
            madvise(mapping.address + segment.offset, segment.size, mmap.MADV_REMOVE)
        self.total -= segment.size
        gaps: list[tuple[int, int]] = []
        for offset, room in sorted((*self._gaps, (segment.offset, segment.size))):
            if gaps and sum(gaps[-1]) == offset:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + room)
            else:
                gaps.append((offset, room))
        self._gaps = gaps

    def claim(self, size: int, at_least: int) -> Segment | None:
        """Take the free segment of this size that came back first, if there are at least so many."""
        waiting = self.free.get(size)
        if not waiting or len(waiting) < at_least:
            return None
        try:
            return waiting.popleft()
        except IndexError:  # another thread had the last one
            return None

    def claim_larger(self, size: int) -> Segment | None:
        """Take the smallest free segment that fits and is not far too large."""
        for each in sorted(self.free.keys()):
            if size <= each <= 4 * size:
                found = self.claim(each, 1)
                if found is not None:
                    return found
        return None

    def put_back(self, segment: Segment, now: float) -> None:
        """Make a segment free to be lent again."""
        segment.used_at = now
        waiting = self.free.get(segment.size)
        if waiting is None:
            waiting = self.free.setdefault(segment.size, deque())
        waiting.append(segment)

    def end(self, loan: int, now: float) -> None:
        """End a loan: the borrower has returned it, and no thread copies there any more."""
        segment, _ = self.lent.pop(loan, (None, None))
        if segment is not None:
            self.put_back(segment, now)

    def close(self) -> None:
        """Return it to the system, when no thread fills it any more. A borrower that uses it keeps it for itself."""
        self.map = None
        self.lent.clear()  # (which is a cycle)


class Placement:
    """The places of the buffers of one message: each segment is a loan of its own, with a number."""

    __slots__ = ("_late", "_mapping", "_times", "arena", "bytes", "filling", "loans", "places", "returned")

    def __init__(self, arena: Arena, mapping: Mapping, loans: list[tuple[int, Segment]]) -> None:
        self.arena = arena
        self._mapping = mapping  # kept for as long as something may be copied there, also if the arena is closed meanwhile
        self.loans = loans
        self.bytes = 0
        self.places: list[tuple[int, int, int]] = []  # of the buffers: number of the loan, offset in the arena, bytes
        self.filling = True  # something is still to be copied there: it is not lent again
        self.returned: list[int] = []  # loans that the borrower has given back all the same
        self._times = 0  # what is said of a copy that is made later
        self._late: LateFill | None = None
        for number, segment in loans:
            self.bytes += segment.size
            arena.lent[number] = segment, self

    def fill_later(self) -> None:
        """Note that the message is sent first, and the buffers are copied afterwards."""
        first = self.loans[0][1]
        self._times = first.times = first.times % 0xFFFFFFFF + 1

    def refer(self) -> bytes:
        """Return the reference by which the borrower finds the buffers, once they are copied (`fill`)."""
        mapping, places = self._mapping, self.places
        found = REFERENCE.pack(
            self.arena.number, mapping.process, mapping.descriptor, mapping.size, self.bytes, self._times, len(places)
        )
        for place in places:
            found += PLACE.pack(*place)
        return found

    def fill(self, buffers: Sequence[memoryview], but: range = range(0)) -> None:
        """Copy the buffers to their places, without those in `but`."""
        if self.arena.map is None:  # its borrower is gone
            return
        start = self._mapping.address
        for number, buffer in enumerate(buffers):
            _, offset, size = self.places[number]
            if size and number not in but:
                ctypes.memmove(start + offset, address_of(buffer), size)  # without the interpreter lock

    def tell(self) -> None:
        """Mark all of it as filled: the borrower may use it."""
        if self._times:
            self._later().tell()

    @property
    def told(self) -> bool:
        """Return True if the borrower may use it already, and change what is in it."""
        return self._times > 0 and self._later().told

    def _later(self) -> LateFill:
        if self._late is None:
            self._late = LateFill(self._mapping, self.loans[0][1].offset, self._times)
        return self._late

    def memory(self, numbers: range) -> list[torch.Tensor]:
        """Return the memory of some of the buffers, for the caller to fill."""
        if self.arena.map is None:
            raise SerializationError("the worker that the memory was lent to is gone")
        region: Any = everywhere.from_address(self._mapping.address)
        region.kept = self._mapping
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():  # (whatever the program does on this thread)
            return [
                torch.frombuffer(region, dtype=torch.uint8, offset=offset, count=size)
                for _, offset, size in (self.places[number] for number in numbers)
            ]


class LateFill:
    """Marks the end of a copy that began after its message was sent: copying a few hundred kilobytes takes as long as the
    message takes to its receiver. A count at the head of a segment says how often it was filled; it is written last. (Other
    processors see writes in the order in which they are made: x86 only.)"""

    __slots__ = ("_count", "mapping", "times")

    def __init__(self, mapping: Mapping, offset: int, times: int) -> None:
        self.mapping = mapping  # stays for as long
        self.times = times
        self._count = ctypes.c_uint64.from_address(mapping.address + offset)

    def tell(self) -> None:
        """Mark all of it as filled."""
        self._count.value = self.times

    @property
    def told(self) -> bool:
        """Return True if all of it is filled."""
        return self._count.value == self.times


@lru_cache(maxsize=1024)
def size_class(size: int) -> tuple[int, int]:
    """Return a size that messages of about the same size share, and how many segments of it take turns. The size is a number
    of whole pages, and at most an eighth more than is needed, or a page."""
    step = max(1 << max(size.bit_length() - 4, 0), PAGE)
    rounded = -(-size // step) * step
    return rounded, max(min(IN_TURN // rounded, TURNS), 1)


def lent_bytes(message: bytes | bytearray | memoryview, at: int) -> int:
    """Return the number of bytes that a reference in a message of ours has lent."""
    found: int = REFERENCE.unpack_from(message, at)[4]
    return found


def places_in(reference: bytes | bytearray | memoryview) -> list[tuple[int, int, int]]:
    """Return the places of a message's buffers: number of the loan, offset, bytes."""
    size = len(reference)
    if size < REFERENCE.size or size != REFERENCE.size + REFERENCE.unpack_from(reference)[-1] * PLACE.size:
        raise ValueError("a reference to shared memory has not the length it should have")
    return list(PLACE.iter_unpack(reference[REFERENCE.size :]))


def loans_in(reference: bytes | bytearray | memoryview) -> list[int]:
    """Return the numbers of the loans of a message; none if the reference is not valid."""
    try:
        return list(dict.fromkeys(number for number, _, _ in places_in(reference)))
    except ValueError:
        return []


def shared_out(buffers: Sequence[memoryview]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the sizes of the segments that these need, and for each buffer the index of its segment and the offset in
    it."""
    if len(buffers) == 1:  # (most have one)
        return [HEAD + buffers[0].nbytes], [(0, HEAD)]
    sizes: list[int] = []
    places: list[tuple[int, int]] = []
    shared = -1  # the segment that small ones share
    for buffer in buffers:
        room = -(-buffer.nbytes // ALIGNED) * ALIGNED
        if room < ALONE and shared >= 0 and sizes[shared] + room <= TOGETHER:
            places.append((shared, sizes[shared]))
            sizes[shared] += room
            continue
        if room < ALONE:
            shared = len(sizes)
        places.append((len(sizes), HEAD))
        sizes.append(HEAD + room)
    return sizes, places


class Lender:
    """The memory that one worker lends to its peers."""

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, HOST_MEMORY)  # bytes, lent and free together
        self._arenas: dict[Hashable, Arena] = {}  # by borrower
        self._making = threading.Lock()  # guards: the making and unmaking of arenas and segments; no thread waits for it
        self._again_at = 0.0  # when to ask the system for memory again

    def lend(self, buffers: Sequence[memoryview], borrower: Hashable, now: float) -> Placement | None:
        """Return memory for the buffers of a message to `borrower`; None if there is none. The caller calls `filled` when it
        has copied them."""
        sizes, shares = shared_out(buffers)
        if sum(sizes) > self.limit:
            return None
        arena = self._arenas.get(borrower) or self._open(borrower, now)
        mapping = None if arena is None else arena.map
        if arena is None or mapping is None:
            return None
        loans: list[tuple[int, Segment]] = []
        try:
            for needed in sizes:
                size, turns = size_class(needed)
                segment = arena.claim(size, turns) or self._segment(arena, size, now)
                if segment is None:
                    self._put_back(arena, loans, now)
                    return None
                loans.append((_numbers(), segment))
        except BaseException:
            self._put_back(arena, loans, now)
            raise
        placement = Placement(arena, mapping, loans)
        for (index, at), buffer in zip(shares, buffers, strict=True):
            number, segment = loans[index]
            placement.places.append((number, segment.offset + at, buffer.nbytes))
        return placement

    def _put_back(self, arena: Arena, loans: list[tuple[int, Segment]], now: float) -> None:
        for _, segment in loans:
            arena.put_back(segment, now)

    def _open(self, borrower: Hashable, now: float) -> Arena | None:
        if now < self._again_at or not self._making.acquire(False):
            return None
        try:
            if borrower in self._arenas:  # another thread was quicker
                return self._arenas[borrower]
            made = Arena(max(-(-2 * self.limit // PAGE), 2) * PAGE)  # twice the limit: there is a gap for everything
        except OSError:
            self._again_at = now + PAUSE
            return None
        else:
            self._arenas[borrower] = made
            return made
        finally:
            self._making.release()

    def _segment(self, arena: Arena, size: int, now: float) -> Segment | None:
        """Return a segment of this size though not enough of them take turns: a new one, an early one, or a larger one."""
        return self._make(arena, size, now) or arena.claim(size, 1) or arena.claim_larger(size)

    def _make(self, arena: Arena, size: int, now: float) -> Segment | None:
        if now < self._again_at or not self._making.acquire(False):
            return None
        try:
            if arena.free.get(size):
                if self._total() + size > self.limit:
                    return None  # nothing has to go for the sake of taking turns
            else:
                self._make_room(size)
                if self._total() + size > self.limit:
                    return None
            return arena.make(size)
        except OSError:
            self._again_at = now + PAUSE
            return None
        finally:
            self._making.release()

    def _total(self) -> int:
        return sum(arena.total for arena in list(self._arenas.values()))

    def _make_room(self, size: int) -> None:
        """Return the oldest free segments to the system, until there is room for `size` bytes."""
        while self._total() + size > self.limit:
            oldest = min(self._free(), key=lambda free: free[1][0].used_at, default=None)
            if oldest is None or not self._unmake(*oldest):
                return

    def _free(self) -> list[tuple[Arena, deque[Segment]]]:
        """Return the free segments, by arena and size."""
        arenas = list(self._arenas.values())
        return [(arena, waiting) for arena in arenas for waiting in list(arena.free.values()) if waiting]

    def _unmake(self, arena: Arena, waiting: deque[Segment]) -> bool:
        try:
            segment = waiting.popleft()
        except IndexError:  # it has just been lent
            return False
        arena.unmake(segment)
        return True

    def filled(self, placement: Placement, now: float) -> None:
        """Note that no thread here writes to it any more: it may be lent again, as soon as the borrower returns it."""
        placement.filling = False  # first: either we see what was returned, or `take_back` that nothing is being copied
        if placement.returned:
            for loan in list(placement.returned):
                placement.arena.end(loan, now)

    def retract(self, placement: Placement, now: float) -> None:
        """Take back memory of a message that is not sent. No thread here writes to it any more."""
        placement.filling = False
        for number, _ in placement.loans:
            placement.arena.end(number, now)

    def take_back(self, loans: Iterable[int], borrower: Hashable, now: float) -> None:
        """Take back loans that the borrower does not use any more."""
        arena = self._arenas.get(borrower)
        if arena is None:
            return
        for loan in loans:
            _, placement = arena.lent.get(loan, (None, None))
            if placement is not None:
                if loan not in placement.returned:
                    placement.returned.append(loan)
                if not placement.filling:
                    arena.end(loan, now)

    def forget(self, borrower: Hashable) -> None:
        """Remove a borrower that is gone, or cannot return loans any more: its memory is not lent to others."""
        arena = self._arenas.pop(borrower, None)
        if arena is not None:
            arena.close()

    def trim(self, now: float) -> None:
        """Return to the system what has not been used for a while."""
        if not self._making.acquire(False):
            return
        try:
            for arena, waiting in self._free():
                while waiting and now - waiting[0].used_at > IDLE and self._unmake(arena, waiting):
                    pass
            for borrower, arena in list(self._arenas.items()):
                if not arena.total:
                    self.forget(borrower)
        finally:
            self._making.release()

    def close(self) -> None:
        """Return everything."""
        for borrower in list(self._arenas):
            self.forget(borrower)

    def abandon(self) -> None:
        """Drop the parent's memory, in a forked child."""
        self.close()

    def counts(self) -> tuple[int, int]:
        """Return the bytes in all, and the number of lent segments."""
        return self._total(), sum(len(arena.lent) for arena in list(self._arenas.values()))

    def lent_bytes(self) -> int:
        """Return the bytes that borrowers have. The rest is kept for the next messages, for `IDLE` seconds."""
        arenas = list(self._arenas.values())
        return sum(segment.size for arena in arenas for segment, _ in list(arena.lent.values()))

    def lent_to(self, borrower: Hashable) -> int:
        """Return the bytes that one borrower has."""
        arena = self._arenas.get(borrower)
        return 0 if arena is None else sum(segment.size for segment, _ in list(arena.lent.values()))
