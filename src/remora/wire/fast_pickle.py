"""Pickles atoms and plain tensors, as in most calls, without a Python call for each tensor. No I/O.

A pickler with our table has to be made for each message, and calls Python for each tensor: that takes longer than the
rest of a small call. But the pickle of a tensor is always the same for its type and shape, except for the data, if it is
small, or the number of the buffer with the data, if it is large. So `pickle.dumps` writes everything else, with a number in
the place of each tensor, and a *stencil* replaces the number by the pickle of the tensor. The receiver sees the same pickle
as always. (Numbers of buffers, and of tensors with a history, are one byte: messages with more take the usual way.)

Types that upper layers send with many calls (references) may have a *writer*, which returns what replaces the number.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remora.wire.pack_scope import PackScope
from remora.wire.raw_memory import READ, raw_copy, raw_view
from remora.wire.tensors.storages import INLINE_BYTES, NAMES, ROOM

PLAIN = frozenset({type(None), bool, int, float, str})  # types that pickle treats as we would; bytes, if small
_ARE_PLAIN = PLAIN.issuperset
_ARE_PLAIN_KEYS = PLAIN.union({bytes}).issuperset
LARGE_BYTES = 1 << 19  # from here on `bytes` and `str` go beside the pickle (`large_bytes`); smaller ones inside it
SMALL_CODE = 0x52454D01  # the function that makes a small tensor on arrival, in copyreg's registry
STRIDED_CODE = 0x52454D02  # … and a large one
LINKED_CODE = 0x52454D03  # … and one whose history goes on at the receiver
REFERENCE_CODE = 0x52454D04  # … and a reference
CONTAINERS = frozenset({tuple, list, dict})
DEPTH = 4  # containers in containers: the arguments are one in the call, which is one in what is recorded of it
# Parts of a list or dictionary that are looked at one by one: with more of them, this is not the quicker way.
WIDE = 16
FEW = 8  # tensors
_TINY = 1024  # bytes that are copied sooner than looked at


def by_number(code: int) -> bytes:
    return pickle.EXT4 + struct.pack("<I", code)


_FRAME = 9  # bytes that announce a frame, behind the two that tell the protocol; the frame would have the wrong length
_PLACE = int.from_bytes(os.urandom(7), "little") | 1 << 60  # stands for a tensor: nothing else of the message is this number
_MARK = pickle.dumps(_PLACE, 5)[2 + _FRAME : -1]
_BEGIN, _END = pickle.PROTO + b"\5", pickle.STOP
_STENCILED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip

_LINK, _LINK_END = by_number(LINKED_CODE) + pickle.BININT1, pickle.TUPLE3 + pickle.REDUCE  # around the makings of a tensor

Around = tuple[bytes, bytes]  # what comes before the data, or its number, and what behind
Stencil = tuple[int, Around, Around]  # the size of the data; if it is in the pickle; if it is in a buffer
Pieces = Sequence[bytes | memoryview]  # of a pickle: the data of a tensor is copied once, when all is there
# The tensors of a message (and what has a writer, by its id), in the order in which they come. By the storage itself: their
# data is not copied yet, and a list that they are in may be changed by another thread.
Tensors = dict[object, Pieces]

Large = tuple[torch.Tensor, torch.UntypedStorage, memoryview]  # a tensor that is not in the pickle, and where its data is
Write = Callable[[Any, PackScope], bytes]

_writers: dict[type, Write] = {}
_stencils: dict[tuple[torch.dtype, torch.Size], Stencil] = {}


def is_plain(value: object) -> bool:
    """Return True if nothing in it needs our table, as in most small calls: atoms, tuples of atoms, and tuples of those."""
    if type(value) in PLAIN:
        return True
    if type(value) is not tuple:
        return _are_small_bytes(value)
    for part in value:
        if type(part) is tuple:
            for atom in part:
                if type(atom) not in PLAIN and not _are_small_bytes(atom):
                    return False
        elif type(part) not in PLAIN and (type(part) is not dict or part) and not _are_small_bytes(part):
            return False
    return True


def pickled_if_plain(value: object, *_: object) -> bytes | None:
    """The pickle of what is plain; None if it is not."""
    return pickle.dumps(value, 5) if is_plain(value) else None


def _are_small_bytes(value: object) -> bool:
    return type(value) is bytes and len(value) < LARGE_BYTES


def has_large_text(value: Any) -> bool:
    """Return True if there is a large `str` in something of which `pickled` has made a large pickle."""
    kind = type(value)
    if kind is str:
        return len(value) >= LARGE_BYTES
    if kind not in CONTAINERS:
        return False
    return any(map(has_large_text, value.values() if kind is dict else value))


class NeedsScope(Exception):
    """A value has a writer, which needs the scope."""


def register_writer(cls: type, write: Write) -> None:
    """Let `write(obj, scope)` pickle instances of exactly `cls`. Its opcodes must not memoize anything."""
    _writers[cls] = write


def pickled(
    value: Any, large: list[Large], links: list[torch.Tensor] | None = None, scope: PackScope | None = None
) -> bytes | None:
    """Return the pickle of a value of atoms, tensors and types with a writer; None if something else is in it. Large tensors
    go into that list: the data of the n-th has to be in the n-th buffer. Tensors with a history go into `links`, if
    histories are recorded."""
    tensors: Tensors = {}
    kind = type(value)
    if kind is torch.Tensor:
        written = _write(value, tensors, large, links)
        return None if written is None else b"".join((_BEGIN, *written, _END))
    if kind not in CONTAINERS:
        if kind in PLAIN or _are_small_bytes(value):
            return pickle.dumps(value, 5)
        write = _writers.get(kind)
        if write is None:
            return None
        if scope is None:
            raise NeedsScope
        return _BEGIN + write(value, scope) + _END
    twin = _twin(value, kind, tensors, large, links, scope, DEPTH)
    if twin is None:
        return None
    body = pickle.dumps(twin, 5)
    if not tensors:
        return body
    pieces = body[2 + _FRAME if body[2:3] == pickle.FRAME else 2 :].split(_MARK)
    if len(pieces) != len(tensors) + 1:  # the number is among the values after all
        return None
    woven: list[bytes | memoryview] = [_BEGIN]
    for piece, written in zip(pieces, tensors.values(), strict=False):
        woven.append(piece)
        woven += written
    woven.append(pieces[-1])
    return b"".join(woven)


def _twin(
    value: Any,
    kind: type,
    tensors: Tensors,
    large: list[Large],
    links: list[torch.Tensor] | None,
    scope: PackScope | None,
    depth: int,
) -> Any:
    """Return the value with a number in the place of each tensor: the value itself, if there is none. (An object that occurs
    twice must do so on arrival. Pickle ensures that for what has no twin; the rest has a tensor, which would occur
    twice.)"""
    if kind is not tuple and len(value) > WIDE:
        return None
    before = len(tensors)
    twin: list[Any] = []
    for part in value.values() if kind is dict else value:
        kind_of_part = type(part)
        if kind_of_part is torch.Tensor:
            if _write(part, tensors, large, links) is None:
                return None
            part = _PLACE
        elif kind_of_part in CONTAINERS:
            if part and (kind_of_part is not tuple or not _ARE_PLAIN(map(type, part))):
                part = _twin(part, kind_of_part, tensors, large, links, scope, depth - 1) if depth > 1 else None
                if part is None:
                    return None
        elif kind_of_part not in PLAIN and (kind_of_part is not bytes or len(part) >= LARGE_BYTES):
            write = _writers.get(kind_of_part)
            if write is None or id(part) in tensors:
                return None
            if scope is None:
                raise NeedsScope
            tensors[id(part)] = (write(part, scope),)
            part = _PLACE
        twin.append(part)
    if kind is dict and not _ARE_PLAIN_KEYS(map(type, value)):
        return None
    if len(tensors) == before:
        return value
    if kind is tuple:
        return tuple(twin)
    return twin if kind is list else dict(zip(value, twin, strict=True))


def _write(
    tensor: torch.Tensor, tensors: Tensors, large: list[Large], links: list[torch.Tensor] | None
) -> Pieces | None:
    """Add the pickle of a tensor to those of the message, by storage; None if the tensor is not plain."""
    try:
        stencil = _stencils.get((tensor.dtype, tensor.shape)) or _cut(tensor)
        linked = tensor.requires_grad
        if stencil is None or not tensor.is_cpu or (linked and links is None):
            return None
        nbytes, small, large_one = stencil
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes or tensor.storage_offset() or not tensor.is_contiguous() or storage in tensors:
            return None
        pointer = tensor.data_ptr()
        if not pointer or tensor.is_neg() or tensor.__dict__:  # (no memory: it is a wrapper of `torch.func`)
            return None
        data: bytes | memoryview
        if nbytes <= INLINE_BYTES or (nbytes <= ROOM and (not tensors or _has_room(nbytes, tensors))):
            before, behind = small
            data = raw_copy(pointer, nbytes) if nbytes < _TINY else raw_view(pointer, nbytes, READ)
        else:
            before, behind = large_one
            data = bytes((len(large),))
            large.append((tensor, storage, raw_view(pointer, nbytes, READ)))
        if linked:
            assert links is not None, "histories are recorded"
            written: Pieces = (_LINK, bytes((len(links),)), before, data, behind[:-1], _LINK_END)
            links.append(tensor)
        else:
            written = (before, data, behind)
    except (RuntimeError, ValueError):  # it has no storage, or no shape, of its own; or there are too many
        return None
    tensors[storage] = written
    return written


def _has_room(nbytes: int, tensors: Tensors) -> bool:
    """Return True if something of a medium size may travel inside the pickle, beside what is there."""
    return len(tensors) < FEW and nbytes <= ROOM - sum(len(piece) for written in tensors.values() for piece in written)


def _cut(tensor: torch.Tensor) -> Stencil | None:
    """Return a stencil for tensors of this type and shape; None if there is none."""
    shape, nbytes = tensor.shape, tensor.nbytes
    if tensor.dtype not in _STENCILED or not nbytes or 1 in shape or len(_stencils) >= 4096 or not tensor.is_contiguous():
        return None
    text = NAMES[tensor.dtype].encode()
    name = pickle.SHORT_BINUNICODE + bytes([len(text)]) + text
    sizes = _pickled_sizes(shape)
    small = (
        by_number(SMALL_CODE) + pickle.BINBYTES + struct.pack("<I", min(nbytes, ROOM)),  # (what has more does not need it)
        name + sizes + pickle.TUPLE3 + pickle.REDUCE,
    )
    large = (
        by_number(STRIDED_CODE) + pickle.MARK + pickle.BININT1,
        name + pickle.BININT1 + b"\0" + sizes + _pickled_sizes(tensor.stride()) + pickle.TUPLE + pickle.REDUCE,
    )
    stencil = _stencils[tensor.dtype, shape] = (nbytes, small, large)
    return stencil


def _pickled_sizes(sizes: tuple[int, ...]) -> bytes:
    found = pickle.dumps(tuple(sizes), 5)[2:-1]
    if found[:1] == pickle.FRAME:
        found = found[_FRAME:]
    return found.removesuffix(pickle.MEMOIZE)  # nothing of a stencil may be counted among what is memoized
