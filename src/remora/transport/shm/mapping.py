"""Files of shared memory in the address space of this process. A forked child has none of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from remora.wire.raw_memory import madvise

PAGE = mmap.PAGESIZE
try:
    HOST_MEMORY = os.sysconf("SC_PHYS_PAGES") * PAGE  # bytes; no worker lends more, so no arena is larger than twice that
except (AttributeError, ValueError, OSError):
    HOST_MEMORY = 1 << 40

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_memory(
    descriptor: int, size: int, flags: int, address: int = 0, offset: int = 0, mapped: list[int | None] | None = None
) -> int:
    """Map a part of a file, and return its address, which is added to `mapped`, too: no exception of a handler comes in
    between. (Python's `mmap` would keep a descriptor open for each.)"""
    mapped = [] if mapped is None else mapped
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapped.extend(map(_mmap, (address or None,), (size,), (access,), (flags,), (descriptor,), (offset,)))
    found = mapped[-1]
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
    return int(found)


_mappings: dict[int, weakref.ref[Mapping]] = {}  # all of this process


class Mapping:
    """An arena in our address space, and its descriptor, for as long as this object lives.

    A forked child has neither: before a fork, the parent makes private copies of what the child should see (`borrower`).
    """

    __slots__ = ("__weakref__", "address", "descriptor", "process", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        self.process = 0
        self.descriptor = descriptor  # ours from here on
        self.size = size
        try:
            self.address = map_memory(descriptor, size, mmap.MAP_SHARED)
        except BaseException:
            os.close(descriptor)
            raise
        self.process = os.getpid()
        madvise(self.address, size, mmap.MADV_DONTFORK)
        _mappings[id(self)] = weakref.ref(self)

    def __del__(
        self,
        unmap: Callable[[int, int], object] = _munmap,
        close: Callable[[int], None] = os.close,
        process: Callable[[], int] = os.getpid,
        mappings: dict[int, Any] = _mappings,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:  # (there may be no globals any more)
        if not is_finalizing() and self.process == process():  # a child may have other things there, and under that number
            mappings.pop(id(self), None)
            unmap(self.address, self.size)
            close(self.descriptor)


def _forget_mappings() -> None:
    """Close the parent's descriptors, in a forked child."""
    for reference in list(_mappings.values()):
        mapping = reference()
        if mapping is not None:
            os.close(mapping.descriptor)
    _mappings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_mappings)
