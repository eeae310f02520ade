"""Atoms and tensors of the plain kind, as in most calls: pickled without asking us for each tensor. No I/O.

A pickler with our table has to be made for each message, and turns to Python for each tensor: that takes longer than the
rest of a small call. But the pickle of a tensor is always the same for its type and shape, except for the data, if it is
small, or the number of the buffer that the data is in, if it is large. So `pickle.dumps` writes everything else, with a
number in the place of each tensor, and what a *stencil* makes of the tensor takes the place of the number. The receiver
sees the same pickle as always.
"""

from __future__ import annotations

import os
import pickle
import struct
from types import FunctionType
from typing import Any

import torch

from remora.wire.memory import raw_copy
from remora.wire.storages import INLINE_BYTES, NAMES, ROOM

PLAIN = frozenset({type(None), bool, int, float, str, bytes, FunctionType})  # what pickle treats as we would
SMALL_CODE = 0x52454D01  # the function that makes a small tensor on arrival, in copyreg's registry
STRIDED_CODE = 0x52454D02  # … and a large one
MOST_LARGE = 256  # in one message: so many numbers fit into a byte

_FRAME = 9  # bytes that announce a frame, behind the two that tell the protocol; the frame would have the wrong length
_PLACE = int.from_bytes(os.urandom(7), "little") | 1 << 60  # stands for a tensor: nothing else of the message is this number
_MARK = pickle.dumps(_PLACE, 5)[2 + _FRAME : -1]
_BEGIN, _END = pickle.PROTO + b"\5", pickle.STOP
_STENCILED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip

_stencils: dict[tuple[torch.dtype, torch.Size], tuple[int, bytes, bytes]] = {}  # size of the data, what comes before, behind


def is_plain(value: object) -> bool:
    """Whether nothing in it needs our table, as in most small calls: atoms, tuples of atoms, and tuples of those."""
    if type(value) in PLAIN:
        return True
    if type(value) is not tuple:
        return False
    for part in value:
        if type(part) is tuple:
            for atom in part:
                if type(atom) not in PLAIN:
                    return False
        elif type(part) not in PLAIN and (type(part) is not dict or part):
            return False
    return True


def pickled(value: Any, large: list[torch.Tensor]) -> bytes | None:
    """The pickle of what is plain but for tensors; None if something else is in it. Tensors that are large go into that
    list: the data of the n-th has to be in the n-th buffer."""
    tensors: dict[int, bytes] = {}
    kind = type(value)
    if kind is torch.Tensor:
        written = _write(value, tensors, large)
        return None if written is None else _BEGIN + written + _END
    if kind is not tuple:
        return pickle.dumps(value, 5) if kind in PLAIN else None
    twin = _twin(value, tensors, large, 2)
    if twin is None:
        return None
    if not tensors:
        return pickle.dumps(value, 5)
    body = pickle.dumps(twin, 5)
    pieces = body[2 + _FRAME if body[2:3] == pickle.FRAME else 2 :].split(_MARK)
    if len(pieces) != len(tensors) + 1:  # the number is among the values after all
        return None
    pieces[0] = _BEGIN + pieces[0]
    woven = [b""] * (len(pieces) + len(tensors))
    woven[::2] = pieces
    woven[1::2] = tensors.values()
    return b"".join(woven)


def _twin(
    value: tuple[Any, ...], tensors: dict[int, bytes], large: list[torch.Tensor], depth: int
) -> tuple[Any, ...] | None:
    """The same with a number in the place of each tensor."""
    twin: list[Any] = []
    for part in value:
        kind = type(part)
        if kind is torch.Tensor:
            if _write(part, tensors, large) is None:
                return None
            part = _PLACE
        elif kind is tuple and depth > 1:
            part = _twin(part, tensors, large, depth - 1)
            if part is None:
                return None
        elif kind not in PLAIN and (kind is not dict or part):
            return None
        twin.append(part)
    return tuple(twin)


def _write(tensor: torch.Tensor, tensors: dict[int, bytes], large: list[torch.Tensor]) -> bytes | None:
    """Add the pickle of a tensor to those of the message, by storage; None if it is not that simple."""
    try:
        stencil = _stencils.get((tensor.dtype, tensor.shape)) or _cut(tensor)
        if stencil is None or not tensor.is_cpu or tensor.requires_grad:
            return None
        nbytes, before, behind = stencil
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() != nbytes or tensor.storage_offset() or not tensor.is_contiguous() or key in tensors:
            return None
        pointer = tensor.data_ptr()
        if not pointer or tensor.is_neg() or tensor.__dict__:  # (no memory: it is a wrapper of `torch.func`)
            return None
        if nbytes <= INLINE_BYTES:
            written: bytes = before + raw_copy(pointer, nbytes) + behind
        else:
            written = before + bytes((len(large),)) + behind
            large.append(tensor)
    except (RuntimeError, ValueError):  # it has no storage, or no shape, of its own; or there are too many
        return None
    tensors[key] = written
    return written


def _cut(tensor: torch.Tensor) -> tuple[int, bytes, bytes] | None:
    """A stencil for tensors of this type and shape; None if there is none."""
    shape, nbytes = tensor.shape, tensor.nbytes
    if tensor.dtype not in _STENCILED or 1 in shape or len(_stencils) >= 4096 or not tensor.is_contiguous():
        return None
    text = NAMES[tensor.dtype].encode()
    name = pickle.SHORT_BINUNICODE + bytes([len(text)]) + text
    sizes = _pickled_sizes(shape)
    if 0 < nbytes <= INLINE_BYTES:
        before = pickle.EXT4 + struct.pack("<I", SMALL_CODE) + pickle.BINBYTES + struct.pack("<I", nbytes)
        behind = name + sizes + pickle.TUPLE3 + pickle.REDUCE
    elif nbytes > ROOM:
        before = pickle.EXT4 + struct.pack("<I", STRIDED_CODE) + pickle.MARK + pickle.BININT1
        behind = name + pickle.BININT1 + b"\0" + sizes + _pickled_sizes(tensor.stride()) + pickle.TUPLE + pickle.REDUCE
    else:
        return None  # inside the pickle or not: that depends on what else is in the message
    stencil = _stencils[tensor.dtype, shape] = (nbytes, before, behind)
    return stencil


def _pickled_sizes(sizes: tuple[int, ...]) -> bytes:
    found = pickle.dumps(tuple(sizes), 5)[2:-1]
    if found[:1] == pickle.FRAME:
        found = found[_FRAME:]
    return found.removesuffix(pickle.MEMOIZE)  # nothing of a stencil may be counted among what is memoized
