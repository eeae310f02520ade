"""Sends large `bytes`, `bytearray` and `str` beside the pickle, as tensors, wherever in a value they are. No I/O.

The C pickler does not ask a dispatch table about them. But it does not copy them either, if they are large and it writes to
a file: it hands the file what it has, which ends with an opcode and the length, and then the object itself. Our file is a
list of pieces (`_Packer`), so the object is a piece of its own there. It becomes a buffer of the message, and a call of a
function that finds the buffer on arrival takes the place of the opcode. The receiver sees a pickle like any other. A `str`
is handed over as `bytes` that the pickler has encoded.

(An interpreter that writes its pickles in another way has them whole: what is not found here stays where it is.)
"""

from __future__ import annotations

import copyreg
import ctypes
import pickle
import struct
from typing import Any

from remora.wire.fast_pickle import LARGE_BYTES, by_number
from remora.wire.raw_memory import buffer_of, copied, fill_fresh, raw_copy
from remora.wire.tensors.rebuild import buffer_at
from remora.wire.tensors.storages import Outgoing

BYTES_CODE = 0x52454D05  # the function that makes bytes on arrival, in copyreg's registry
BYTEARRAY_CODE = 0x52454D06  # … and a bytearray
TEXT_CODE = 0x52454D07  # … and a str
_TEXT_OPCODES = (pickle.BINUNICODE, pickle.BINUNICODE8)

_CALL = pickle.TUPLE1 + pickle.REDUCE

# Both know addresses of Python objects, so they are called with the interpreter lock held.
_address_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_address_of_bytearray = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyByteArray_AsString", ctypes.pythonapi)
)
_new_bytearray = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)


def set_beside(pieces: list[Any], out: Outgoing) -> None:
    """Turn the pieces of a pickle that are large objects into buffers of the message."""
    for number in range(1, len(pieces)):
        piece = pieces[number]
        if type(piece) not in (bytes, bytearray) or len(piece) < LARGE_BYTES:  # (it may be memory of others)
            continue
        before = pieces[number - 1]
        header = _header(before, piece)
        if not header:
            continue
        if type(piece) is bytes:
            is_text = before[-header:][:1] in _TEXT_OPCODES
            code, buffer = TEXT_CODE if is_text else BYTES_CODE, memoryview(piece)
        else:
            # The program may change it as soon as it has made the call; and could not make it longer or shorter while
            # there is a view of it.
            code, buffer = BYTEARRAY_CODE, _frozen(piece)
        call = by_number(code) + pickle.BININT + struct.pack("<i", len(out.buffers)) + _CALL
        out.buffers.append(buffer)
        pieces[number - 1] = before[:-header] + call
        pieces[number] = b""


def _header(before: bytes, piece: Any) -> int:
    """Return the number of bytes at the end of a piece that announce the next one; 0 if they do not."""
    if type(piece) is bytes:
        length = struct.pack("<Q", len(piece))
        if before.endswith((pickle.BINBYTES8 + length, pickle.BINUNICODE8 + length)):
            return 9
        return 5 if before.endswith((pickle.BINBYTES + length[:4], pickle.BINUNICODE + length[:4])) else 0
    return 9 if before[-9:-8] == pickle.BYTEARRAY8 else 0


def _frozen(data: bytearray) -> memoryview:
    with memoryview(data) as view:
        found = copied(view)
    if type(found.obj) is not bytes:
        found.obj.lasting = True  # type: ignore[attr-defined]  # see `remora.wire.raw_memory.lasts`
    return found


# What follows runs on the receiver. Its names are on the wire.


def _bytes(number: int) -> bytes:
    storage = buffer_at(number)
    made: bytes = raw_copy(None, storage.nbytes())
    fill_fresh(_address_of_bytes(made), storage.data_ptr(), len(made))  # (no other thread has it yet)
    return made


def _bytearray(number: int) -> bytearray:
    storage = buffer_at(number)
    made: bytearray = _new_bytearray(None, storage.nbytes())
    fill_fresh(_address_of_bytearray(made), storage.data_ptr(), len(made))
    return made


def _text(number: int) -> str:
    return str(buffer_of(buffer_at(number)), "utf-8", "surrogatepass")


copyreg.add_extension(_bytes.__module__, _bytes.__qualname__, BYTES_CODE)
copyreg.add_extension(_bytearray.__module__, _bytearray.__qualname__, BYTEARRAY_CODE)
copyreg.add_extension(_text.__module__, _text.__qualname__, TEXT_CODE)
