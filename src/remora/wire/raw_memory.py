"""Raw memory in Python: views of storages, new storages to receive into, copies. No pickling, no frames."""

from __future__ import annotations

import ctypes
import functools
import mmap
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from remora.wire.buffer_pool import SMALLEST, everywhere, spare_buffers
from remora.wire.packed import Packed

_SAMPLES, _SAMPLE = 16, 64  # how many samples of a buffer, of how many bytes
READ, _WRITE = 0x100, 0x200  # PyBUF_READ and PyBUF_WRITE

# PYFUNCTYPE keeps the GIL: giving it up and getting it back costs more than these calls do.
# These are for the hot path and believe what they are told: `raw_view(ptr, nbytes, READ)`, `raw_copy(ptr, nbytes)`,
# `raw_fill(ptr, data, nbytes)`.
raw_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
raw_copy = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
raw_fill = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

_raw_move = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


# On the CPU whatever the default device is, and not filled even where torch fills what `empty` returns.
_new_storage: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; older systems refuse it, and make the pages when they are first touched
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
madvise: Callable[[int, int, int], int] = _libc.madvise


def populate(address: int, size: int) -> bool:
    """Make all pages at once: far quicker than one by one, as they are touched. Private ones are copied. Return False if the
    system cannot do so."""
    return madvise(address, size, _POPULATE_WRITE) == 0


_HUGE_PAGES = 14  # MADV_HUGEPAGE: the system makes pages of 2 MB there, if it has them; 512 times fewer
_MAPPED_FROM = 32 << 20  # bytes; from here on the allocator of glibc maps each object alone, and unmaps it with the object


def fill_fresh(address: int, source: int, nbytes: int) -> None:
    """Copy bytes to memory that the system has just given. Without the interpreter lock.

    To make the pages takes five times as long as to copy the bytes, if they are small ones. Large pages are asked for where
    the advice ends with the object: elsewhere it would stay with memory that others use after us.
    """
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and end > start:
        large = nbytes > _MAPPED_FROM and _has_huge_pages() and madvise(start, end - start, _HUGE_PAGES) == 0
        if not large:  # (large ones are made one by one, and are in the processor's cache when they are filled)
            populate(start, end - start)
    ctypes.memmove(address, source, nbytes)


