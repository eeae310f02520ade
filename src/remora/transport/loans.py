"""Segments that others have lent us (`shm`): mapped when they first come, used in place, given back with the last tensor.

A segment may come before it is filled: whoever unpacks its message waits for that (`Filling`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from remora.transport import shm
from remora.transport.shm import FILLED, PLACE, POPULATE, REFERENCE

PATIENCE = 1e-3  # seconds to look for the end of a copy without sleeping

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


class Borrower:
    """What one worker has of the segments of one other."""

    def __init__(self) -> None:
        self._maps: dict[int, _Mapping] = {}
        self._lock = threading.Lock()
        self.unused: deque[int] = deque()  # numbers of segments to be given back; filled by destructors, so without a lock

    def take(self, reference: bytes | memoryview, now: float) -> tuple[list[torch.UntypedStorage], Filling | None]:
        """The memory that a message refers to, and what to wait for before it is used, if anything. OSError or ValueError if
        it cannot be had."""
        number, process, descriptor, size, times, count = REFERENCE.unpack_from(reference)
        places = [PLACE.unpack_from(reference, REFERENCE.size + index * PLACE.size) for index in range(count)]
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
            for number in [number for number, mapping in self._maps.items() if now - mapping.used_at > 2 * shm.IDLE]:
                del self._maps[number]

    def close(self) -> None:
        """Unmap everything that no tensor uses."""
        with self._lock:
            self._maps.clear()

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
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | POPULATE, descriptor, 0)
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
        self.address: int = address
        self.filled = ctypes.c_uint64.from_address(address + FILLED)  # how often it was
        self.size = size

    def __del__(self, unmap: Callable[[int, int], object] = _munmap) -> None:  # (there may be no globals any more)
        if self.size:
            unmap(self.address, self.size)
