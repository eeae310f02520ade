"""Tensors that are not plain strided ones: taken apart into tensors that are, and put together again. No bytes here.

Whatever the tensor, the process lives: what torch cannot take apart raises `SerializationError` and says what it was.
"""

from __future__ import annotations

import torch

from remora.errors import SerializationError
from remora.wire.storages import (
    DTYPES,
    NAMES,
    Outgoing,
    Reduced,
    Source,
    cannot_send,
    compacted,
    flagged,
    locate,
    locate_copy,
    share,
    storage_on,
)

QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
_SEVERAL_PER_BYTE = {"quint4x2", "quint2x4"}
_COMPRESSED = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
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
        return _reduce_meta(tensor, wants_gradient)
    if tensor.is_nested and tensor.layout is torch.strided:
        return _reduce_nested(tensor, wants_gradient)
    if tensor.layout is torch.sparse_coo:
        return _reduce_coo(tensor, wants_gradient)
    if tensor.layout in _COMPRESSED:
        return _reduce_compressed(tensor, wants_gradient)
    if tensor.is_mkldnn:
        return _mkldnn, (tensor.detach().to_dense(), wants_gradient)
    if tensor.is_quantized:
        return _reduce_quantized(out, tensor)
    return None


def _reduce_meta(tensor: torch.Tensor, wants_gradient: bool) -> Reduced:
    return _meta, (NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), int(wants_gradient))


def _reduce_nested(tensor: torch.Tensor, wants_gradient: bool) -> Reduced:
    plain = tensor.detach()
    parts = (plain._nested_tensor_size(), plain._nested_tensor_strides(), plain._nested_tensor_storage_offsets())
    return _nested, (plain.values(), *parts, wants_gradient)


def _reduce_coo(tensor: torch.Tensor, wants_gradient: bool) -> Reduced:
    plain = tensor.detach()
    return _coo, (plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced(), wants_gradient)


def _reduce_compressed(tensor: torch.Tensor, wants_gradient: bool) -> Reduced:
    plain = tensor.detach()
    layout, rows, columns = _COMPRESSED[tensor.layout]
    indices = getattr(plain, rows)(), getattr(plain, columns)()
    return _compressed, (layout, *indices, plain.values(), tuple(plain.shape), wants_gradient)


def _reduce_quantized(out: Outgoing, tensor: torch.Tensor) -> Reduced:
    quantizer: _Quantizer
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        quantizer = tensor.q_scale(), tensor.q_zero_point()
    else:
        quantizer = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    if NAMES[tensor.dtype] in _SEVERAL_PER_BYTE:
        storage = tensor.untyped_storage()
        source = share(out, storage._cdata, tensor, storage, 0, storage.nbytes())
        place = source, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
    else:
        place = locate(out, tensor, tensor.untyped_storage()) or locate_copy(
            out, compacted(tensor, tensor.untyped_storage())
        )
    device = str(out.target(tensor.device)) if out.moves_cpu or not tensor.is_cpu else "cpu"
    return _quantized, (NAMES[tensor.dtype], quantizer, *place, device)


# What follows runs on the receiver. Its names are on the wire.


def _meta(name: str, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> torch.Tensor:
    return flagged(torch.empty_strided(shape, stride, dtype=DTYPES[name], device="meta"), flags)


def _nested(
    values: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor, requires_grad: bool
) -> torch.Tensor:
    shape = (each.cpu() for each in (sizes, strides, offsets))  # whatever a device map says of the CPU
    tensor: torch.Tensor = torch._nested_view_from_buffer(values, *shape)
    return tensor.detach().requires_grad_(requires_grad)


def _coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False)
    return tensor._coalesced_(coalesced).requires_grad_(requires_grad)


def _compressed(
    layout: str,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=getattr(torch, layout), device=values.device, check_invariants=False
    )
    return tensor.requires_grad_(requires_grad)


def _mkldnn(dense: torch.Tensor, requires_grad: bool) -> torch.Tensor:
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
    dtype = DTYPES[name]
    if len(quantizer) == 2:
        scale, zero_point = quantizer
        tensor = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, dtype=dtype, device=device)
    else:
        scales, zero_points, axis = quantizer
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )
    return tensor.set_(storage_on(device, source), offset, shape, stride)
