"""Places the bytes of tensors: storages of a message on their way out and in. Knows strides, but no other layout.

Four ways for the bytes of a storage, told apart on arrival by the type of the *source* in the reduce tuple:

- `bytes`: small, so it travels inside the pickle (and is thereby a copy);
- `int`: the index of a buffer, which is the sender's memory on one side and the tensor's final memory on the other;
- a pair of numbers: it comes from a device (see `device_buffers`);
- an object (a tensor or a storage): shares the storage of that one, which came earlier in the same message.

On arrival, what a message says of a tensor is checked against the bytes that came (`check_place`) before torch sees it:
torch makes a storage larger if a tensor needs more, with whatever was in that memory before, and frees the old one under
the tensors that lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from remora.devices import copies
from remora.errors import SerializationError
from remora.wire.device_buffers import DeviceBuffers
from remora.wire.device_buffers import Place as CargoPlace
from remora.wire.pack_scope import PackScope, incoming
from remora.wire.packed import Loading
from remora.wire.raw_memory import copy_bytes, fixed, from_bytes, lasting_view, readonly_view, untouched

Reduced = tuple[Any, ...]
Source = bytes | int | CargoPlace | torch.Tensor | torch.UntypedStorage
Place = tuple[Source, int, tuple[int, ...], tuple[int, ...]]  # source, storage offset, shape, strides

# Four copies of a few kilobytes cost less than one more buffer to announce, send and receive into.
INLINE_BYTES = 8192  # so what has no more than this travels inside the pickle,
ROOM = 1 << 16  # and what has more, as long as there is no more of it in one message
LARGE_STORAGE = 8192  # from here on a view does not take along a storage twice its size or more (PyTorch's rule)

REQUIRES_GRAD, CONJ, NEG = 1, 2, 4
_MOST = 1 << 62  # bytes: torch counts them in 63 bits

DTYPES = {str(dtype)[len("torch.") :]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Outgoing:
    """The data outside the pickle of one message that is being packed. `seen` maps a storage to its first user."""

    __slots__ = (
        "buffers", "cargo", "foreign", "in_place", "keepalive", "loading", "moves_cpu", "room", "scope", "seen", "tensors",
        "untracked",
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
        self.cargo: DeviceBuffers | None = None
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
        self.buffers.append(readonly_view(storage.data_ptr() + start, nbytes))
        self.keepalive.append(storage)
        return len(self.buffers) - 1

    def load(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> bytes | CargoPlace:
        """Do the same for a storage on a device."""
        if not nbytes:
            return b""
        if self.cargo is None:
            assert self.scope is not None, "there is a place for it"
            assert self.scope.route is not None, "there is a place for it"
            self.cargo = DeviceBuffers(self.scope.route)
        return self.cargo.add(storage, start, nbytes)

    def unload(self) -> bytes:
        """Return the manifest of the data from devices. What goes in buffers is among the buffers now."""
        assert self.cargo is not None, "something was taken along"
        assert self.scope is not None, "something was taken along"
        first = len(self.buffers)
        manifest, download = self.cargo.close(first, self.scope.undo)
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
        return _zeros, (name, tuple(tensor.shape), flags, device)
    try:
        place = locate(out, tensor, storage)
        if place is None:
            place = locate_copy(out, compacted(tensor, storage))
    except (RuntimeError, ValueError) as error:
        raise cannot_send(tensor, str(error)) from error
    source, offset, shape, stride = place
    if elsewhere:
        return strided_on, (device, source, name, offset, shape, stride, flags)
    return strided, (source, name, offset, shape, stride, flags) if flags else (source, name, offset, shape, stride)


def locate(out: Outgoing, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Place | None:
    """Return where the receiver finds the elements of `tensor`, or None when only a compacted copy should be sent."""
    shape, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.itemsize
    offset = int(tensor.storage_offset())
    span, used = _extent(shape, stride, itemsize)
    start, total = offset * itemsize, storage.nbytes()
    if span and start + span > total:
        raise ValueError(f"it needs {start + span} bytes of its storage, which has only {total}")
    key: object = storage._cdata
    if total >= LARGE_STORAGE and total >= 2 * used and key not in out.seen:
        if span > 2 * used:
            return None
        key, offset, total = (key, start, span), 0, span
    else:
        start = 0
    return share(out, key, tensor, storage, start, total), offset, shape, stride


def locate_copy(out: Outgoing, copy: torch.Tensor) -> Place:
    """Do the same for a copy made for this message, which leaves no gap and has no other user."""
    place = locate(out, copy, copy.untyped_storage())
    assert place is not None, "a compacted copy fits its storage"
    return place


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


# What follows runs on the receiver. Its names are on the wire.


class _Prototypes(dict[str, torch.Tensor]):
    """An empty tensor of each dtype: its `new` is the cheapest way to a tensor, and no default device redirects it."""

    def __missing__(self, name: str) -> torch.Tensor:
        if name not in DTYPES:
            raise SerializationError(f"This worker's torch {torch.__version__} has no dtype {name}.")
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            prototype = self[name] = torch.empty(0, dtype=DTYPES[name], device="cpu")
        return prototype


prototypes = _Prototypes()


def dtype_of(name: str) -> torch.dtype:
    """Return the type of that name. Raises if there is none."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise SerializationError(f"This worker's torch {torch.__version__} has no dtype {name!r}.") from None


