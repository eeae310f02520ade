"""The few calls of the CUDA driver that torch does not wrap: memory of other processes, and flags to wait for. No policy.

By ctypes from the driver's own library, whose interface stays the same from version to version. Importing this does not
load it, and `load` does not initialise CUDA: that is left to torch. torch's own way of sharing memory is not used. It wraps
a storage anew each time it is sent, leaves files behind when a process is killed, and keeps memory for ever when a receiver
is. Nor are events between processes: a stream that waits for one of a process that has been killed waits for ever.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from remora.devices import streams

HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7
_PORTABLE_AND_MAPPED = 3
_AT_LEAST = 0
_RELAXED = 2

_pointer = ctypes.c_uint64
_out = ctypes.c_void_p  # where a result goes


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class DriverError(OSError):
    """The driver refused."""


# Name in the library (with the version of its interface) -> types of its arguments.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, _out),
    "cuDeviceGet": (_out, ctypes.c_int),
    "cuDeviceGetUuid": (_out, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_out, ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_out,),
    "cuMemGetAddressRange_v2": (_out, _out, _pointer),
    "cuPointerGetAttribute": (_out, ctypes.c_int, _pointer),
    "cuIpcGetMemHandle": (_out, _pointer),
    "cuIpcOpenMemHandle_v2": (_out, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_pointer,),
    "cuMemcpyAsync": (_pointer, _pointer, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_out, ctypes.c_void_p, ctypes.c_uint),
    "cuThreadExchangeStreamCaptureMode": (_out,),
    "cuStreamQuery": (ctypes.c_void_p,),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _pointer, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _pointer, ctypes.c_uint32, ctypes.c_uint),
}


@functools.cache
def load() -> Driver:
    """Return the driver; DriverError says why there is none."""
    if torch.version.cuda is None:
        raise DriverError("this torch is built without CUDA")
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver cannot be used: {error}") from None


class Driver:
    """The calls. Those for a device are made inside `on(device)`, after torch has initialised CUDA."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in _CALLS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = types, ctypes.c_int
        self._places: dict[int, _Place] = {}
        self._uuids: dict[int, bytes] = {}

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Make calls for this device, in the context that torch uses, too."""
        return self._places.get(device.index) or self._retain(device.index)

    def _retain(self, index: int) -> _Place:
        context = ctypes.c_void_p()
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._ordinal(index)), "have a context")
        return self._places.setdefault(index, _Place(self, context.value or 0))

    def enter(self, context: int) -> None:
        self._check(self._library.cuCtxPushCurrent_v2(context), "enter a context")

    def leave(self) -> None:
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _ordinal(self, index: int) -> int:
        ordinal = ctypes.c_int()
        self._check(self._library.cuDeviceGet(ctypes.byref(ordinal), index), f"find device {index}")
        return ordinal.value

    def uuid(self, device: torch.device) -> bytes:
        """Return the name that the device has in every process that sees it."""
        known = self._uuids.get(device.index)
        if known is None:
            name = (ctypes.c_char * UUID_BYTES)()
            self._check(self._library.cuDeviceGetUuid(name, self._ordinal(device.index)), "name a device")
            known = self._uuids[device.index] = name.raw
        return known

    def find(self, uuid: bytes) -> torch.device | None:
        """Return the device of that name, if this process sees it."""
        devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def stream(self, device: torch.device) -> int:
        """Return the current stream."""
        return streams.raw(device)

    def is_idle(self, stream: int) -> bool:
        """Return True if the stream has no work left. Does not disturb a thread that captures a graph meanwhile."""
        mode = ctypes.c_int(_RELAXED)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            return not self._library.cuStreamQuery(stream)
        finally:
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def new_storage(self, size: int, device: torch.device) -> torch.UntypedStorage:
        """Return new memory of torch's, to be used on the current stream."""
        return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]

    def allocation(self, pointer: int) -> tuple[int, int, int]:
        """Return the beginning and the size of the allocation that a pointer points into, and its unique number."""
        base, size, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        found = self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
        self._check(found, "find an allocation")
        self._check(self._library.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, pointer), "tell allocations apart")
        return base.value, size.value, number.value

    def handle(self, base: int) -> bytes:
        """Return the handle by which other processes can open an allocation."""
        handle = _Handle()
        self._check(self._library.cuIpcGetMemHandle(ctypes.byref(handle), base), "share memory")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open an allocation of another process, and return its address here. To be closed once for each time it was
        opened."""
        pointer = ctypes.c_uint64()
        opened = self._library.cuIpcOpenMemHandle_v2(
            ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        self._check(opened, "open memory of another process")
        return pointer.value

    def close(self, pointer: int) -> None:
        """Undo one `open`."""
        self._check(self._library.cuIpcCloseMemHandle(pointer), "close memory of another process")

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes, in the order of the stream."""
        self._check(self._library.cuMemcpyAsync(target, source, size, stream), "copy")

    def register(self, address: int, size: int) -> int:
        """Let devices use memory of the host. Return their pointer to it."""
        self._check(self._library.cuMemHostRegister_v2(address, size, _PORTABLE_AND_MAPPED), "register memory")
        pointer = ctypes.c_uint64()
        self._check(self._library.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), address, 0), "map memory")
        return pointer.value

    def unregister(self, address: int) -> None:
        """Undo `register`. No work under way may use the memory."""
        self._check(self._library.cuMemHostUnregister(address), "unregister memory")

    def write(self, stream: int, pointer: int, value: int) -> None:
        """Write a word when the stream gets there, after all earlier work is visible."""
        self._check(self._library.cuStreamWriteValue32_v2(stream, pointer, value, 0), "write a word")

    def wait(self, stream: int, pointer: int, value: int) -> None:
        """Make the stream wait until the word has reached the value (0 follows 2**32 - 1)."""
        self._check(self._library.cuStreamWaitValue32_v2(stream, pointer, value, _AT_LEAST), "wait for a word")

    def _check(self, code: int, what: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise DriverError(f"the CUDA driver cannot {what}: {(name.value or b'').decode() or code}")


class _Place(AbstractContextManager[None]):
    """The context of a device, current in the thread inside `with`. It nests."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.enter(self._context)

    def __exit__(self, *error: object) -> None:
        self._driver.leave()
