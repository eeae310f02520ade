"""Tensors that are not plain strided ones: taken apart into tensors that are, and put together again. No bytes here.

A tensor that torch cannot take apart raises `SerializationError`, which names it; no tensor ends the process.
"""

from __future__ import annotations

import math

import torch

from remora.errors import SerializationError
from remora.wire.tensors.rebuild import (
    QUANTIZED,
    Source,
    check_device,
    check_place,
    check_shape,
    dtype_of,
    flagged,
    storage_on,
)
from remora.wire.tensors.storages import NAMES, Outgoing, Reduced, cannot_send, locate, share

_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}  # types with several elements in a byte
_COMPRESSED = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
_LAYOUTS = {name: layout for layout, (name, _, _) in _COMPRESSED.items()}
_Quantizer = tuple[float, int] | tuple[torch.Tensor, torch.Tensor, int]


def reduce_layout(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor whose storage and strides do not say everything."""
    try:
        reduced = _take_apart(out, tensor)
    except SerializationError:
        raise
    except Exception as error:
        raise cannot_send(tensor, str(error)) from error
    if reduced is None:
        raise cannot_send(tensor, "it has no storage of its own")
    return reduced


def _take_apart(out: Outgoing, tensor: torch.Tensor) -> Reduced | None:
    wants_gradient = tensor.requires_grad and not out.detached()
    if tensor.is_meta:
        return _meta, (NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), int(wants_gradient))
    if tensor.is_nested and tensor.layout is torch.strided:
        plain = tensor.detach()
        parts = (plain._nested_tensor_size(), plain._nested_tensor_strides(), plain._nested_tensor_storage_offsets())
        return _nested, (plain.values(), *parts, wants_gradient)
    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        return _coo, (plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced(), wants_gradient)
    if tensor.layout in _COMPRESSED:
        plain = tensor.detach()
        layout, rows, columns = _COMPRESSED[tensor.layout]
        indices = getattr(plain, rows)(), getattr(plain, columns)()
        return _compressed, (layout, *indices, plain.values(), tuple(plain.shape), wants_gradient)
    if tensor.is_mkldnn:
        return _mkldnn, (tensor.detach().to_dense(), wants_gradient)
    return _reduce_quantized(out, tensor) if tensor.is_quantized else None


def _reduce_quantized(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    quantizer: _Quantizer
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        quantizer = tensor.q_scale(), tensor.q_zero_point()
    else:
        quantizer = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    if NAMES[tensor.dtype] in _PER_BYTE:
        storage = tensor.untyped_storage()
        source = share(out, storage._cdata, tensor, storage, 0, storage.nbytes())
        place = source, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
    else:
        place = locate(out, tensor, tensor.untyped_storage())
    device = str(out.target(tensor.device)) if out.moves_cpu or not tensor.is_cpu else "cpu"
    return _quantized, (NAMES[tensor.dtype], quantizer, *place, device)


# What follows runs on the receiver. Its names are on the wire.


def _meta(name: str, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> torch.Tensor:
    dtype = dtype_of(name)
    check_place(1 << 62, dtype.itemsize, 0, shape, stride)  # (there are no bytes; torch has to count them all the same)
    return flagged(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flags)


def _nested(
    values: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor, requires_grad: bool
) -> torch.Tensor:
    sizes, strides, offsets = _table(sizes), _table(strides), _table(offsets)
    _check_nested(values, sizes, strides, offsets)
    tensor: torch.Tensor = torch._nested_view_from_buffer(values, sizes, strides, offsets)
    return tensor.detach().requires_grad_(requires_grad)


def _table(numbers: torch.Tensor) -> torch.Tensor:
    """Return one of the three tables of a nested tensor, on the CPU, whatever a device map says of it. It is a copy: torch
    believes it from now on, and what came may be the memory of another tensor of the message as well."""
    if numbers.dtype is not torch.int64 or numbers.layout is not torch.strided or numbers.is_nested:
        raise SerializationError("a nested tensor is not made of a row of values and three tables of int64")
    if numbers.is_neg() or not numbers.is_contiguous():  # torch reads the memory from its beginning to its end
        raise SerializationError("a table of a nested tensor is not in one piece")
    return numbers.detach().cpu().clone()


def _check_nested(values: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise unless each of the tensors in a nested one lies within the values that came."""
    numbers = (sizes, strides, offsets)
    if values.layout is not torch.strided or values.is_nested or values.dim() != 1 or not values.is_contiguous():
        raise SerializationError("a nested tensor is not made of a row of values and three tables of int64")
    # (torch reads the first row of each table, whether there is one or not.)
    if sizes.dim() != 2 or not len(sizes) or sizes.shape != strides.shape or sizes.shape[:1] != offsets.shape:
        raise SerializationError(f"a nested tensor has {tuple(sizes.shape)} sizes, {tuple(strides.shape)} strides and "
                                 f"{tuple(offsets.shape)} offsets")
    if not sizes.numel():
        if int(offsets.min()) < 0 or int(offsets.max()) >= values.numel():
            raise SerializationError("a nested tensor reaches beyond its values")
        return
    least = min(int(each.min()) for each in numbers)
    most = int(sizes.max()) * int(strides.max()) * sizes.shape[-1] + int(offsets.max())
    if least < 0 or most >= 1 << 62:
        raise SerializationError(f"the sizes, strides or offsets of a nested tensor are not valid: {least}, {most}")
    last = offsets + ((sizes - 1) * strides).sum(1)
    if bool(((last >= values.numel()) & (sizes > 0).all(1)).any()):
        raise SerializationError(f"a nested tensor reaches to element {int(last.max())} of {values.numel()} that came")


def _coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    check_shape(shape, 0)
    if coalesced and indices.dim() == 2 and indices.shape[1] > 1 and not indices.stride(1):  # (torch would make a copy)
        raise SerializationError(f"the indices of a sparse tensor of shape {shape} are not valid: all of them are the same")
    try:
        # torch looks at each index, and at their order if they are said to be in order: 2 to 4 ns each.
        tensor = torch.sparse_coo_tensor(
            indices, values, shape, device=values.device, check_invariants=True, is_coalesced=bool(coalesced)
        )
    except (RuntimeError, TypeError, IndexError) as error:
        raise _makes_no_sense(torch.sparse_coo, shape, error) from error
    return tensor._coalesced_(bool(coalesced)).requires_grad_(requires_grad)


def _makes_no_sense(layout: torch.layout, shape: object, error: Exception) -> SerializationError:
    return SerializationError(f"the data of a {layout} tensor of shape {shape} is not valid: {error}")


def _compressed(
    layout: str,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    check_shape(shape, 0)
    kind = _LAYOUTS.get(layout)
    if kind is None:
        raise SerializationError(f"there is no compressed layout {layout!r}")
    if kind in (torch.sparse_bsr, torch.sparse_bsc) and 0 in values.shape[-2:]:  # torch divides by their size later
        raise SerializationError(f"the data of a {kind} tensor is not valid: its blocks have the shape {values.shape[-2:]}")
    try:
        tensor = torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=kind, device=values.device, check_invariants=True
        )
    except (RuntimeError, TypeError, IndexError) as error:
        raise _makes_no_sense(kind, shape, error) from error
    return tensor.requires_grad_(requires_grad)


def _mkldnn(dense: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    _check_all_came(dense)
    return dense.cpu().to_mkldnn().requires_grad_(requires_grad)


def _quantized(
    name: str,
    quantizer: _Quantizer,
    source: Source,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: str,
) -> torch.Tensor:
    dtype = dtype_of(name)
    if name not in QUANTIZED:
        raise SerializationError(f"{name} is not a quantised type")
    storage = storage_on(device, source)
    check_device(storage, torch.device(device))
    if name in _PER_BYTE:
        _check_packed(name, storage.nbytes(), offset, shape, stride)
    else:
        check_place(storage.nbytes(), dtype.itemsize, offset, shape, stride)
    if len(quantizer) == 2:
        scale, zero_point = quantizer
        if type(zero_point) is not int or abs(zero_point) >= 1 << 31 or not math.isfinite(scale):
            raise SerializationError(f"a quantised tensor cannot have the scale {scale!r} and the zero point {zero_point!r}")
        tensor = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, dtype=dtype, device=device)
    else:
        scales, zero_points, axis = quantizer
        _check_channels(scales, zero_points, axis, shape)
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )
    if name in _PER_BYTE:  # (`set_` would take each element for a byte, and make the storage larger)
        tensor.untyped_storage().copy_(storage)
        return tensor
    return tensor.set_(storage, offset, shape, stride)


