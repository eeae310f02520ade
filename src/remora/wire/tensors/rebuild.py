"""Makes strided tensors from the storages of a message that arrived. The names of these functions are on the wire.

What a message says of a tensor is checked against the bytes that came (`check_place`) before torch sees it: torch makes a
storage larger if a tensor needs more, with whatever was in that memory before, and frees the old one under the tensors that
lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from remora.devices import copies
from remora.errors import SerializationError
from remora.wire.device_buffers import Place as CargoPlace
from remora.wire.pack_scope import incoming
from remora.wire.raw_memory import fixed, from_bytes, untouched

Source = bytes | int | CargoPlace | torch.Tensor | torch.UntypedStorage

REQUIRES_GRAD, CONJ, NEG = 1, 2, 4
_MOST = 1 << 62  # bytes: torch counts them in 63 bits

QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
DTYPES = {str(dtype)[len("torch.") :]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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


def zeros(name: str, shape: tuple[int, ...], flags: int, device: str = "cpu") -> torch.Tensor:
    dtype = dtype_of(name)
    if name in QUANTIZED:  # there is none: torch ends the process when it makes one over memory
        raise SerializationError(f"a zero tensor cannot be of the type {name}")
    nbytes = check_shape(shape, dtype.itemsize) * dtype.itemsize
    if not nbytes or torch.device(device).type != "cpu":
        return flagged(torch.zeros(shape, dtype=dtype, device=device), flags)
    try:
        with torch._C._DisableTorchDispatch():
            made = torch.frombuffer(untouched(nbytes), dtype=dtype).view(shape)
    except (OSError, ValueError, OverflowError) as error:
        raise SerializationError(f"there is no memory for a tensor of shape {shape}: {error}") from None
    return flagged(made, flags)


def flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Set the bits that are not in the data. `requires_grad` comes last: nothing before it may be recorded."""
    dtype = tensor.dtype
    if type(flags) is not int or not 0 <= flags <= REQUIRES_GRAD | CONJ | NEG or (flags & CONJ and not dtype.is_complex):
        raise SerializationError(f"a tensor of {dtype} has no flags {flags!r}")
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
