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

Threads: a segment is handed from one to the next by atomic operations of dicts and deques; one thread at a time makes and
unmakes segments, and no other waits for it, since a thread could wait for itself (a destructor, a handler).
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from remora.transport.shm.arena import Arena, Placement, Segment
from remora.transport.shm.loan_reference import shared_out, size_class
from remora.transport.shm.mapping import HOST_MEMORY, PAGE

IDLE = 10.0  # seconds after which memory that no message uses is returned to the system
PAUSE = 1.0  # seconds until the system is asked again when it had no memory or descriptors to give
T = TypeVar("T")
_numbers = itertools.count(int.from_bytes(os.urandom(5), "little")).__next__


def _used_at(waiting: deque[Segment]) -> float:
    """Return when the first of these came back; long after now if there is none any more, because it has just been lent."""
    try:
        return waiting[0].used_at
    except IndexError:
        return float("inf")


class Lender:
    """The memory that one worker lends to its peers."""

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, HOST_MEMORY)  # bytes, lent and free together
        self._arenas: dict[Hashable, Arena] = {}  # by borrower
        # Guards: the making and unmaking of arenas and segments. One entry while no thread has the turn. To delete it is one
        # instruction and no call, so no exception of a signal handler strikes between taking the turn and knowing it.
        self._turn: dict[int, bool] = {0: True}
        self._again_at = 0.0  # when to ask the system for memory again

    def lend(self, buffers: Sequence[memoryview], borrower: Hashable, now: float) -> Placement | None:
        """Return memory for the buffers of a message to `borrower`; None if there is none. The caller calls `filled` when it
        has copied them."""
        sizes, shares = shared_out(buffers)
        if sum(sizes) > self.limit:
            return None
        arena = self._arenas.get(borrower) or self._ask_system(partial(self._open, borrower), now)
        mapping = None if arena is None else arena.map
        if arena is None or mapping is None:
            return None
        loans: list[tuple[int, Segment]] = []  # (what is dropped of it is free again)
        for needed in sizes:
            size, turns = size_class(needed)
            segment = arena.claim(size, turns) or self._segment(arena, size, now)
            if segment is None:
                for _, found in loans:  # (a strike in their destructor would lose them)
                    arena.put_back(found, now)
                return None
            loans.append((_numbers(), segment))
        placement = Placement(arena, mapping, loans)
        for (index, at), buffer in zip(shares, buffers, strict=True):
            number, segment = loans[index]
            placement.places.append((number, segment.offset + at, buffer.nbytes))
        try:
            placement.begin()
        except BaseException:
            self.retract(placement, now)
            raise
        return placement

    def _alone(self, step: Callable[[], T | None]) -> T | None:
        """Do what one thread at a time does. None if another thread is about it, or a frame of this one."""
        try:
            del self._turn[0]
        except KeyError:
            return None
        try:
            return step()
        finally:
            self._turn[0] = True

    def _ask_system(self, make: Callable[[], T | None], now: float) -> T | None:
        if now < self._again_at:
            return None
        try:
            return self._alone(make)
        except OSError:
            self._again_at = now + PAUSE
            return None

    def _open(self, borrower: Hashable) -> Arena:
        found = self._arenas.get(borrower)
        if found is None:  # else another thread was quicker
            # Twice the limit: there is a gap for everything.
            found = self._arenas[borrower] = Arena(max(-(-2 * self.limit // PAGE), 2) * PAGE)
        return found  # (not looked up: another thread may have removed it again, as the borrower is gone)

    def _segment(self, arena: Arena, size: int, now: float) -> Segment | None:
        """Return a segment of this size though not enough of them take turns: a new one, an early one, or a larger one."""
        made = self._ask_system(partial(self._make, arena, size), now)
        return made or arena.claim(size, 1) or arena.claim_larger(size)

    def _make(self, arena: Arena, size: int) -> Segment | None:
        if not arena.free.get(size):  # (nothing has to go for the sake of taking turns)
            self._make_room(size)
        return None if self._total() + size > self.limit else arena.make(size)

    def _total(self) -> int:
        return sum(arena.total for arena in list(self._arenas.values()))

    def _make_room(self, size: int) -> None:
        """Return the oldest free segments to the system, until there is room for `size` bytes."""
        while self._total() + size > self.limit:
            oldest = min(self._free(), key=lambda free: _used_at(free[1]), default=None)
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
        self._alone(partial(self._trim, now))

    def _trim(self, now: float) -> None:
        for arena, waiting in self._free():
            while now - _used_at(waiting) > IDLE and self._unmake(arena, waiting):
                pass
        for borrower, arena in list(self._arenas.items()):
            if not arena.total:
                self.forget(borrower)

    def close(self) -> None:
        """Return everything; in a forked child, drop the parent's memory."""
        for borrower in list(self._arenas):
            self.forget(borrower)

    def counts(self) -> tuple[int, int]:
        """Return the bytes in all, and the number of lent segments."""
        return self._total(), sum(len(arena.lent) for arena in list(self._arenas.values()))

    def check(self) -> None:
        """Assert what must hold while no thread lends: each segment is free or lent."""
        for arena in list(self._arenas.values()):
            free = sum(segment.size for waiting in list(arena.free.values()) for segment in list(waiting))
            assert arena.total == free + arena.lent_bytes, f"of {arena.total} bytes {free} are free, {arena.lent_bytes} lent"

    def lent_bytes(self) -> int:
        """Return the bytes that borrowers have. The rest is kept for the next messages, for `IDLE` seconds."""
        return sum(map(self.lent_to, list(self._arenas)))

    def lent_to(self, borrower: Hashable) -> int:
        """Return the bytes that one borrower has."""
        arena = self._arenas.get(borrower)
        return 0 if arena is None else arena.lent_bytes
