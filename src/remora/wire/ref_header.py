"""The header of a message that carries references. The receiver reads it without unpickling the rest.

    u32     length of the list of references; 0 if there are none
    u8      what the message makes: 0 nothing, 1 a value, 2 a value made by a torch operator or a TorchScript function
    4 u64   only if it makes one: the id of the value and the id of its first fork
    list    the references, pickled
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from remora.errors import SerializationError
from remora.wire.frames import REFERENCES
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed

Body = bytes | bytearray | memoryview
Creates = tuple[int, int, int, int, bool]  # the value's id, its first fork's id, and whether it is a TorchScript value

_CARRIES = struct.Struct("<IB")
_MAKES = struct.Struct("<IBQQQQ")


def attach(packed: Packed, scope: PackScope, creates: Creates | None = None) -> int:
    """Put the header in front of a packed message that needs one. Return the flags that say so."""
    packed.undo = scope.undo
    listed = pickle.dumps(scope.attachments, 5) if scope.attachments else b""
    if creates is None:
        head = _CARRIES.pack(len(listed), 0)
    else:
        value_on, value, fork_on, fork, script = creates
        head = _MAKES.pack(len(listed), 2 if script else 1, value_on, value, fork_on, fork)
    packed.body = head + listed + packed.body
    return REFERENCES


def detach(body: Body) -> tuple[Creates | None, list[Any], Body]:
    """Return what the message makes, the references in it, and the rest."""
    length, makes = _CARRIES.unpack_from(body)
    if not makes:
        start, creates = _CARRIES.size, None
    else:
        start = _MAKES.size
        _, _, value_on, value, fork_on, fork = _MAKES.unpack_from(body)
        creates = (value_on, value, fork_on, fork, makes == 2)
    if not length:
        return creates, [], body[start:]
    end = start + length
    if end > len(body):
        raise SerializationError(f"a message of {len(body)} bytes announces {length} bytes of references")
    view = memoryview(body)
    return creates, pickle.loads(view[start:end]), view[end:]
