"""Ids as bytes: two u64 for each. For messages that hold nothing else; pickle would take longer than all the rest."""

from __future__ import annotations

import struct
from itertools import chain, starmap

from remora.errors import ProtocolError
from remora.vocabulary.ids import GloballyUniqueId

_ID = struct.Struct("<QQ")
ID_SIZE = _ID.size


def pack_id(id: GloballyUniqueId) -> bytes:
    """One id."""
    return _ID.pack(*id)


def unpack_id(data: bytes | bytearray | memoryview) -> GloballyUniqueId:
    """What `pack_id` was given."""
    if len(data) != _ID.size:
        raise ProtocolError(f"{len(data)} bytes are no id")
    return GloballyUniqueId(*_ID.unpack(data))


def pack_ids(*ids: GloballyUniqueId) -> bytes:
    """Many ids, one after the other."""
    return struct.pack(f"<{2 * len(ids)}Q", *chain.from_iterable(ids))


def unpack_ids(data: bytes | bytearray | memoryview) -> list[GloballyUniqueId]:
    """What `pack_ids` was given."""
    if len(data) % _ID.size:
        raise ProtocolError(f"{len(data)} bytes are no list of ids")
    return list(starmap(GloballyUniqueId, _ID.iter_unpack(data)))
