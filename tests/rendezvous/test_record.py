"""A worker's record and its JSON form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import RendezvousError
from remora.rendezvous.record import WorkerRecord
from remora.vocabulary.ids import WorkerInfo

RECORD = WorkerRecord("ps-0", 3, "f00d", "boot/net", ("tcp://10.0.0.1:4000", "unix://@x"), {"é": [None, 1.5]})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


def test_a_record_survives_the_journey() -> None:
    assert WorkerRecord.from_json(RECORD.to_json()) == RECORD
    assert RECORD.to_json().isascii()
    assert RECORD.info == WorkerInfo("ps-0", 3)
    assert str(RECORD) == "'ps-0' (rank 3)"


@given(st.dictionaries(st.text(), JSON))
def test_any_json_may_go_with_it(extra: dict[str, object]) -> None:
    record = WorkerRecord("a", 0, "i", "h", (), extra)
    again = WorkerRecord.from_json(record.to_json())
    assert again == record
    assert again.to_json() == record.to_json()  # stores compare bytes


@pytest.mark.parametrize("value", [object(), float("nan"), b"bytes", {1, 2}])
def test_what_is_not_json_is_refused_by_the_worker_that_says_it(value: object) -> None:
    with pytest.raises(RendezvousError, match="'a'"):
        WorkerRecord("a", 0, "i", "h", (), {"x": value}).to_json()


CHANGES: list[dict[str, object]] = [
    {"name": ""}, {"name": "a b"}, {"name": 7}, {"name": "x" * 2000}, {"id": -1}, {"id": 1 << 15}, {"id": True},
    {"id": "3"}, {"incarnation": ""}, {"incarnation": None}, {"host": 7}, {"addresses": "tcp://x:1"},
    {"addresses": [1]}, {"extra": []}, {"surplus": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_with_a_fault_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RendezvousError, match="not a worker's record"):
        WorkerRecord.from_json(json.dumps(json.loads(RECORD.to_json()) | change))


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 100_000])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousError, match="not a worker's record"):
        WorkerRecord.from_json(data)


def test_records_can_be_collected_in_sets() -> None:
    assert len({RECORD, WorkerRecord.from_json(RECORD.to_json())}) == 1