def check_shape(shape: Sequence[int], itemsize: int) -> int:
    """Return the number of elements of a tensor of this shape. Raises if torch could not count its bytes."""
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise SerializationError(f"a tensor cannot have the shape {shape}: {size!r} is not the size of a dimension")
        count *= size
    if count * itemsize >= _MOST:
        raise SerializationError(f"a tensor of shape {shape} has more bytes than can be counted")
    return count


def check_place(nbytes: int, itemsize: int, offset: int, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Raise unless all elements of a tensor lie within the bytes of its storage."""
    count = check_shape(shape, itemsize)
    if len(stride) != len(shape) or type(offset) is not int or offset < 0:
        raise _misplaced(nbytes, itemsize, offset, shape, stride)
    last = offset
    for size, step in zip(shape, stride, strict=True):
        if type(step) is not int or step < 0:
            raise _misplaced(nbytes, itemsize, offset, shape, stride)
        last += (size - 1) * step
    # A tensor without elements lies nowhere; but torch should be able to count to where it begins.
    if (last + 1) * itemsize > nbytes if count else max(offset, *stride, 0) * itemsize >= _MOST:
        raise _misplaced(nbytes, itemsize, offset, shape, stride)


def _misplaced(nbytes: int, itemsize: int, offset: object, shape: object, stride: object) -> SerializationError:
    return SerializationError(
        f"a tensor with elements of {itemsize} bytes, shape {shape}, strides {stride} and offset {offset} does not lie "
        f"within the {nbytes} bytes that came for it"
    )


def check_flags(flags: int, dtype: torch.dtype) -> None:
    """Raise unless these are bits that a tensor of this type can have."""
    if type(flags) is not int or not 0 <= flags <= REQUIRES_GRAD | CONJ | NEG or (flags & CONJ and not dtype.is_complex):
        raise SerializationError(f"a tensor of {dtype} has no flags {flags!r}")


def check_device(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Raise unless a tensor on this device can lie in this storage."""
    here = storage.device
    if here != device and (here.type != device.type or (here.type != "cpu" and device.index is not None)):
        raise SerializationError(f"a tensor on {device} cannot lie in memory on {here}")


def buffer_at(number: int) -> torch.UntypedStorage:
    """Return the buffer of that number of the message that is being unpacked."""
    buffers = incoming.frame[0]
    if type(number) is not int or not 0 <= number < len(buffers):
        raise SerializationError(f"a message with {len(buffers)} buffers has no buffer {number!r}")
    return buffers[number]


def strided(
    source: Source, name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], flags: int = 0
) -> torch.Tensor:
    """Return a tensor over a storage that arrived in one of the three ways."""
    tensor: torch.Tensor = prototypes[name].new()
    if type(tensor) is not torch.Tensor:
        return without_modes(strided, source, name, offset, shape, stride, flags)
    if isinstance(source, torch.Tensor):
        tensor = _over(source, tensor, offset, shape, stride)
    else:
        storage = buffer_at(source) if type(source) is int else storage_of(source)  # (most of them are large)
        tensor = _placed(tensor, storage, offset, shape, stride)
    return flagged(tensor, flags) if flags else tensor


