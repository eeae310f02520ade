"""Maps memory that peers lend (`lender`), uses it in place, and returns each segment when its last tensor is gone.

Lent memory is shared with its lender, so no other process may share it. When this process is about to fork,
every segment with a tensor in it becomes private: its pages are mapped anew at the same address, as a private copy. From
then on the tensors lie in ordinary memory, of which parent and child have a copy each, and the segments go back to
their lenders. So a fork takes the time to copy what is on loan. A child does not have the rest of an arena
(MADV_DONTFORK): a child made without Python's knowledge that looks at a borrowed tensor ends with a fault, and does not
see what it should not.

Why not map all of it as a private copy from the beginning? Each page that a receiver changes in place would be copied
when it is first touched; and all of them would have to be thrown away before the segment is used again.

A message may come before its memory is filled: the thread that unpacks it waits for that (`Filling`). So does what takes
long: to see that a segment which is used for the first time has memory, and to have its pages mapped.

What a message says is checked once, from bytes of our own: whose file it is (the process at the other end of the link, or
the process that the lender's record names), that it is sealed memory of the size and number that are named and no larger
than twice the memory of this host, that all places are in it, aligned and apart, and that nothing is lent twice. A loan with
a hole in it is refused: the receiver would allocate what the lender did not. Then nothing that the lender does can make our
memory vanish; but it can write to what it has lent at any time, so the bytes in a borrowed tensor are as good as the lender.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch

from remora.transport.shm import lender
from remora.transport.shm.arena import LateFill
from remora.transport.shm.loan_reference import ALIGNED, HEAD, REFERENCE, places_in
from remora.transport.shm.mapping import HOST_MEMORY, PAGE, Mapping, map_memory
from remora.transport.shm.sealed_memory import has_holes, open_sealed
from remora.wire.buffer_pool import everywhere
from remora.wire.raw_memory import madvise, populate

SPIN_LIMIT = 1e-3  # seconds to look for the end of a copy without sleeping
ATTEMPTS = 100  # to make memory private before a fork, if a strike interrupts each of them
FILL_LIMIT = 30.0  # seconds for a copy of a megabyte at most; a lender that was stopped may go on till then

_PRIVATE: int = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0) | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10  # MAP_FIXED: in the place of what is mapped there

_FIRST = PAGE + HEAD  # where the first buffer of an arena can be
_BYTE = torch.uint8
_frombuffer = torch.frombuffer
_nothing: Callable[[], torch.UntypedStorage] = partial(torch.UntypedStorage, 0)
_arenas: dict[int, weakref.ref[_Arena]] = {}  # all that this process has borrowed from
_parting = threading.RLock()  # guards: what is made private before a fork. A thread that forks meanwhile waits for it


class Hole(ValueError):
    """A lent segment has pages without memory."""


class Borrower:
    """The memory that one worker has borrowed from one peer. For any number of threads, without a lock."""

    def __init__(self) -> None:
        self._arena: _Arena | None = None
        self.process = 0  # of the lender; 0: not known, then the first process that it names; -1: no visible process
        # What is to be given back: loans without tensors, and numbers. Filled at any moment, so without a lock.
        self.unused: deque[Loan | int] = deque()

    def take(
        self, reference: bytes | memoryview, now: float, loans: dict[int, Any] | None = None
    ) -> tuple[list[torch.UntypedStorage], Filling | None]:
        """Return the memory that a message refers to, and a `Filling` to wait for before it is used, if it is not filled
        yet. OSError or ValueError if it cannot be mapped; then none of it is on loan. `loans`: what an attempt that an
        exception interrupted has borrowed."""
        places = places_in(reference)
        number, process, descriptor, size, _, times, _ = REFERENCE.unpack_from(reference)
        spans = _spans(places, size)
        loans = {} if loans is None else loans  # what exports the memory of each segment, and holds the token of its loan
        begun = next(iter(loans.values()), None)
        # (A fork since then may have made its memory private.)
        arena = self._arena_of(number, process, descriptor, size) if begun is None else begun.token.arena
        arena.used_at = now
        again = {loan for loan in spans if loan in loans and arena.has(loan)} if loans else ()
        for loan, (start, _) in spans.items():
            if loan not in again and (loan in arena.active or arena.last.get(start) in arena.active):
                raise ValueError(f"the segment at {start} is lent a second time, while tensors still use it")
        unmapped = [(start, end) for start, end in spans.values() if arena.mapped.get(start, 0) < end]
        filling = Filling(arena, places[0][1] - HEAD, times, unmapped) if times or unmapped else None
        for loan, (start, end) in spans.items():
            if loan in again:
                loans[loan].filling = filling
                before = arena.active.get(loan)
                if before is not None:
                    before.filling = filling
                continue
            region = everywhere.from_address(arena.mapping.address)
            region.filling = filling  # stays for as long: a fork before the next attempt has to see that it is not filled
            region.token = _Token(arena, loan)
            loans[loan] = region  # before it is on loan: to be dropped after that would give it back
            arena.last[start] = loan
            # From here on a fork makes all of it private.
            arena.active[loan] = Loan(region.token, arena, loan, start, end, filling)
        storages = [
            _frombuffer(loans[loan], dtype=_BYTE, offset=at, count=length).untyped_storage() if length else _nothing()
            for loan, at, length in places
        ]
        return storages, None if filling is None or filling.ready else filling

    def _arena_of(self, number: int, process: int, descriptor: int, size: int) -> _Arena:
        arena = self._arena
        if arena is not None and arena.number == number:
            if arena.mapping.size != size:
                raise ValueError(f"a reference gives {size} bytes to an arena of {arena.mapping.size}")
            if not arena.forked:
                return arena
        elif arena is not None and arena.active:
            raise ValueError("a reference names a second arena, while the first is in use")
        if self.process and process != self.process:
            raise ValueError(f"it is memory of process {process}, which is not the lender's")
        arena = _Arena(number, process, descriptor, size, self.unused)
        self._arena, self.process = arena, process
        return arena

    def borrowed_bytes(self) -> int:
        """Return the number of bytes of the lender's memory that tensors here use."""
        arena = self._arena
        loans = [] if arena is None else list(arena.active.values())
        return sum(loan.end - loan.start for loan in loans if loan() is not None)

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while."""
        arena = self._arena
        if arena is not None and not arena.active and now - arena.used_at > 2 * lender.IDLE:
            self._arena = None

    def close(self) -> None:
        """Unmap everything that no tensor uses."""
        self._arena = None

    def ended(self, unused: Iterable[Loan | int]) -> list[int]:
        """End these loans, and return the numbers for the lender, who may lend the memory again as soon as it has them.
        To do it again does no harm."""
        return [each if isinstance(each, int) else each.ended() for each in unused]

    def note_returned(self, unused: Iterable[Loan | int]) -> None:
        """Note that these are in a message to the lender. A thread that was struck before this says some of them a second
        time: numbers are never used again, so that does no harm."""
        for each in unused:
            try:
                self.unused.remove(each)
            except ValueError:
                pass  # another thread has said it, too


class Filling(LateFill):
    """The memory of a message that the lender still fills, or that is not mapped yet."""

    __slots__ = ("__weakref__", "_arena", "_limit", "_unmapped")

    def __init__(self, arena: _Arena, offset: int, times: int, unmapped: list[tuple[int, int]]) -> None:
        super().__init__(arena.mapping, offset, times)
        self._arena = arena
        self._unmapped = unmapped  # segments that are used for the first time: from, to
        self._limit = time.monotonic() + FILL_LIMIT

    @property
    def told(self) -> bool:
        """Return True if the lender has marked all of it as filled."""
        return not self.times or super().told

    @property
    def ready(self) -> bool:
        """Return True if it can be used."""
        return self.told and not self._unmapped

    @property
    def overdue(self) -> bool:
        """Return True if the lender has had more time than a copy can take."""
        return time.monotonic() > self._limit

    def wait(self, worthwhile: Callable[[], bool]) -> bool:
        """Wait until all of it can be used: almost no time, unless the lender was stopped in the midst of it. Return False
        if it is overdue, or not worthwhile any more. `Hole` if there is no memory in it."""
        spin_until = time.monotonic() + SPIN_LIMIT
        while self.mapping.process == os.getpid():  # a child does not wait for what is its parent's: it has not got it
            if self.told:
                self._map()
                return True
            if not worthwhile() or self.overdue:
                return self.told and self.wait(worthwhile)
            if time.monotonic() < spin_until:
                _make_way()
            else:
                time.sleep(SPIN_LIMIT)
        return False

    def wait_briefly(self) -> bool:
        """Return True if all of it is filled now, or within a millisecond, as it is unless a thread was stopped."""
        if self.told:
            return True
        spin_until = time.monotonic() + SPIN_LIMIT
        while time.monotonic() < spin_until:
            _make_way()
            if self.told:
                return True
        return False

    def _map(self) -> None:
        for start, end in list(self._unmapped):
            self._arena.map(start, end)
        self._unmapped.clear()


def _make_way() -> None:
    os.sched_yield()  # the lender may wait for this very processor,
    select.select((), (), (), 0.0)  # or, on another thread, for the interpreter


class _Token:
    """Lives as long as a tensor lies in the segment of a loan."""

    __slots__ = ("__weakref__", "_loan", "arena")

    def __init__(self, arena: _Arena, loan: int) -> None:
        self.arena = arena  # stays for as long
        self._loan = loan

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.arena.free(self._loan)


class Loan(weakref.ref[_Token]):
    """A segment on loan, as far as a message uses it. It refers to the token, and appends itself to `unused` when that is
    gone. A destructor could be struck by an exception of a signal handler, on its first line; this is one step."""

    __slots__ = ("_arena", "_filling", "_number", "end", "remapped", "start")

    def __new__(cls, token: _Token, arena: _Arena, *about: object) -> Self:
        return super().__new__(cls, token, arena.unused.append)

    def __init__(self, _: _Token, arena: _Arena, number: int, start: int, end: int, filling: Filling | None) -> None:
        self._arena = weakref.ref(arena)
        self._number = number
        self.start = start
        self.end = end
        self.remapped: list[int | None] = []  # its address, when its pages have been replaced by private ones
        self.filling = filling

    @property
    def filling(self) -> Filling | None:
        """Return what tells if it is filled, for as long as something waits for that. (It keeps the arena, and a loan that
        is to be given back to a peer which is gone must not.)"""
        return None if self._filling is None else self._filling()

    @filling.setter
    def filling(self, filling: Filling | None) -> None:
        self._filling = None if filling is None else weakref.ref(filling)

    def ended(self) -> int:
        """Take it out of what is on loan, and return its number."""
        arena = self._arena()
        if arena is not None:
            arena.active.pop(self._number, None)
        return self._number


def _spans(places: list[tuple[int, int, int]], size: int) -> dict[int, tuple[int, int]]:
    """Return, by loan, the first and last page that a message uses of its segment. ValueError if they are not valid."""
    if not places:
        raise ValueError("a message refers to no memory")
    if not PAGE < size <= 2 * HOST_MEMORY:
        raise ValueError(f"an arena of {size} bytes is more than this host has memory for")
    found: dict[int, tuple[int, int]] = {}
    for loan, at, length in places:
        start, end = (at - HEAD) // PAGE * PAGE, -(-(at + length) // PAGE) * PAGE
        if at < _FIRST or end > size:
            raise ValueError("a message refers to memory beyond its arena")
        if at % ALIGNED:
            raise ValueError("a message refers to memory that is not aligned")
        if loan in found:
            start, end = min(start, found[loan][0]), max(end, found[loan][1])
        found[loan] = start, end
    if len(places) > 1:
        _check_apart([(at, at + length) for _, at, length in places if length])
        _check_apart(list(found.values()))
    return found


def _check_apart(spans: list[tuple[int, int]]) -> None:
    spans.sort()
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise ValueError("two buffers of a message are in the same memory")


class _Arena:
    """An arena of a lender, mapped in this process."""

    __slots__ = (
        "__weakref__", "_private", "active", "forked", "last", "mapped", "mapping", "number", "unused", "used_at",
    )  # fmt: skip

    def __init__(self, number: int, process: int, descriptor: int, size: int, unused: deque[Loan | int]) -> None:
        self.number = number
        self.unused = unused
        self.used_at = 0.0
        self.active: dict[int, Loan] = {}  # what is on loan, by number
        self.last: dict[int, int] = {}  # the last loan of the segment that begins at an offset
        self._private: dict[int, Loan] = {}  # what was when we forked, and is in use
        self.forked = False  # some of it is not shared with the lender any more: it is of no use for new messages
        self.mapped: dict[int, int] = {}  # pages that had memory when we had them mapped: from, to
        opened = open_sealed(process, descriptor, size)
        try:
            if os.pread(opened, 8, 0) != number.to_bytes(8, "little"):
                raise ValueError("an arena does not have the number that was named")
        except BaseException:
            os.close(opened)
            raise
        self.mapping = Mapping(opened, size)
        _arenas[id(self)] = weakref.ref(self)

    def __del__(
        self, arenas: dict[int, Any] = _arenas, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not is_finalizing():
            arenas.pop(id(self), None)

    def map(self, start: int, end: int) -> None:
        """Map pages at once, if the lender has put memory there. (It can remove that again: then touching it allocates, at
        most what the lender had allocated.)"""
        if has_holes(self.mapping.descriptor, start, end):
            raise Hole(f"there is no memory in a part of the {end - start} bytes that are lent")
        populate(self.mapping.address + start, end - start)
        self.mapped[start] = end

    def has(self, number: int) -> bool:
        """Return True if a segment is on loan, or was when we forked."""
        return number in self.active or number in self._private

    def part(self) -> None:
        """Make what is on loan private, and return it to its lender. Called before a fork."""
        for number, loan in list(self.active.items()):
            if number in self._private:
                continue  # it was tried before, or is being tried: to map it again would lose what was written since
            filling = loan.filling
            if filling is not None and not filling.ready:
                continue  # no program has it yet; and the thread that waits for it has to see the lender's writes
            self.forked = True  # before anything goes back: what is lent there next is not seen by way of this mapping
            self._private[number] = loan  # before we look if its last tensor is gone: its token looks for it here then
            try:
                if loan() is None:
                    self._private.pop(number, None)
                elif self._make_private(loan):
                    self.active.pop(number, None)
                    self.unused.append(number)
            except BaseException:
                if number in self.active:
                    self._private.pop(number, None)  # it is tried again at once
                else:
                    self.unused.append(number)  # (to say it twice does no harm)
                raise

    def free(self, number: int) -> None:
        """Free private memory whose last tensor is gone. A destructor calls this: it takes no lock."""
        loan = self._private.pop(number, None)
        if loan is not None:
            madvise(self.mapping.address + loan.start, loan.end - loan.start, mmap.MADV_DONTNEED)

    def _make_private(self, loan: Loan) -> bool:
        """Replace shared pages by private copies, at the same address. A thread that writes there meanwhile writes to the
        one or the other: the copy includes what it wrote to a shared page, and there is no time between the two.

        Return False if some pages may not have been copied. Then the lender does not get them back, because this process
        still sees the shared page. If the pages cannot be replaced at all, they stay shared, and a child does not have
        them."""
        address, size = self.mapping.address + loan.start, loan.end - loan.start
        try:
            if address not in loan.remapped:  # else we were struck after that: again would lose what was written since
                map_memory(self.mapping.descriptor, size, _PRIVATE | _FIXED, address, loan.start, loan.remapped)
        except OSError:
            return False
        return populate(address, size) or ctypes.get_errno() == errno.EINVAL  # (older systems: MAP_POPULATE has done it)


def _before_fork() -> None:
    struck: BaseException | None = None
    with _parting:
        for arena in [found for reference in list(_arenas.values()) if (found := reference()) is not None]:
            for _ in range(ATTEMPTS):
                try:
                    arena.part()
                    break
                except BaseException as error:  # Ctrl-C, and the like: the fork goes on, and the child needs all of it
                    struck = error
    if struck is not None:
        raise struck


def _in_child() -> None:
    """Forget what the parent has on loan. (`mapping` closes the descriptors.)"""
    global _parting
    _arenas.clear()
    _parting = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
