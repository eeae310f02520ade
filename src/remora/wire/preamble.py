"""What a message that carries references says before everything else, so that it is known without unpickling the rest."""

from __future__ import annotations

import pickle
import struct
from typing import Any

from remora.wire.frames import REFERENCES
from remora.wire.packed import Packed
from remora.wire.scopes import PackScope

_LENGTH = struct.Struct("<I")


def attach(packed: Packed, scope: PackScope, creates: tuple[Any, ...] | None = None) -> int:
    """Put the preamble in front of a packed message, if it needs one. The flags that say so."""
    if creates is None and not scope.attachments:
        return 0
    packed.undo = scope.undo
    preamble = pickle.dumps((creates, scope.attachments), 5)
    packed.body = _LENGTH.pack(len(preamble)) + preamble + packed.body
    return REFERENCES


def detach(body: bytes | bytearray) -> tuple[tuple[Any, ...] | None, list[Any], bytes]:
    """(what the message makes, the references in it, the rest)."""
    view = memoryview(body)
    (length,) = _LENGTH.unpack_from(view)
    creates, attachments = pickle.loads(view[4 : 4 + length])
    return creates, attachments, bytes(view[4 + length :])
