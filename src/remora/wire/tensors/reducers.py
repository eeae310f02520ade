"""Reducers for tensors, parameters and storages: to pickle's reduce tuples and back. Not the pickler itself.

Tensor data stays outside the pickle (see `storages`). What is not a plain strided tensor is taken apart into plain ones by
`layouts`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from remora.errors import SerializationError
from remora.wire.fast_pickle import LINKED_CODE, SMALL_CODE, STRIDED_CODE
from remora.wire.pack_scope import UnpackScope, current_unpack_scope
from remora.wire.raw_memory import raw_copy, raw_fill
from remora.wire.tensors import layouts
from remora.wire.tensors.rebuild import (
    CONJ,
    DTYPES,
    NEG,
    QUANTIZED,
    Source,
    bare_storage_of,
    bare_storage_on,
    check_place,
    check_shape,
    dtype_of,
    flagged,
    prototypes,
    strided,
    without_modes,
)
from remora.wire.tensors.storages import INLINE_BYTES, NAMES, Outgoing, Reduced, cannot_send, reduce_strided

_PLAIN_NAMES = {dtype: name for dtype, name in NAMES.items() if name not in QUANTIZED}
_COMPLEX = {name for dtype, name in NAMES.items() if dtype.is_complex}


def reduce_tensor(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    """Reduce a `torch.Tensor`. This is the hot path: a small tensor that owns its storage never leaves it."""
    name = _PLAIN_NAMES.get(tensor.dtype)
    if name is None or not tensor.is_cpu or out.moves_cpu:
        return _reduce_unusual(out, tensor)
    try:
        storage = tensor.untyped_storage()
        shape = tuple(tensor.shape)
        nbytes = storage.nbytes()
    except RuntimeError:  # no storage or no shape of its own: sparse, nested, mkldnn, a wrapper of torch.func
        return _reduce_unusual(out, tensor)
    linked = tensor.requires_grad and out.links() is not None
    flags = 1 if tensor.requires_grad and not linked and not out.detached() else 0
    if tensor.is_neg() or (name in _COMPLEX and tensor.is_conj()):
        flags |= _bits(tensor)
    if (
        nbytes <= out.room
        and nbytes == tensor.nbytes
        and tensor.is_contiguous()
        and (1 not in shape or _is_row_major(shape, tensor.stride()))
        and not tensor.storage_offset()
        and (key := storage._cdata) not in out.seen
        and (pointer := tensor.data_ptr())
    ):
        out.seen[key] = tensor
        out.room = max(out.room - nbytes, INLINE_BYTES)
        data = raw_copy(pointer, nbytes)
        reduced: Reduced = (_small, (data, name, shape, flags) if flags else (data, name, shape))
    else:
        reduced = reduce_strided(out, tensor, storage, name, flags)
    if linked:
        reduced = _with_link(out, tensor, reduced)
    return _with_attributes(tensor, reduced) if tensor.__dict__ else reduced


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if the strides are row-major. Stricter than `is_contiguous`, which ignores dimensions of size 1."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= size
    return True


def _bits(tensor: torch.Tensor) -> int:
    return (CONJ if tensor.is_conj() else 0) | (NEG if tensor.is_neg() else 0)


def _reduce_unusual(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    reduced = _reduce_placed(out, tensor) or layouts.reduce_layout(out, tensor)
    if tensor.requires_grad:
        reduced = _with_link(out, tensor, reduced)
    return _with_attributes(tensor, reduced) if tensor.__dict__ else reduced


def _reduce_placed(out: Outgoing, tensor: torch.Tensor) -> Reduced | None:
    """Reduce a strided tensor that is on a device or arrives on one; None if it is something else."""
    if tensor.is_meta or not (out.moves_cpu or not tensor.is_cpu):
        return None
    out.target(tensor.device)  # or raise, whatever it is
    name = _PLAIN_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:
        return None  # a wrapper of torch.func, and the like
    linked = tensor.requires_grad and out.links() is not None
    flags = 1 if tensor.requires_grad and not linked and not out.detached() else 0
    return reduce_strided(out, tensor, storage, name, flags | _bits(tensor))


def refuse_fake(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    """Raise: a fake tensor has a shape and no data to send."""
    raise cannot_send(tensor, "a fake tensor has no data")


def reduce_parameter(out: Outgoing, parameter: torch.nn.Parameter) -> Reduced:
    """Reduce an `nn.Parameter`: its tensor, and what was set on it."""
    # `detach` and not `data`, because it shares the parameter's count of writes.
    reduced: Reduced = (torch.nn.Parameter, (parameter.detach(), parameter.requires_grad))
    if parameter.requires_grad:
        reduced = _with_link(out, parameter, reduced)
    return _with_attributes(parameter, reduced) if parameter.__dict__ else reduced


def reduce_storage(out: Outgoing, storage: torch.UntypedStorage) -> Reduced:
    """Reduce a bare storage, as the reduce methods of tensor subclasses do."""
    if storage.device.type == "meta":
        return _meta_storage, (storage.nbytes(),)
    on_host = storage.device.type == "cpu"
    device = str(out.target(storage.device)) if out.moves_cpu or not on_host else "cpu"
    key = storage._cdata
    first: Source | None = out.seen.get(key)
    if first is None:
        out.seen[key] = storage
        first = (out.place if on_host else out.load)(storage, 0, storage.nbytes())
    if device != "cpu" or not on_host:
        return bare_storage_on, (device, first)
    out.untracked = out.untracked or type(first) is not bytes
    return bare_storage_of, (first,)


def reduce_typed_storage(out: Outgoing, storage: torch.TypedStorage) -> Reduced:
    """Reduce a typed storage: the untyped one, and the type."""
    return _typed_storage, (storage._untyped_storage, NAMES[storage.dtype])


def _with_link(out: Outgoing, tensor: torch.Tensor, reduced: Reduced) -> Reduced:
    """Let the receiver continue the history of this tensor, if histories are recorded."""
    links = out.links()
    if links is None:
        return reduced
    links.append(tensor)
    return linked_tensor, (len(links) - 1, reduced[0], reduced[1])


def _with_attributes(tensor: torch.Tensor, reduced: Reduced) -> Reduced:
    """Let what the program set on a tensor object travel with it, as `torch.save` does."""
    return (*reduced, dict(tensor.__dict__), None, None, _set_attributes)


# What follows runs on the receiver. Its names are on the wire.


def _small(data: bytes, name: str, shape: tuple[int, ...], flags: int = 0) -> torch.Tensor:
    prototype, nbytes = prototypes[name], len(data)
    if prod(shape) * prototype.itemsize != nbytes:  # before any memory is asked for
        raise SerializationError(f"{nbytes} bytes came for a tensor of {prototype.dtype} and shape {shape}")
    tensor: torch.Tensor = prototype.new(*shape)
    if type(tensor) is not torch.Tensor:
        return without_modes(_small, data, name, shape, flags)
    if not shape:
        tensor.resize_(())  # `new()` has the shape (0,)
    if nbytes != tensor.nbytes:  # (what is no shape may have been taken for one)
        raise SerializationError(f"{nbytes} bytes came for a tensor of {tensor.nbytes}")
    raw_fill(tensor.data_ptr(), data, nbytes)
    return flagged(tensor, flags) if flags else tensor


def _meta_storage(nbytes: int) -> torch.UntypedStorage:
    check_shape((nbytes,), 1)
    return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]


def _typed_storage(storage: torch.UntypedStorage, name: str) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype_of(name), _internal=True)  # type: ignore[no-untyped-call]


def linked_tensor(number: int, build: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a tensor with a history on its sender. The caller of `unpack` gives it one here."""
    scope = current_unpack_scope()
    tensor = None
    if scope is not None and build is strided and isinstance(args[0], torch.Tensor):  # it has the memory of an earlier one
        with torch._C._DisableTorchDispatch():
            tensor = _as_view(scope, number, args)
    if tensor is None:
        tensor = build(*args)
    if tensor.requires_grad:
        tensor.requires_grad_(False)
    if scope is not None:
        scope.links[number] = tensor
    return tensor