@functools.cache
def _has_huge_pages() -> bool:
    """Return True if the system gives large pages on request."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read()
    except OSError:  # it has none, or does not say
        return False


def storage_view(storage: torch.UntypedStorage) -> memoryview:
    """Return all bytes of a CPU storage, writable. The view does not keep the storage alive."""
    return view(_pointer(storage), storage.nbytes(), _WRITE)


def _pointer(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "cpu":
        raise ValueError(f"The host cannot read the memory of a storage on {storage.device}.")
    return storage.data_ptr()


def view(ptr: int, nbytes: int, access: int = READ) -> memoryview:
    """Return the `nbytes` at `ptr`. The caller keeps the memory alive for as long as the view lives."""
    if not nbytes:
        return memoryview(bytearray())
    if not ptr or nbytes < 0:
        raise ValueError(f"There are no {nbytes} bytes of memory at address {ptr}.")
    found: memoryview = raw_view(ptr, nbytes, access)
    return found


class _Buffer(ctypes.Structure):
    """The first fields of Py_buffer; the rest is room for the others."""

    _fields_ = (("address", ctypes.c_void_p), ("exporter", ctypes.c_void_p), ("rest", ctypes.c_char * 64))


def address_of(buffer: memoryview) -> int:
    """Return the address of the bytes of a view, writable or not. The caller keeps the view alive while it uses the
    address."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(found), 0)
    address = int(found.address or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return address


def copy_bytes(ptr: int, nbytes: int) -> bytes:
    """Return a copy of the `nbytes` at `ptr`. The null pointer has no bytes to copy."""
    if not nbytes:
        return b""
    if not ptr or nbytes < 0:
        raise ValueError(f"There are no {nbytes} bytes of memory at address {ptr}.")
    found: bytes = raw_copy(ptr, nbytes)
    return found


def buffer_of(storage: torch.UntypedStorage) -> memoryview:
    """Return all bytes of a CPU storage, writable, in a view that keeps the storage alive: safe to hand to user code."""
    nbytes = storage.nbytes()
    if not nbytes:
        return memoryview(bytearray())
    exporter: Any = everywhere.from_address(_pointer(storage))
    exporter.storage = storage  # slices of the view hold the exporter, and it holds the storage
    return pickle.PickleBuffer(exporter).raw()[:nbytes]


def lasting_view(storage: torch.UntypedStorage) -> memoryview:
    """Return the same for memory that belongs to a message: nothing changes it, so it need not be copied."""
    found = buffer_of(storage)
    if len(found):
        found.obj.lasting = True  # type: ignore[attr-defined]
    return found


def lasts(data: memoryview) -> bool:
    """Return True if nothing changes what is in a view."""
    return type(data.obj) is bytes or (data.obj is not None and getattr(data.obj, "lasting", False))


def allocate(nbytes: int) -> tuple[torch.UntypedStorage, memoryview]:
    """Return new memory, and a view of it that a transport can receive into."""
    storage = spare_buffers.take(nbytes)
    return storage, storage_view(storage)


def from_bytes(data: bytes | bytearray | memoryview) -> torch.UntypedStorage:
    """Return a storage that owns a copy of `data`."""
    storage = _new_storage(data.nbytes if type(data) is memoryview else len(data))
    if type(data) is bytes:
        raw_fill(storage.data_ptr(), data, len(data))
    elif storage.nbytes():
        storage_view(storage)[:] = data
    return storage


def untouched(nbytes: int) -> mmap.mmap:
    """Return memory full of zeros, which the system allocates page by page when it is written to."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def fixed(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage over the same memory that cannot be made larger. (There is no such storage on other devices.)"""
    if storage.device.type != "cpu" or not storage.resizable():
        return storage
    if not storage.nbytes():
        part: torch.UntypedStorage = storage[:0]  # the size of a part is fixed
        return part
    with torch._C._DisableTorchDispatch():
        return torch.frombuffer(buffer_of(storage), dtype=torch.uint8).untyped_storage()


def copied(data: memoryview) -> memoryview:
    """Return an immutable copy, made while no other thread of the program runs."""
    if data.nbytes < SMALLEST:
        return memoryview(bytes(data))
    storage = spare_buffers.take(data.nbytes)
    _raw_move(storage.data_ptr(), address_of(data), data.nbytes)
    return buffer_of(storage)


class Fingerprint(NamedTuple):
    """The state of memory that is referenced in place, to detect changes."""

    versions: tuple[int | None, ...]  # how often each tensor had been written to; None where that is not counted
    samples: tuple[bytes, ...]  # a few bytes from here and there: writes through `.data` or numpy are counted nowhere


def fingerprint(packed: Packed) -> Fingerprint:
    """Return the state of the memory that `packed` references."""
    versions = tuple(_version(tensor) for tensor in packed.tensors)
    return Fingerprint((*versions, None) if packed.untracked else versions, _samples(packed))


def unchanged(packed: Packed, before: Fingerprint) -> bool:
    """Return False if anything that `packed` references is known to have been written to since, or is not counted.

    Not seen: a write that goes round torch's counter (through `.data` or numpy) and misses every sample.
    """
    if None in before.versions:
        return False
    if any(_version(tensor) != seen for tensor, seen in zip(packed.tensors, before.versions, strict=True)):
        return False
    return _samples(packed) == before.samples


def _samples(packed: Packed) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for buffer in packed.buffers:
        if lasts(buffer):
            continue
        step = max(len(buffer) // _SAMPLES, _SAMPLE)
        found.extend(bytes(buffer[at : at + _SAMPLE]) for at in range(0, len(buffer), step))
        found.append(bytes(buffer[-_SAMPLE:]))
    return tuple(found)


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return None
