"""Packs ids as bytes, two u64 for each, for messages that hold nothing else: pickle would take longer than all the rest."""

from __future__ import annotations

import struct
from itertools import chain, starmap

from remora.errors import ProtocolError
from remora.vocabulary.ids import GloballyUniqueId

_ID = struct.Struct("<QQ")
ID_SIZE = _ID.size


def pack_id(id: GloballyUniqueId) -> bytes:
    """Return one id as bytes."""
    return _ID.pack(*id)


def unpack_id(data: bytes | bytearray | memoryview) -> GloballyUniqueId:
    """Return the id that `pack_id` packed."""
    if len(data) != _ID.size:
        raise ProtocolError(f"{len(data)} bytes do not make an id")
    return GloballyUniqueId(*_ID.unpack(data))


def pack_ids(*ids: GloballyUniqueId) -> bytes:
    """Return many ids as bytes, one after the other."""
    return struct.pack(f"<{2 * len(ids)}Q", *chain.from_iterable(ids))


def unpack_ids(data: bytes | bytearray | memoryview) -> list[GloballyUniqueId]:
    """Return the ids that `pack_ids` packed."""
    if len(data) % _ID.size:
        raise ProtocolError(f"{len(data)} bytes do not make a list of ids")
    return list(starmap(GloballyUniqueId, _ID.iter_unpack(data)))
