"""The receiver's side: opens device memory of another process, and copies it. Receives no messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from remora.transport.cuda_ipc import driver as cuda
from remora.transport.cuda_ipc.deferred_free import leave
from remora.transport.cuda_ipc.flags import FlagPage, Word
from remora.transport.cuda_ipc.reference import Place, Reference, Unreachable

IDLE = 10.0  # seconds after which an allocation that is not used is closed; until then it stays, even if its owner frees it
OPEN = 128  # allocations that are kept open although they are not in use


@dataclass(slots=True)
class _Allocation:
    """An allocation of the other process in this one."""

    pointer: int
    size: int
    device: torch.device
    slot: int = 0  # the last copy from it: which use of which slot of the flags
    use: int = 0
    used_at: float = 0.0


class Importer:
    """The device memory of one peer that this worker has opened."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, process: int = 0) -> None:
        self._lock = threading.RLock()  # guards: the table of imports
        self._clock = clock
        self._process = process  # the owner of the memory; 0: not known, then the first process that it names
        self._flags: FlagPage | None = None
        self._flags_name: tuple[int, int, int] | None = None
        self._open: dict[tuple[bytes, int], _Allocation] = {}  # the one used last is the last
        self._copies: dict[int, int] = {}  # slot -> its use by the last copy

    def fetch(self, reference: bytes | memoryview, device: torch.device) -> list[torch.UntypedStorage]:
        """Return copies of what a reference names, on a device of ours, ready in the order of its current stream.

        Unreachable if it cannot be had. If this fails, the exporter is told (in the flags) that it need not wait, where
        that can be said.
        """
        named = Reference.parse(reference)
        with self._lock:
            flags = self._flags_of(named)
            try:
                driver = cuda.load()
                with driver.on(device):
                    flags.attach(driver, device)
                    return self._copy(driver, flags, named, device)
            except BaseException as error:
                flags.mark(named.slot, Word.COPIED, named.use)
                if isinstance(error, cuda.DriverError):
                    raise Unreachable(str(error)) from error
                raise

    def _copy(
        self, driver: cuda.Driver, flags: FlagPage, named: Reference, device: torch.device
    ) -> list[torch.UntypedStorage]:
        sources = [self._source(driver, named, place) for place in named.places]
        storages = [driver.new_storage(place.size, device) for place in named.places]
        stream = driver.stream(device)
        self._copies[named.slot] = named.use
        if not flags.has_reached(named.slot, Word.READY, named.use):
            driver.wait(stream, flags.place(named.slot, Word.READY), named.use)
        for storage, source, place in zip(storages, sources, named.places, strict=True):
            driver.copy(storage.data_ptr(), source, place.size, stream)
        driver.write(stream, flags.place(named.slot, Word.COPIED), named.use)
        return storages

    def _flags_of(self, named: Reference) -> FlagPage:
        if self._flags is None:
            if self._process and named.process != self._process:
                raise Unreachable(f"it is memory of process {named.process}, which is not the lender's")
            try:
                self._flags = FlagPage.open(*named.flags)
            except (OSError, ValueError) as error:
                raise Unreachable(f"the flags of process {named.process} cannot be opened: {error}") from error
            self._flags_name, self._process = named.flags, named.process
        if named.flags != self._flags_name:
            raise Unreachable("the reference is from another exporter than the earlier ones")
        return self._flags

    def _source(self, driver: cuda.Driver, named: Reference, place: Place) -> int:
        key = (place.handle, place.allocation)
        allocation = self._open.pop(key, None) or self._opened(driver, place.handle, named.device)
        allocation.slot, allocation.use, allocation.used_at = named.slot, named.use, self._clock()
        self._open[key] = allocation
        for oldest in list(self._open)[: max(0, len(self._open) - OPEN)]:
            self._close(driver, oldest)
        if place.offset + place.size > allocation.size:
            raise Unreachable("a reference names memory beyond its allocation")
        return allocation.pointer + place.offset

    def _opened(self, driver: cuda.Driver, handle: bytes, uuid: bytes) -> _Allocation:
        device = driver.find(uuid)
        if device is None:
            raise Unreachable("this process does not see the device that the memory is on")
        with driver.on(device):
            pointer = driver.open(handle)
            return _Allocation(pointer, driver.allocation(pointer)[1], device)

    def _close(self, driver: cuda.Driver, key: tuple[bytes, int]) -> None:
        """Close an allocation, unless a copy from it is under way."""
        allocation = self._open[key]
        assert self._flags is not None, "something was fetched"
        if self._flags.has_reached(allocation.slot, Word.COPIED, allocation.use):
            del self._open[key]
            with driver.on(allocation.device):
                driver.close(allocation.pointer)

    def discard(self, reference: bytes | memoryview) -> None:
        """Tell the exporter that this will not be fetched. Unreachable if the exporter cannot be told."""
        named = Reference.parse(reference)
        with self._lock:
            self._flags_of(named).mark(named.slot, Word.COPIED, named.use)

    def trim(self, now: float) -> None:
        """Close what has not been used for a while."""
        with self._lock:
            for key in [key for key, each in self._open.items() if now - each.used_at > IDLE]:
                self._close(cuda.load(), key)

    @property
    def opened(self) -> int:
        """Return the number of open allocations."""
        return len(self._open)

    def close(self) -> None:
        """Stop fetching: the exporter or this worker is gone. Allocations with copies under way are closed afterwards."""
        if self._flags is not None:
            leave(self._process, self._let_go)

    def _let_go(self, is_alone: bool) -> bool:
        with self._lock:
            flags = self._flags
            if flags is None:
                return True
            if is_alone:  # no process will ever write that it is ready
                for slot, use in self._copies.items():
                    flags.mark(slot, Word.READY, use)
            if not all(flags.has_reached(slot, Word.COPIED, use) for slot, use in self._copies.items()):
                return False
            for key in list(self._open):
                self._close(cuda.load(), key)
            flags.close()
            self._flags = None
        return True