def _check_packed(name: str, nbytes: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Raise unless a tensor with several elements in a byte is plain, and all its bytes came: torch knows no views of it."""
    count = check_shape(shape, 1)
    per_byte = _PER_BYTE[name]
    row = shape[-1] if shape else 1
    expected = count // row * -(-row // per_byte) if count else 0
    if offset != 0 or nbytes != expected:
        raise SerializationError(f"{nbytes} bytes came for a tensor of {name} and shape {shape}, which has {expected}")


def _check_channels(scales: torch.Tensor, zero_points: torch.Tensor, axis: int, shape: tuple[int, ...]) -> None:
    if type(axis) is not int or not 0 <= axis < len(shape):
        raise SerializationError(f"a tensor of shape {shape} has no axis {axis!r} of channels")
    for what, each in (("scales", scales), ("zero points", zero_points)):
        if not isinstance(each, torch.Tensor) or tuple(each.shape) != (shape[axis],) or each.layout is not torch.strided:
            raise SerializationError(f"a tensor of shape {shape} with channels along axis {axis} came with other {what}")
        _check_all_came(each)


def _check_all_came(tensor: torch.Tensor) -> None:
    """Raise if a tensor has more elements than came, as an expanded one has: torch is about to copy all of them."""
    if tensor.layout is torch.strided and tensor.numel() * tensor.itemsize > (came := tensor.untyped_storage().nbytes()):
        raise SerializationError(f"a tensor of shape {tuple(tensor.shape)} has more elements than {came} bytes can hold")
