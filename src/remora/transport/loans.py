"""Memory that others have lent us (`shm`): used in place, and given back segment by segment, with the last tensor in each.

Lent memory is shared with its lender, so it may not be shared with anybody else. When this process is about to fork, every
segment with a tensor in it becomes ours: its pages are mapped anew at the same address, as a private copy. From then on the
tensors lie in memory like any other, of which parent and child have a copy each; the segments go back to their lenders. So
to fork takes the time to copy what is on loan. All else of an arena is not there in a child (MADV_DONTFORK): a child made
without Python's knowledge that looks at a borrowed tensor ends with a fault, and does not see what it should not.

Why not map all of it as a private copy from the beginning? Each page that a receiver changes in place would be copied when
it is first touched; and all of them would have to be thrown away before the segment is used again.

A message may come before its memory is filled: whoever unpacks it waits for that (`Filling`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from remora.transport import shm
from remora.transport.shm import HEAD, PAGE, REFERENCE, LateFill, Mapping, madvise
from remora.wire.warm import everywhere

PATIENCE = 1e-3  # seconds to look for the end of a copy without sleeping

_PRIVATE: int = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0) | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10  # MAP_FIXED: in the place of what is mapped there

_frombuffer = torch.frombuffer
_nothing: Callable[[], torch.UntypedStorage] = partial(torch.UntypedStorage, 0)
_arenas: dict[int, weakref.ref[_Arena]] = {}  # all that this process has borrowed from


class Borrower:
    """What one worker has of the memory of one other. For any number of threads, without a lock."""

    def __init__(self) -> None:
        self._arena: _Arena | None = None
        self.unused: deque[int] = deque()  # numbers of segments to be given back; filled by destructors, so without a lock

    def take(self, reference: bytes | memoryview, now: float) -> tuple[list[torch.UntypedStorage], Filling | None]:
        """The memory that a message refers to, and what to wait for before it is used, if anything. OSError or ValueError if
        it cannot be had; then none of it is on loan."""
        number, process, descriptor, size, _, times, _ = REFERENCE.unpack_from(reference)
        places = list(shm.places_in(reference))
        for _, at, length in places:
            if at < PAGE + HEAD or at + length > size:
                raise ValueError("a message refers to memory beyond its arena")
        arena = self._arena
        if arena is None or arena.number != number or arena.forked:
            arena = self._arena = _Arena(number, process, descriptor, size)
        arena.used_at = now
        filling = Filling(arena.mapping, places[0][1] - HEAD, times) if times else None
        loans: dict[int, Any] = {}  # what exports the memory of each segment, and holds the loan of it
        for segment, (start, end) in _extents(places).items():
            loans[segment] = region = everywhere.from_address(arena.mapping.address)
            region.loan = _Loan(arena, segment, start, end, self.unused)
            arena.begin(region.loan, filling)
        storages = [
            _frombuffer(loans[segment], dtype=torch.uint8, offset=at, count=length).untyped_storage()
            if length
            else _nothing()
            for segment, at, length in places
        ]
        return storages, None if filling is None or filling.told else filling

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while."""
        arena = self._arena
        if arena is not None and not arena.active and now - arena.used_at > 2 * shm.IDLE:
            self._arena = None

    def close(self) -> None:
        """Unmap everything that no tensor uses."""
        self._arena = None

    def given_back(self) -> list[int]:
        """The segments that are not used any more; the lender has to be told."""
        numbers: list[int] = []
        try:
            while self.unused:
                numbers.append(self.unused.popleft())
        except IndexError:  # another thread had the last one
            pass
        return numbers


class Filling:
    """What a message lent us, while it is still being copied there."""

    __slots__ = ("_late", "_mapping")

    def __init__(self, mapping: Mapping, offset: int, times: int) -> None:
        self._mapping = mapping
        self._late = LateFill(mapping, offset, times)

    @property
    def told(self) -> bool:
        """Whether all of it is there. Not in a child that was forked before it was: the memory is its parent's."""
        return self._mapping.process == os.getpid() and self._late.told

    def wait(self, lender_lives: Callable[[], bool]) -> bool:
        """Return when all of it is there: in no time, unless the lender was stopped in the midst of it; False if it died."""
        patience = time.monotonic() + PATIENCE
        while not self.told:
            if self._mapping.process != os.getpid():
                return False
            if not lender_lives():
                return self.told
            if time.monotonic() < patience:
                os.sched_yield()  # the lender may wait for this very processor,
                select.select((), (), (), 0.0)  # or, on another thread, for the interpreter
            else:
                time.sleep(PATIENCE)
        return True


