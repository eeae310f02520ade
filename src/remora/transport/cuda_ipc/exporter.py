"""The owner's side: holds device memory until its receiver has copied it. Sends nothing."""

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
from remora.transport.cuda_ipc.flags import EVERY, FlagPage, Word
from remora.transport.cuda_ipc.reference import SLOTS, Place, Reference, Region

log = logging.getLogger("remora")

LIMIT = 1 << 34  # bytes held for one receiver

_numbers = itertools.count(int.from_bytes(os.urandom(5), "little")).__next__


@dataclass(slots=True)
class _Held:
    """One export that has not been copied yet: its slot and use, its size, and the storages to keep."""

    slot: int
    use: int
    size: int
    storages: list[torch.UntypedStorage]
    awaits: tuple[Word, ...] = (Word.READY, Word.COPIED)  # no slot is used again before all that was to be written is


class Exporter:
    """The exports of one worker for one peer: at most `limit` bytes and `count` exports at a time."""

    def __init__(self, limit: int = LIMIT, count: int = SLOTS) -> None:
        self._lock = threading.RLock()  # guards: the table of exports
        self._limit = limit
        self._free = list(range(min(count, SLOTS)))
        self._uses = [0] * SLOTS
        self._held: dict[int, _Held] = {}
        self._size = 0
        self._flags: FlagPage | None = None
        self._has_complained = False

    def export(self, regions: Sequence[Region]) -> bytes | None:
        """Return a reference to memory of one device as it is when the current stream gets here, for one receiver to fetch.

        The memory is held, and must not be written to, until it has been copied. None: there is no room, or this memory
        cannot be shared, so it has to go another way. """
        size = sum(length for _, _, length in regions)
        with self._lock:
            self.collect()
            if not self._free or self._size + size > self._limit:
                return None
            try:
                return self._export(regions, size)
            except OSError as error:
                level = logging.DEBUG if self._has_complained else logging.WARNING
                log.log(level, "device memory cannot be shared, and goes over the host: %s", error)
                self._has_complained = True
                return None

    def _export(self, regions: Sequence[Region], size: int) -> bytes:
        driver, device = cuda.load(), regions[0][0].device
        with driver.on(device):
            places = [_place(driver, region) for region in regions]
            flags = self._flags = self._flags or FlagPage.create()
            flags.attach(driver, device)
            slot = self._free[-1]
            use = (self._uses[slot] + 1) % EVERY
            name = driver.uuid(device)
            stream = driver.stream(device)
            # Ready when the stream gets here; at once, if it is here already: a device that two processes use switches
            # between them, and that takes longer than the work.
            if driver.is_idle(stream):
                flags.mark(slot, Word.READY, use)
            else:
                driver.write(stream, flags.place(slot, Word.READY), use)
        number = _numbers()
        self._free.pop()
        self._uses[slot] = use
        self._held[number] = _Held(slot, use, size, [storage for storage, _, _ in regions])
        self._size += size
        return Reference(number, slot, use, flags.name, name, places).pack()

    @property
    def lent_bytes(self) -> int:
        """The bytes that the receiver has, or may have."""
        return self._size

    def collect(self) -> None:
        """Free what has been copied."""
        with self._lock:
            for number, held in list(self._held.items()):
                assert self._flags is not None, "something was exported"
                if all(self._flags.has_reached(held.slot, word, held.use) for word in held.awaits):
                    del self._held[number]
                    self._size -= held.size
                    self._free.append(held.slot)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Free what will not be fetched: the message was not sent, or its receiver could not open it."""
        with self._lock:
            for held in [self._held[number] for number in numbers if number in self._held]:
                assert self._flags is not None, "something was exported"
                self._flags.mark(held.slot, Word.COPIED, held.use)
            self.collect()

    def fence(self, number: int) -> None:
        """Make the current stream wait for the copy, if need be, so that its later work does not show there.

        Only for what the receiver has fetched: otherwise the copy itself may wait for this stream.
        """
        with self._lock:
            held, flags = self._held.get(number), self._flags
            if held is None or flags is None or flags.has_reached(held.slot, Word.COPIED, held.use):
                return
            driver, device = cuda.load(), held.storages[0].device
            with driver.on(device):
                stream = driver.stream(device)
                driver.wait(stream, flags.place(held.slot, Word.COPIED), held.use)
                driver.write(stream, flags.place(held.slot, Word.PASSED), held.use)
            held.awaits = tuple(Word)

    @property
    def outstanding(self) -> tuple[int, int]:
        """Return the number of exports that are held, and of their bytes."""
        with self._lock:
            return len(self._held), self._size

    def forget(self) -> None:
        """Stop exporting: the receiver or this worker is gone. What the receiver may still be copying is held until it
        has."""
        with self._lock:
            self._free.clear()
            flags = self._flags
        if flags is not None:
            leave(flags.guest, self._let_go)

    def _let_go(self, is_alone: bool) -> bool:
        with self._lock:
            if self._flags is None:
                return True
            self.give_back(list(self._held) if is_alone else ())
            self._free.clear()
            if self._held:
                return False
            self._flags.close()
            self._flags = None
        return True


def _place(driver: cuda.Driver, region: Region) -> Place:
    storage, start, length = region
    pointer = storage.data_ptr() + start
    base, _, allocation = driver.allocation(pointer)
    return Place(driver.handle(base), allocation, pointer - base, length)
