"""Ids as bytes."""

from __future__ import annotations

import pytest

from remora.errors import ProtocolError
from remora.vocabulary.ids import GloballyUniqueId
from remora.wire.id_codec import pack_id, pack_ids, unpack_id, unpack_ids

LARGEST = GloballyUniqueId(2**15 - 1, 2**64 - 1)


@pytest.mark.parametrize("ids", [[], [LARGEST], [GloballyUniqueId(0, 0), GloballyUniqueId(1, 2), LARGEST]])
def test_ids_come_back(ids: list[GloballyUniqueId]) -> None:
    data = pack_ids(*ids)
    assert len(data) == 16 * len(ids)
    for form in (data, bytearray(data), memoryview(data)):
        assert unpack_ids(form) == ids
    assert all(type(each) is GloballyUniqueId for each in unpack_ids(data))


def test_one_id_comes_back() -> None:
    assert unpack_id(pack_id(LARGEST)) == LARGEST
    assert pack_id(LARGEST) == pack_ids(LARGEST)
    with pytest.raises(ProtocolError, match="32 bytes"):
        unpack_id(pack_ids(LARGEST, LARGEST))


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="17 bytes"):
        unpack_ids(bytes(17))