def _extents(places: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """For each segment where the pages are that a message uses of it, from and to."""
    found: dict[int, tuple[int, int]] = {}
    for segment, at, length in places:
        start, end = found.get(segment, ((at - HEAD) // PAGE * PAGE, 0))
        found[segment] = start, max(end, -(-(at + length) // PAGE) * PAGE)
    return found


class _Loan:
    """The token of a segment that a message lent us. It is dropped with the last tensor that uses it."""

    __slots__ = ("arena", "end", "number", "start", "unused")

    def __init__(self, arena: _Arena, number: int, start: int, end: int, unused: deque[int]) -> None:
        self.arena = arena  # stays for as long
        self.number = number
        self.start = start
        self.end = end
        self.unused = unused

    def __del__(self, advise: Callable[[int, int, int], int] = madvise, unneeded: int = mmap.MADV_DONTNEED) -> None:
        # On whatever thread, at whatever moment: no lock. What takes the number out of `active` gives the segment back.
        if self.arena.active.pop(self.number, None) is not None:
            self.unused.append(self.number)
        else:  # this process forked since, and the pages are its own
            advise(self.arena.mapping.address + self.start, self.end - self.start, unneeded)


class _Arena:
    """An arena of a lender, as this process has it."""

    __slots__ = ("__weakref__", "_known", "active", "forked", "mapping", "number", "used_at")

    def __init__(self, number: int, process: int, descriptor: int, size: int) -> None:
        self.number = number
        self.used_at = 0.0
        # Segments on loan, by number: its pages (from, to), where to note that it goes back, and whether it is filled.
        self.active: dict[int, tuple[int, int, deque[int], Filling | None]] = {}
        self.forked = False  # some of it is not shared with the lender any more: it is of no use for new messages
        self._known: dict[int, int] = {}  # pages that we have had mapped: from, to
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != size:
                raise ValueError("an arena does not have the size it should have")
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & shm.SEALS != shm.SEALS:
                raise ValueError("an arena could lose its memory while we use it")
            if os.pread(opened, 8, 0) != number.to_bytes(8, "little"):
                raise ValueError("an arena is not the one that was lent")
        except BaseException:
            os.close(opened)
            raise
        self.mapping = Mapping(opened, size)
        _arenas[id(self)] = weakref.ref(self)

    def __del__(self, arenas: dict[int, Any] = _arenas) -> None:
        arenas.pop(id(self), None)

    def begin(self, loan: _Loan, filling: Filling | None) -> None:
        """A message has lent us a segment."""
        if self._known.get(loan.start, 0) < loan.end:
            self._known[loan.start] = loan.end
            shm.populate(self.mapping.address + loan.start, loan.end - loan.start)
        self.active[loan.number] = (loan.start, loan.end, loan.unused, filling)

    def part(self) -> None:
        """We are about to fork: what is on loan becomes ours, and goes back to its lender."""
        for number, (start, end, unused, filling) in list(self.active.items()):
            if filling is not None and not filling.told:
                continue  # no program has it yet; and whoever waits for it has to see the lender's writes
            self.forked = True  # before anything goes back: what is lent there next is not seen by way of this mapping
            if self.active.pop(number, None) is not None and self._make_private(start, end - start):
                unused.append(number)

    def _make_private(self, offset: int, size: int) -> bool:
        """Replace shared pages by copies of our own, at the same address. A thread that writes there meanwhile does so to
        the one or the other: what it wrote to a shared page is copied, and there is no time between the two.

        False if we cannot be sure that all was copied. Then the lender does not get it back: what was not copied is still
        seen by way of its page. If the pages cannot be replaced at all, they stay shared, and a child does not have them."""
        address = self.mapping.address + offset
        try:
            shm.map_memory(self.mapping.descriptor, size, _PRIVATE | _FIXED, address, offset)
        except OSError:
            return False
        return shm.populate(address, size) or ctypes.get_errno() == errno.EINVAL  # (older systems: MAP_POPULATE has done it)


def _before_fork() -> None:
    for reference in list(_arenas.values()):
        arena = reference()
        if arena is not None:
            arena.part()


if hasattr(os, "register_at_fork"):
    # In a child nothing is on loan. (`shm` sees to the descriptors.)
    os.register_at_fork(before=_before_fork, after_in_child=_arenas.clear)
