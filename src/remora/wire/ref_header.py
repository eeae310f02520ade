"""The header of a message that carries references. The receiver reads it without unpickling the rest.

    u32     length of the list of references; 0 if there are none
    u8      what the message makes: 0 nothing, 1 a value, 2 a value made by a torch operator or a TorchScript function
    4 u64   only if it makes one: the id of the value and the id of its first fork
    list    for each reference:
            i64     the owner
            4 u64   the value's id and the fork's id
            i64     the parent; -1: none
            u8      1 if the value is one of TorchScript
            u16     length of the owner's incarnation
            u32     length of the owner's record; 0 if it is not sent
            the incarnation (UTF-8), the record (JSON)

The list is no pickle: a pickle says how long the unpickler's memo has to be, and damage there takes hundreds of megabytes.
"""

from __future__ import annotations

import struct

from remora.errors import SerializationError
from remora.wire.frames import REFERENCES
from remora.wire.pack_scope import Attachment, PackScope
from remora.wire.packed import Packed

Body = bytes | bytearray | memoryview
Creates = tuple[int, int, int, int, bool]  # the value's id, its first fork's id, and whether it is a TorchScript value

_CARRIES = struct.Struct("<IB")
_MAKES = struct.Struct("<IBQQQQ")
_REFERENCE = struct.Struct("<qQQQQqBHI")
_KINDS = ("PyObject", "script")


def attach(packed: Packed, scope: PackScope, creates: Creates | None = None) -> int:
    """Put the header in front of a packed message that needs one. Return the flags that say so."""
    packed.undo = scope.undo
    listed = b"".join(map(_write, scope.attachments)) if scope.attachments else b""
    if creates is None:
        head = _CARRIES.pack(len(listed), 0)
    else:
        value_on, value, fork_on, fork, script = creates
        head = _MAKES.pack(len(listed), 2 if script else 1, value_on, value, fork_on, fork)
    packed.body = head + listed + packed.body
    return REFERENCES


def _write(attachment: Attachment) -> bytes:
    data, incarnation, record = attachment
    text = incarnation.encode()
    return _REFERENCE.pack(*data[:6], _KINDS.index(data[6]), len(text), len(record)) + text + record


def detach(body: Body) -> tuple[Creates | None, list[Attachment], Body]:
    """Return what the message makes, the references in it, and the rest. SerializationError if the header is damaged."""
    try:
        length, makes = _CARRIES.unpack_from(body)
        if not makes:
            start, creates = _CARRIES.size, None
        else:
            start = _MAKES.size
            _, _, value_on, value, fork_on, fork = _MAKES.unpack_from(body)
            creates = (value_on, value, fork_on, fork, makes == 2)
    except struct.error:
        raise SerializationError(f"a message of {len(body)} bytes has no room for its header of references") from None
    if not length:
        return creates, [], body[start:]
    end = start + length
    if end > len(body):
        raise SerializationError(f"a message of {len(body)} bytes announces {length} bytes of references")
    view = memoryview(body)
    return creates, _read(view[start:end]), view[end:]


def _read(listed: memoryview) -> list[Attachment]:
    found: list[Attachment] = []
    at = 0
    try:
        while at < len(listed):
            owner, value_on, value, fork_on, fork, parent, kind, text, record = _REFERENCE.unpack_from(listed, at)
            middle = at + _REFERENCE.size + text
            incarnation = str(listed[middle - text : middle], "utf-8")
            at = middle + record
            data = owner, value_on, value, fork_on, fork, parent, _KINDS[kind]
            found.append((data, incarnation, bytes(listed[middle:at])))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise SerializationError(f"the list of references of a message is damaged: {error}") from None
    if at != len(listed):
        raise SerializationError(f"the list of references of a message ends at byte {at} of {len(listed)}")
    return found
