"""Keeps memory for large tensors that arrive, or are copied, and reuses it when its last tensor is gone.

Memory that the system has just given is slow: each page is made when it is first written to, which takes longer than
copying the data. Programs send tensors of the same few sizes again and again. So their memory is reused.

A *token* says that memory is in use. The pool never hands out a storage of its own: it makes a new one over
the same memory, whose deleter drops the token, and the token's destructor puts the memory back. A use count would not do.
`share_memory_()` and the queues of `torch.multiprocessing` move a storage to other memory and give that to other processes,
which no count shows; they drop the token, because the tensor no longer lies in our memory. Views, numpy arrays, DLPack
capsules and graphs keep the storage, and the storage keeps the token. The memory is private to its process, so a forked
child has a copy of its own.

The price: a storage over memory of ours cannot be made larger in place (`resize_`), like one from `torch.from_numpy`.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from remora.options import BUFFER_POOL_BYTES, FAST_PATHS

SMALLEST = 1 << 20  # bytes; what is smaller the allocator keeps by itself
LIMIT = BUFFER_POOL_BYTES if FAST_PATHS.buffer_pool else 0  # bytes in all
IDLE = 10.0  # seconds

# All memory as one array: one type serves for memory of any size (a type for each size would be garbage for the collector).
everywhere: Any = ctypes.c_char * (1 << 46)

_new_storage: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage


class _Token:
    """Lives as long as a tensor lies in some memory of the pool."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, memory: torch.UntypedStorage, pool: BufferPool) -> None:
        self._memory = memory
        self._pool = pool

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # On whatever thread, at whatever moment: takes no lock. If it is interrupted, the memory is freed.
        if not is_finalizing():
            self._pool.put_back(self._memory)


class _Free(NamedTuple):
    """Memory that no tensor lies in."""

    memory: torch.UntypedStorage
    nbytes: int
    since: float


class BufferPool:
    """The pool. For any number of threads, without a lock: the thread that takes an entry out of the table has it."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._free: dict[int, _Free] = {}  # by address; what came back last is at the end

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that no tensor uses."""
        return sum(free.nbytes for free in list(self._free.values()))

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of that size, with arbitrary content."""
        if nbytes < SMALLEST or nbytes > self.limit:
            return _new_storage(nbytes)
        memory = self._find(nbytes)
        if memory is None:
            memory = _new_storage(nbytes)
        exporter: Any = everywhere.from_address(memory.data_ptr())
        exporter.token = _Token(memory, self)
        with torch._C._DisableTorchDispatch():  # whatever mode the thread is in: the memory is real
            return torch.frombuffer(exporter, dtype=torch.uint8, count=nbytes).untyped_storage()

    def _find(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return free memory. What came back last is the most likely to be in the processor's caches, too."""
        for address, seen in reversed(list(self._free.items())):
            if seen.nbytes == nbytes:
                taken = self._free.pop(address, None)
                if taken is not None and taken.nbytes == nbytes:  # (another thread may have been quicker)
                    return taken.memory
        return None

    def put_back(self, memory: torch.UntypedStorage) -> None:
        """Take back memory that no tensor uses any more."""
        self._free[memory.data_ptr()] = _Free(memory, memory.nbytes(), time.monotonic())
        self._drop_while(lambda oldest: self.kept_bytes > self.limit)

    def trim(self) -> None:
        """Return to the system what was not used for a while."""
        now = time.monotonic()
        self._drop_while(lambda oldest: now - oldest.since > IDLE)

    def _drop_while(self, unwanted: Callable[[_Free], bool]) -> None:
        for address, oldest in list(self._free.items()):
            if not unwanted(oldest):
                return
            self._free.pop(address, None)


spare_buffers = BufferPool()  # of this process
