"""The owner's side: memory of devices that is held until its receiver has copied it. Sends nothing."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from remora.transport.cuda_ipc import driver as cuda
from remora.transport.cuda_ipc.deferred_free import leave
from remora.transport.cuda_ipc.flags import EVERY, Tally, Word
from remora.transport.cuda_ipc.reference import SLOTS, Place, Reference, Region

log = logging.getLogger("remora")

LIMIT = 1 << 34  # bytes held for one receiver

_numbers = itertools.count(int.from_bytes(os.urandom(5), "little")).__next__


@dataclass(slots=True)
class _Held:
    """One export that has not been copied yet: which use of which slot, its size, and what must stay."""

    slot: int
    use: int
    size: int
    storages: list[torch.UntypedStorage]
    awaits: tuple[Word, ...] = (Word.READY, Word.COPIED)  # no slot is used again before all that was to be written is


class Exporter:
    """What one worker has exported for one other: at most `limit` bytes and `count` exports at a time."""

    def __init__(self, limit: int = LIMIT, count: int = SLOTS) -> None:
        self._lock = threading.RLock()  # guards: the table of exports
        self._limit = limit
        self._free = list(range(min(count, SLOTS)))
        self._uses = [0] * SLOTS
        self._held: dict[int, _Held] = {}
        self._size = 0
        self._tally: Tally | None = None
        self._has_complained = False

    def export(self, regions: Sequence[Region]) -> bytes | None:
        """A reference to memory of one device as it is when the current stream gets here; to be fetched by one receiver.

        The memory is held, and must not be written to, until it has been copied. None: there is no room, or this memory
        cannot be shared, so it has to go another way.
        """
        size = sum(length for _, _, length in regions)
        with self._lock:
            self._collect()
            if not self._free or self._size + size > self._limit:
                return None
            try:
                return self._export(regions, size)
            except OSError as error:
                self._complain(error)
                return None

    def _export(self, regions: Sequence[Region], size: int) -> bytes:
        driver, device = cuda.load(), regions[0][0].device
        with driver.on(device):
            places = [_place(driver, region) for region in regions]
            tally = self._tally = self._tally or Tally.create()
            tally.attach(driver, device)
            slot = self._free[-1]
            use = (self._uses[slot] + 1) % EVERY
            name = driver.uuid(device)
            self._promise(driver, driver.stream(device), tally, slot, use)
        number = _numbers()
        self._free.pop()
        self._uses[slot] = use
        self._held[number] = _Held(slot, use, size, [storage for storage, _, _ in regions])
        self._size += size
        return Reference(number, slot, use, tally.name, name, places).pack()

    def _promise(self, driver: cuda.Driver, stream: int, tally: Tally, slot: int, use: int) -> None:
        """Have it said when the stream gets here; at once, if it is here already: a device that two processes give work to
        goes from one to the other, and that takes longer than the work."""
        if driver.is_idle(stream):
            tally.mark(slot, Word.READY, use)
        else:
            driver.write(stream, tally.place(slot, Word.READY), use)

    def _complain(self, error: OSError) -> None:
        level = logging.DEBUG if self._has_complained else logging.WARNING
        log.log(level, "memory of a device cannot be shared, and goes by way of the host: %s", error)
        self._has_complained = True

    def collect(self) -> None:
        """Let go of what has been copied."""
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        for number, held in list(self._held.items()):
            assert self._tally is not None, "something was exported"
            if all(self._tally.has_reached(held.slot, word, held.use) for word in held.awaits):
                del self._held[number]
                self._size -= held.size
                self._free.append(held.slot)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Let go of what nobody will fetch: the message was not sent, or its receiver could not open it."""
        with self._lock:
            self._give_back(numbers)

    def _give_back(self, numbers: Iterable[int]) -> None:
        for held in [self._held[number] for number in numbers if number in self._held]:
            assert self._tally is not None, "something was exported"
            self._tally.mark(held.slot, Word.COPIED, held.use)
        self._collect()

    def fence(self, number: int) -> None:
        """What is done on the current stream from now on does not show in the copy; it waits for that, if need be.

        Only for what the receiver has fetched: or else the copy may, by whatever road, be waiting for the stream.
        """
        with self._lock:
            held, tally = self._held.get(number), self._tally
            if held is None or tally is None or tally.has_reached(held.slot, Word.COPIED, held.use):
                return
            driver, device = cuda.load(), held.storages[0].device
            with driver.on(device):
                stream = driver.stream(device)
                driver.wait(stream, tally.place(held.slot, Word.COPIED), held.use)
                driver.write(stream, tally.place(held.slot, Word.PASSED), held.use)
            held.awaits = tuple(Word)

    @property
    def outstanding(self) -> tuple[int, int]:
        """How many exports are held, and how many bytes."""
        with self._lock:
            return len(self._held), self._size

    def forget(self) -> None:
        """The receiver is gone, or we leave: nothing more is exported. What it may still be copying is held until it has."""
        with self._lock:
            self._free.clear()
            tally = self._tally
        if tally is not None:
            leave(tally.guest, self._let_go)

    def _let_go(self, is_alone: bool) -> bool:
        with self._lock:
            if self._tally is None:
                return True
            if is_alone:
                self._give_back(list(self._held))
            self._collect()
            self._free.clear()
            if self._held:
                return False
            self._tally.close()
            self._tally = None
        return True


def _place(driver: cuda.Driver, region: Region) -> Place:
    storage, start, length = region
    pointer = storage.data_ptr() + start
    base, _, allocation = driver.allocation(pointer)
    return Place(driver.handle(base), allocation, pointer - base, length)
