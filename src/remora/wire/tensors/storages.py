"""Places the bytes of tensors in a message that goes out. Knows strides, but no other layout.

Four ways for the bytes of a storage, told apart on arrival by the type of the *source* in the reduce tuple:

- `bytes`: small, so it travels inside the pickle (and is thereby a copy);
- `int`: the index of a buffer, which is the sender's memory on one side and the tensor's final memory on the other;
- a pair of numbers: it comes from a device (see `device_buffers`);
- an object (a tensor or a storage): shares the storage of that one, which came earlier in the same message.
"""

from __future__ import annotations

from typing import Any

import torch

from remora.errors import SerializationError
from remora.wire.device_buffers import DeviceBuffers
from remora.wire.device_buffers import Place as CargoPlace
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Loading
from remora.wire.raw_memory import copy_bytes, lasting_view, view
from remora.wire.tensors.rebuild import DTYPES, Source, strided, strided_on, zeros

Reduced = tuple[Any, ...]
Place = tuple[Source, int, tuple[int, ...], tuple[int, ...]]  # source, storage offset, shape, strides

# Four copies of a few kilobytes cost less than one more buffer to announce, send and receive into.
INLINE_BYTES = 8192  # so what has no more than this travels inside the pickle,
ROOM = 1 << 16  # and what has more, as long as there is no more of it in one message
LARGE_STORAGE = 8192  # from here on a view does not take along a storage twice its size or more (PyTorch's rule)

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Outgoing:
    """The data outside the pickle of one message that is being packed. `seen` maps a storage to its first user."""

    __slots__ = (
        "buffers", "device_buffers", "foreign", "in_place", "keepalive", "loading", "moves_cpu", "room", "scope", "seen",
        "tensors", "untracked",
    )  # fmt: skip

    scope: PackScope | None

    def __init__(self) -> None:
        self.scope = None
        self.moves_cpu = False  # tensors on the CPU arrive elsewhere
        self.room = ROOM  # how large something may be to travel inside the pickle
        self.reset()

    def reset(self) -> None:
        self.buffers: list[memoryview] = []
        self.foreign: list[memoryview] = []  # buffers that belong to other types than ours (numpy arrays and the like)
        self.keepalive: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.in_place: set[int] = set()  # storages in `buffers`
        self.seen: dict[object, Any] = {}
        self.untracked = False
        self.device_buffers: DeviceBuffers | None = None
        self.loading: Loading | None = None  # what of it goes in buffers

    def links(self) -> list[torch.Tensor] | None:
        """Return the tensors of this message whose history goes on at the receiver; None if none is recorded."""
        return None if self.scope is None else self.scope.links

    def detached(self) -> bool:
        """Return True if tensors arrive without `requires_grad`."""
        return self.scope is not None and self.scope.detached

    def target(self, device: torch.device) -> torch.device:
        """Return the device on which tensors of this device arrive. Raises if there is none."""
        route = None if self.scope is None else self.scope.route
        if route is not None:
            return route.target(device)
        raise RuntimeError(
            f"RPC only supports CPU tensors by default, got one on {device}, and no device map leads from there. "
            "Move it to the CPU first, or set a device map for the destination in the worker's options (`set_device_map`)."
        )

    def fits(self, nbytes: int) -> bool:
        """Return True if so much may travel inside the pickle; if so, it takes the room."""
        if nbytes > self.room:
            return False
        self.room = max(self.room - nbytes, INLINE_BYTES)
        return True

    def place(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> bytes | int | CargoPlace:
        """Add `nbytes` of `storage`, on the CPU, to the message: inside the pickle, or as a buffer without a copy."""
        if self.fits(nbytes):
            return copy_bytes(storage.data_ptr() + start, nbytes) if nbytes else b""
        self.in_place.add(storage._cdata)
        self.buffers.append(view(storage.data_ptr() + start, nbytes))
        self.keepalive.append(storage)
        return len(self.buffers) - 1

    def load(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> bytes | CargoPlace:
        """Do the same for a storage on a device."""
        if not nbytes:
            return b""
        if self.device_buffers is None:
            assert self.scope is not None, "there is a place for it"
            assert self.scope.route is not None, "there is a place for it"
            self.device_buffers = DeviceBuffers(self.scope.route)
        return self.device_buffers.add(storage, start, nbytes)

    def unload(self) -> bytes:
        """Return the manifest of the data from devices. What goes in buffers is among the buffers now."""
        assert self.device_buffers is not None, "something was taken along"
        assert self.scope is not None, "something was taken along"
        first = len(self.buffers)
        manifest, download = self.device_buffers.close(first, self.scope.undo)
        if download is not None:
            self.buffers += [lasting_view(each.untyped_storage()) for each in download.memory]
            self.loading = Loading(download, range(first, len(self.buffers)))
        return manifest


def cannot_send(tensor: torch.Tensor, why: str) -> SerializationError:
    """Return the error for a tensor that cannot be sent."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    try:
        keys = f", {torch._C._dispatch_keys(tensor)}"
    except Exception:
        keys = ""
    return SerializationError(
        f"Cannot send a {kind} of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device}{keys}: {why}"
    )


def reduce_strided(
    out: Outgoing, tensor: torch.Tensor, storage: torch.UntypedStorage, name: str, flags: int
) -> Reduced:
    """Reduce any strided tensor: views, large ones, expanded, overlapping, empty."""
    elsewhere = out.moves_cpu or not tensor.is_cpu
    device = str(out.target(tensor.device)) if elsewhere else "cpu"
    if tensor._is_zerotensor():
        return zeros, (name, tuple(tensor.shape), flags, device)
    try:
        source, offset, shape, stride = locate(out, tensor, storage)
    except (RuntimeError, ValueError) as error:
        raise cannot_send(tensor, str(error)) from error
    if elsewhere:
        return strided_on, (device, source, name, offset, shape, stride, flags)
    return strided, (source, name, offset, shape, stride, flags) if flags else (source, name, offset, shape, stride)


def locate(out: Outgoing, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Place:
    """Return where the receiver finds the elements of `tensor`, or of a compacted copy if only that should be sent."""
    shape, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.itemsize
    offset = int(tensor.storage_offset())
    span, used = _extent(shape, stride, itemsize)
    start, total = offset * itemsize, storage.nbytes()
    if span and start + span > total:
        raise ValueError(f"it needs {start + span} bytes of its storage, which has only {total}")
    key: object = storage._cdata
    if total >= LARGE_STORAGE and total >= 2 * used and key not in out.seen:
        if span > 2 * used:
            copy = compacted(tensor, storage)  # it leaves no gap and has no other user
            return locate(out, copy, copy.untyped_storage())
        key, offset, total = (key, start, span), 0, span
    else:
        start = 0
    return share(out, key, tensor, storage, start, total), offset, shape, stride


def share(
    out: Outgoing, key: object, tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, nbytes: int
) -> Source:
    """Return the source for these bytes of a storage: the object that used them first in this message, or the bytes."""
    on_host = tensor.is_cpu
    first: Source | None = out.seen.get(key)
    if first is None:
        out.seen[key] = tensor
        first = (out.place if on_host else out.load)(storage, start, nbytes)
    if out.in_place and storage._cdata in out.in_place:
        out.tensors.append(tensor)  # also if it only shares: a tensor made with `.data` counts its writes apart
    return first


def _extent(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the number of bytes from the first element to the last, and of those that can belong to the tensor."""
    last, count = 0, 1
    for size, step in zip(shape, stride, strict=True):
        if not size:
            return 0, 0
        if step:
            last += (size - 1) * step
            count *= size
    span = (last + 1) * itemsize
    return span, min(count * itemsize, span)


def compacted(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a copy of the bytes without the gaps, still expanded where the tensor is.

    It copies elements by their size: not every dtype can be copied, and conj and neg bits should stay as they are.
    """
    shape, stride = tensor.shape, tensor.stride()
    narrow = [size if step else 1 for size, step in zip(shape, stride, strict=True)]
    with torch._C._DisableTorchDispatch():  # whatever mode the thread is in: the copy is real
        gapped = torch.empty(0, dtype=_CARRIERS[tensor.itemsize], device=tensor.device)
        return gapped.set_(storage, tensor.storage_offset(), narrow, stride).clone().expand(shape)