def _placed(
    empty: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Give an empty tensor its elements, in a storage that has them."""
    check_device(storage, empty.device)
    check_place(storage.nbytes(), empty.itemsize, offset, shape, stride)
    return empty.set_(storage, offset, shape, stride)


def _over(
    source: torch.Tensor, empty: torch.Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over the memory of an earlier one. Both count their changes in place together, as they did on the
    sender: autograd refuses to go back through the one if the other has changed what it needs. Not if they are of different
    types: torch has no way to let those share the count."""
    if source.dtype is not empty.dtype or source.is_conj() or source.is_neg() or source.layout is not torch.strided:
        return _placed(empty, source.untyped_storage(), offset, shape, stride)
    check_place(source.untyped_storage().nbytes(), source.itemsize, offset, shape, stride)
    with torch.no_grad():
        return source.as_strided(shape, stride, offset).detach()


@lru_cache(maxsize=256)
def _prototype_on(name: str, device: str) -> torch.Tensor:
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype_of(name), device=device)


def strided_on(
    device: str, source: Source, name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], flags: int
) -> torch.Tensor:
    """Return a tensor that comes from a device, or arrives on one."""
    tensor: torch.Tensor = _prototype_on(name, device).new()
    if type(tensor) is not torch.Tensor:
        return without_modes(strided_on, device, source, name, offset, shape, stride, flags)
    if isinstance(source, torch.Tensor):
        tensor = _over(source, tensor, offset, shape, stride)
    else:
        tensor = _placed(tensor, storage_on(device, source), offset, shape, stride)
    return flagged(tensor, flags) if flags else tensor


def without_modes(rebuild: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Rebuild a tensor in a thread that makes fake ones, as under `FakeTensorMode`: what arrives is real."""
    with torch._C._DisableTorchDispatch():
        return rebuild(*args)


def _zeros(name: str, shape: tuple[int, ...], flags: int, device: str = "cpu") -> torch.Tensor:
    dtype = dtype_of(name)
    nbytes = check_shape(shape, dtype.itemsize) * dtype.itemsize
    if not nbytes or torch.device(device).type != "cpu":
        return flagged(torch.zeros(shape, dtype=dtype, device=device), flags)
    try:
        with torch._C._DisableTorchDispatch():
            zeros = torch.frombuffer(untouched(nbytes), dtype=dtype).view(shape)
    except (OSError, ValueError, OverflowError) as error:
        raise SerializationError(f"there is no memory for a tensor of shape {shape}: {error}") from None
    return flagged(zeros, flags)


def flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Set the bits that are not in the data. `requires_grad` comes last: nothing before it may be recorded."""
    check_flags(flags, tensor.dtype)
    if flags & CONJ:
        torch._C._set_conj(tensor, True)
    if flags & NEG:
        torch._C._set_neg(tensor, True)
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


def storage_of(source: Source) -> torch.UntypedStorage:
    """Return the memory of a source, where it is."""
    if isinstance(source, int):
        return buffer_at(source)
    if isinstance(source, bytes):
        return from_bytes(source)
    if isinstance(source, torch.UntypedStorage):
        return source
    if not isinstance(source, torch.Tensor):
        raise SerializationError(f"a message places the memory of a tensor in a {type(source).__qualname__}")
    return source.untyped_storage()


def bare_storage_of(source: Source) -> torch.UntypedStorage:
    """Return the same for a storage into which torch itself puts tensors (those of subclasses). It cannot be made larger, so
    torch refuses a tensor that does not lie within it."""
    return fixed(storage_of(source))


def storage_on(device: str, source: Source) -> torch.UntypedStorage:
    """Return the memory of a source, on the device where it arrives."""
    place = torch.device(device)
    buffers, scope = incoming.frame
    if isinstance(source, tuple):
        if scope is None or scope.landing is None:
            raise SerializationError("a tensor from a device arrived without its memory")
        return scope.landing.storage(source, place, buffers)
    if isinstance(source, bytes | int) and device != "cpu":
        return copies.to_device(storage_of(source), place)
    return storage_of(source)


def bare_storage_on(device: str, source: Source) -> torch.UntypedStorage:
    """Return the same for a storage into which torch itself puts tensors. On the CPU it cannot be made larger, unless it
    belongs to an earlier tensor: both must remain one storage when they are sent on."""
    storage = storage_on(device, source)
    return storage if isinstance(source, torch.Tensor) else fixed(storage)
