"""An arena: the memory that a worker lends to one peer, its segments, and the placement of a message in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remora.errors import SerializationError
from remora.options import FAST_PATHS
from remora.transport.shm.loan_reference import IN_TURN, PLACE, REFERENCE
from remora.transport.shm.mapping import PAGE, Mapping
from remora.transport.shm.sealed_memory import seal
from remora.wire.buffer_pool import everywhere
from remora.wire.raw_memory import address_of, madvise, populate

# What is not larger is copied when the message has been sent, where others see writes in the order in which they are made.
LATER = IN_TURN // 2 if FAST_PATHS.late_fill and platform.machine() in ("x86_64", "AMD64") else 0


class Segment:
    """Some memory of an arena. A thread that has taken it out of one table can be struck by an exception of a signal handler
    before it puts it into another; so a segment that is dropped becomes free."""

    __slots__ = ("arena", "offset", "size", "times", "used_at")

    def __init__(self, offset: int, size: int, times: int = 0) -> None:
        # The arena that it belongs to. Not a cycle: else a lender that is dropped would come back at each collection. A
        # segment that belongs to none is dropped for good.
        self.arena: weakref.ref[Arena] | None = None
        self.offset = offset
        self.size = size
        self.times = times  # how often it was filled late
        self.used_at = 0.0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        arena = None if self.arena is None else self.arena()
        if arena is not None and arena.map is not None and not is_finalizing():
            again = Segment(self.offset, self.size, self.times)
            again.arena = self.arena
            arena.put_back(again, self.used_at)


class Arena:
    """The memory that a worker lends to one peer."""

    __slots__ = ("__weakref__", "_gaps", "free", "lent", "map", "number", "total")

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

    @property
    def lent_bytes(self) -> int:
        return sum(segment.size for segment, _ in list(self.lent.values()))

    def make(self, size: int) -> Segment | None:
        """Make a segment; None if there is no gap for it. OSError if the system has no memory."""
        mapping = self.map
        for index, (offset, room) in enumerate(self._gaps):
            if room >= size and mapping is not None:
                # Take it from the system now: else a write would end the process when memory is short.
                os.posix_fallocate(mapping.descriptor, offset, size)
                if not populate(mapping.address + offset, size):  # an older system
                    ctypes.memset(mapping.address + offset, 0, size)  # the borrower takes what was never touched for a hole
                LateFill(mapping, offset, 0).tell()  # (a thread that was struck in `unmake` may have left what was there)
                gaps = [(offset + size, room - size)] if room > size else []
                segment, here = Segment(offset, size), weakref.ref(self)
                # From here on nothing is called, so no exception strikes.
                self._gaps[index : index + 1] = gaps
                self.total += size
                segment.arena = here
                return segment
        return None

    def unmake(self, segment: Segment) -> None:
        """Return the memory of a segment to the system: a hole of the file. The borrower sees the same hole."""
        gaps: list[tuple[int, int]] = []
        for offset, room in sorted((*self._gaps, (segment.offset, segment.size))):
            if gaps and sum(gaps[-1]) == offset:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + room)
            else:
                gaps.append((offset, room))
        self._gaps = gaps
        self.total -= segment.size
        segment.arena = None
        mapping = self.map
        if mapping is not None:
            madvise(mapping.address + segment.offset, segment.size, mmap.MADV_REMOVE)

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
        if self.map is None:
            return
        segment.used_at = now
        self.free.setdefault(segment.size, deque()).append(segment)

    def end(self, loan: int, now: float) -> None:
        """End a loan: the borrower has returned it, and no thread copies there any more."""
        segment, _ = self.lent.pop(loan, (None, None))
        if segment is not None:
            self.put_back(segment, now)

    def close(self) -> None:
        """Return it to the system, when no thread fills it any more. A borrower that uses it keeps it for itself."""
        self.map = None
        self.lent.clear()  # (which is a cycle)
        self.free.clear()


class Placement:
    """The places of the buffers of one message: each segment is a loan of its own, with a number."""

    __slots__ = ("_late", "_mapping", "arena", "bytes", "filling", "loans", "places", "returned")

    def __init__(self, arena: Arena, mapping: Mapping, loans: list[tuple[int, Segment]]) -> None:
        self.arena = arena
        self._mapping = mapping  # kept for as long as something may be copied there, also if the arena is closed meanwhile
        self.loans = loans
        self.bytes = sum(segment.size for _, segment in loans)
        self.places: list[tuple[int, int, int]] = []  # of the buffers: number of the loan, offset in the arena, bytes
        self.filling = True  # something is still to be copied there: it is not lent again
        self.returned: list[int] = []  # loans that the borrower has given back all the same
        self._late: LateFill | None = None  # of a copy that is made later

    def begin(self) -> None:
        """Enter the loans: from here on the borrower can return them."""
        for number, segment in self.loans:
            self.arena.lent[number] = segment, self

    def fill_later(self) -> None:
        """Note that the message is sent first, and the buffers are copied afterwards."""
        first = self.loans[0][1]
        first.times = first.times % 0xFFFFFFFF + 1
        self._late = LateFill(self._mapping, first.offset, first.times)

    def refer(self) -> bytes:
        """Return the reference by which the borrower finds the buffers, once they are copied (`fill`)."""
        mapping, places = self._mapping, self.places
        times = 0 if self._late is None else self._late.times
        found = REFERENCE.pack(
            self.arena.number, mapping.process, mapping.descriptor, mapping.size, self.bytes, times, len(places)
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
        if self._late is not None:
            self._late.tell()

    @property
    def told(self) -> bool:
        """Return True if the borrower may use it already, and change what is in it."""
        return self._late is not None and self._late.told

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