def _as_view(scope: UnpackScope, number: int, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return a view of an earlier tensor with a history, if both share elements, and not merely a tensor over the same
    memory. Autograd would not know that a change of one in place changes the other, and compute wrong gradients; with a
    view, it raises an error."""
    source, name, offset, shape, stride, *flags = args
    if flags or 0 in shape:
        return None
    storage = source.untyped_storage()
    check_place(storage.nbytes(), dtype_of(name).itemsize, offset, shape, stride)
    key = storage._cdata, name
    owners = scope.owners.get(key)  # each element has the number of a tensor behind it, and 1
    if owners is None:
        size = storage.nbytes() // DTYPES[name].itemsize
        owners = scope.owners[key] = torch.zeros(size, dtype=torch.int32, device="cpu")
        first = next((i for i, each in reversed(scope.links.items()) if each is source), None)
        if first is not None and source.dtype is DTYPES[name] and not source.is_conj() and not source.is_neg():
            owners.as_strided(source.shape, source.stride(), source.storage_offset()).fill_(first + 1)
    places = owners.as_strided(shape, stride, offset)
    owner = int(places.max())
    places.fill_(number + 1)
    return scope.links[owner - 1].as_strided(shape, stride, offset) if owner else None


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, object]) -> None:
    tensor.__dict__.update(attributes)


# Those that nearly every message with tensors needs go by number: that is quicker to find than a name.
copyreg.add_extension(_small.__module__, _small.__qualname__, SMALL_CODE)
copyreg.add_extension(strided.__module__, strided.__qualname__, STRIDED_CODE)
copyreg.add_extension(linked_tensor.__module__, linked_tensor.__qualname__, LINKED_CODE)
