"""The snapshot as JSON: what is written is read again; other versions and other forms are refused in words."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from remora.observer.model import (
    VERSION,
    CallKey,
    CallStatus,
    Event,
    EventKind,
    GroupSnapshot,
    HeldReference,
    Histogram,
    LinkStatus,
    Memory,
    Missing,
    OwnedReference,
    PassStatus,
    Pool,
    Query,
    Stage,
    ThreadStatus,
    UnknownVersion,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.snapshot_json import from_json, to_json

KEY = CallKey(caller="w0", id=7)
SMALL = WorkerSnapshot(name="w1", rank=1, group="g", incarnation="i", pid=5, host="h", time=1.5, up=2.0)
FULL = dataclasses.replace(
    SMALL,
    versions={"remora": "0.1"},
    interpreter_wait=0.25,
    memory=Memory(resident=4096),
    pool=Pool(limit=16),
    calls=(CallStatus(key=KEY, callee="w1", function="f", kind="PYTHON_CALL", stage=Stage.RUNNING, age=1.0, parent=KEY),),
    waits=(WaitStatus(kind=WaitKind.CALL, text="f on w2", call=KEY, workers=("w2", "w3")),),
    owned=(OwnedReference(id="0:1", type="T", state="ready", age=3.0, holders=("w0",)),),
    held=(HeldReference(id="0:1", owner="w2", state="confirmed", age=3.0),),
    passes=(PassStatus(context=1, number=0, started_by="w0", phase="x", age=0.5, owes={"w2": 1}, awaits={"w0": 2}),),
    links=(LinkStatus(peer="w0", state="alive", transport="tcp", round_trip=0.5),),
    events=(Event(time=1.0, kind=EventKind.RUN_ENDED, call=KEY, seconds=0.1, queued=0.2),),
    histograms=(
        Histogram(measure="run", function="f", peer=None, count=3, failed=1, total=1, longest=0.5, buckets={30: 3}),
    ),
    threads=(ThreadStatus(id=1, name="main", role="main", stack=("a.py:1 f",), serving=KEY),),
    left_out={"calls": 3},
)
GROUP = GroupSnapshot(
    group="g",
    time=1.0,
    workers=(SMALL, FULL),
    missing=(Missing(name="w9", rank=None, state="silent", reason="it did not answer", stacks="…"),),
    clock_offsets={"w1": -0.5},
    clock_errors={"w1": 0.1},
)


@pytest.mark.parametrize("value", [SMALL, FULL, GROUP, Query(limit=5, function="f")])
def test_what_is_written_is_read_again(value: Any) -> None:
    assert from_json(type(value), json.loads(json.dumps(to_json(value)))) == value


def test_every_part_of_a_snapshot_is_tried_above() -> None:
    empty = [each.name for each in dataclasses.fields(FULL) if not getattr(FULL, each.name)]
    assert set(empty) <= {"program", "cpu", "calls_made", "calls_served", "calls_failed"}


def test_another_version_is_refused_in_words() -> None:
    told = to_json(SMALL) | {"version": VERSION + 1}
    with pytest.raises(UnknownVersion, match=rf"version {VERSION + 1}, and this is a Remora that reads version {VERSION}"):
        from_json(WorkerSnapshot, told)
    with pytest.raises(UnknownVersion):
        from_json(GroupSnapshot, to_json(GROUP) | {"version": "x"})
    inner = to_json(GROUP)
    inner["workers"][0]["version"] = 99
    with pytest.raises(UnknownVersion):
        from_json(GroupSnapshot, inner)


def test_fields_of_a_later_version_are_not_looked_at() -> None:
    assert from_json(WorkerSnapshot, to_json(SMALL) | {"brand_new": [1]}) == SMALL


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        {"name": 5},
        to_json(SMALL) | {"pid": "5"},
        to_json(SMALL) | {"pid": True},
        to_json(SMALL) | {"calls": {}},
        to_json(SMALL) | {"calls": [{"key": 1}]},
        to_json(SMALL) | {"versions": []},
        to_json(SMALL) | {"histograms": [to_json(FULL.histograms[0]) | {"buckets": {"x": 1}}]},
        to_json(FULL) | {"calls": [to_json(FULL.calls[0]) | {"stage": "dancing"}]},
    ],
)
def test_another_form_is_refused(told: Any) -> None:
    with pytest.raises(ValueError):
        from_json(WorkerSnapshot, told)


def test_a_misfit_is_named_with_its_place() -> None:
    odd = to_json(FULL.calls[0]) | {"stage": "odd"}
    for told, place in [
        (to_json(FULL) | {"calls": [odd]}, r"WorkerSnapshot\.calls\[0\]\.stage is none .*odd"),
        (to_json(SMALL) | {"versions": {"remora": 1}}, r"WorkerSnapshot\.versions\['remora'\] .*'1'"),
        (to_json(FULL) | {"waits": [{}]}, r"WorkerSnapshot\.waits\[0\] is not complete: .*'kind'"),
        ([], r"WorkerSnapshot is not an object: '\[\]'"),
    ]:
        with pytest.raises(ValueError, match=place):
            from_json(WorkerSnapshot, told)
