"""The header of references: what is written is read, and damage to it is an error that costs no memory."""

from __future__ import annotations

import pickle
import struct

import pytest

from remora.errors import SerializationError
from remora.wire import ref_header
from remora.wire.pack_scope import Attachment, PackScope
from remora.wire.packed import Packed

LISTED: list[Attachment] = [
    ((0, 1, 2, 3, 4, -1, "PyObject"), "a" * 32, b""),
    ((2**31, 2**64 - 1, 2**64 - 1, 0, 0, 7, "script"), "é", b'{"name":"worker1"}'),
]
MADE = (1, 2, 3, 4, True)


def written(creates: ref_header.Creates | None = None, listed: list[Attachment] = LISTED) -> bytes:
    packed, scope = Packed(b"the rest", [], [], []), PackScope()
    scope.attachments += listed
    ref_header.attach(packed, scope, creates)
    return bytes(packed.body)


@pytest.mark.parametrize("creates", [None, MADE])
@pytest.mark.parametrize("listed", [[], LISTED[:1], LISTED])
def test_what_is_written_is_read(creates: ref_header.Creates | None, listed: list[Attachment]) -> None:
    made, found, rest = ref_header.detach(written(creates, listed))
    assert (made, found, bytes(rest)) == (creates, listed, b"the rest")


@pytest.mark.parametrize("creates", [None, MADE])
def test_each_byte_at_each_value_is_an_error_or_a_list(creates: ref_header.Creates | None) -> None:
    body = written(creates)
    for at in range(len(body) - len(b"the rest")):
        for value in range(256):
            try:
                _, listed, _ = ref_header.detach(body[:at] + bytes((value,)) + body[at + 1 :])
            except SerializationError:
                continue
            assert len(listed) <= len(body)
        with pytest.raises(SerializationError):
            ref_header.detach(body[:at])


def test_the_list_is_not_unpickled() -> None:
    """LONG_BINPUT makes the unpickler's memo as long as it says: 2 GB here."""
    hostile = b"\x80\x05]r" + struct.pack("<I", 1 << 27) + pickle.STOP
    with pytest.raises(SerializationError, match="references"):
        ref_header.detach(struct.pack("<IB", len(hostile), 0) + hostile)
