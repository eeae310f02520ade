"""Memory for large tensors that arrive: used again for the next one of the same size, when nobody uses it any more.

Memory that the system has just given is slow: each page is made when it is first written to, which takes longer than to
copy what comes into it. Programs send tensors of the same few sizes again and again. So we keep hold of the memory that
tensors arrived in, and when torch says that nobody else does, the next one of that size arrives there. What has not been
used for a while is let go, and so is the oldest when there is too much; tensors that use it do not notice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

SMALLEST = 1 << 20  # bytes; what is smaller the allocator keeps by itself
LIMIT = int(os.environ.get("REMORA_WARM_MEMORY", 512 << 20))  # bytes in all
IDLE = 10.0  # seconds

# How many tensors (and others in C++) hold a storage, its Python object included.
_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class _Kept:
    """A storage that we hold, too."""

    __slots__ = ("nbytes", "storage", "taken_at")

    def __init__(self, storage: torch.UntypedStorage, nbytes: int, now: float) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.taken_at = now

    @property
    def free(self) -> bool:
        """Whether nobody else holds it: no tensor, and no Python variable."""
        return _holders is not None and _holders(self.storage._cdata) == 1 and self.references() == _OURS

    def references(self) -> int:
        """How many Python has to it, by its own way of counting."""
        return sys.getrefcount(self.storage)


_OURS = _Kept(torch.UntypedStorage(0), 0, 0.0).references()  # type: ignore[no-untyped-call]


class Warm:
    """Storages that are used again. For any number of threads, without a lock: whoever takes an entry out of the table has
    it for itself."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._kept: dict[int, _Kept] = {}  # by address; the one that was taken last is at the end

    @property
    def kept_bytes(self) -> int:
        """How much of it there is."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of that size, with anything in it."""
        if nbytes < SMALLEST or nbytes > self.limit or _holders is None:
            return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        storage = self._find(nbytes)
        if storage is None:
            storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        self._kept[storage.data_ptr()] = _Kept(storage, nbytes, time.monotonic())
        self._drop_while(lambda oldest: self.kept_bytes > self.limit)
        return storage

    def _find(self, nbytes: int) -> torch.UntypedStorage | None:
        """One that is free. The last one is the most likely to be in the processor's caches, too."""
        for address, seen in reversed(list(self._kept.items())):
            if seen.nbytes != nbytes or not seen.free:
                continue
            kept = self._kept.pop(address, None)
            if kept is seen and kept.free and kept.storage.nbytes() == nbytes:  # (a program may have resized it)
                return kept.storage
        return None

    def trim(self) -> None:
        """Let go of what was not taken for a while."""
        now = time.monotonic()
        self._drop_while(lambda oldest: now - oldest.taken_at > IDLE)

    def _drop_while(self, unwanted: Callable[[_Kept], bool]) -> None:
        for address, oldest in list(self._kept.items()):
            if not unwanted(oldest):
                return
            self._kept.pop(address, None)


warm = Warm()  # of this process
