"""Dumps are written whole, read back as they were, and refused with a clear word if they are none."""

from __future__ import annotations

import json
import os
import random
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from remora.errors import RemoraError
from remora.observer import dump as dump_module
from remora.observer.dump import (
    Cause,
    UnreadableDump,
    WorkerDump,
    read_dump,
    write_group_dump,
    write_worker_dump,
)  # fmt: skip
from remora.observer.model import GroupSnapshot, LinkStatus, Missing, ThreadStatus, UnknownVersion, WorkerSnapshot


def worker(name: str, **parts: Any) -> WorkerSnapshot:
    base: dict[str, Any] = {
        "rank": int(name[-1]), "group": "g", "incarnation": "i", "pid": 7, "host": "h", "time": 1e9, "up": 2.5,
    }  # fmt: skip
    return WorkerSnapshot(**{**base, **parts}, name=name)


def group() -> GroupSnapshot:
    thread = ThreadStatus(id=1, name="MainThread", role="main", stack=("a.py:1 f", "b.py:2 g"))
    return GroupSnapshot(
        group="g", time=1e9, workers=(worker("worker0", threads=(thread,)), worker("../worker1")),
        missing=(Missing(name="worker2", rank=2, state="silent", reason="stopped", stacks="Thread 0x1"),),
        clock_offsets={"worker0": 0.5},
    )  # fmt: skip


def test_a_group_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "d.zip"
    write_group_dump(str(path), group(), "remora 1")
    assert read_dump(str(path)).group == group()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if ".." in name.split("/")]
        assert "b.py:2 g" in archive.read("stacks/0000-worker0.txt").decode()
    assert os.listdir(tmp_path) == ["d.zip"]


def test_of_the_dumps_of_a_worker_that_is_restarted_again_and_again_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_module, "MOST_KEPT", 3)
    other = write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.ERROR, snapshot=worker("worker1")))
    (tmp_path / "remora-0000-worker0.json").write_text("the program's own")
    written = []
    for n in range(6):
        written.append(write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.ERROR, snapshot=worker("worker0", pid=n))))
        os.utime(written[-1], (1e9 + n, 1e9 + n))
    assert {str(each) for each in tmp_path.iterdir()} == {
        other, *written[-3:], str(tmp_path / "remora-0000-worker0.json"),
    }  # fmt: skip


def test_a_dump_that_cannot_be_completed_leaves_the_old_one_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "d.zip"
    write_group_dump(str(path), group(), "remora 1")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_group_dump(str(path), group(), object())  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["d.zip"]


def test_a_folder_has_the_latest_of_each_worker_and_names_those_without(tmp_path: Path) -> None:
    links = (LinkStatus(peer="worker1", state="alive"), LinkStatus(peer="worker2", state="dead", reason="reset"),
             LinkStatus(peer="worker3", state="alive"))  # fmt: skip
    for snapshot in (worker("worker0", time=1.0), worker("worker0", time=2.0, links=links), worker("worker1", time=1.5)):
        write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.TIMEOUT, snapshot=snapshot))
    write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.SIGNAL, snapshot=worker("worker0", group="old", time=0.5)))
    (tmp_path / "remora-half.json").write_text('{"format": "remora dump", "version"')
    (tmp_path / "notes.txt").write_text("not ours")
    dump = read_dump(str(tmp_path))
    assert [(each.name, each.time) for each in dump.group.workers] == [("worker0", 2.0), ("worker1", 1.5)]
    assert [(each.name, each.state, each.reason) for each in dump.group.missing] == [("worker2", "dead", "reset")]
    assert len(dump.workers) == 3
    assert dump.other_groups == ("old",)
    assert len(dump.unreadable) == 1
    assert read_dump(str(tmp_path), "old").group.workers[0].time == 0.5
    with pytest.raises(UnreadableDump, match="no dump of a group 'x'"):
        read_dump(str(tmp_path), "x")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "no dump of Remora"),
        (b'{"a": 1}', "no dump of Remora"), (b'{"format": "other", "cause": "x", "version": 1}', "no dump of Remora"),
        (b'{"format": "remora dump", "version": 1}', "is damaged"),
        (b'{"format": "remora dump", "cause": "asked for", "version": 1, "snapshot": 7}', "is damaged"),
        (b'{"format": "remora dump", "cause": "because", "version": 1, "snapshot": {}}', "is damaged"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_dump_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "remora-d.json"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(UnreadableDump, match=reason):
            read_dump(str(place))


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_refused_by_name(tmp_path: Path, version: object) -> None:
    path = tmp_path / "remora-d.json"
    path.write_text(json.dumps({"format": "remora dump", "cause": "asked for", "version": version}))
    with pytest.raises(UnknownVersion, match="version of Remora that wrote it"):
        read_dump(str(path))
    write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.ASKED, snapshot=worker("worker0")))
    (good,) = [each for each in tmp_path.iterdir() if each != path]
    data = json.loads(good.read_text())
    data["snapshot"]["version"] = 99
    path.write_text(json.dumps(data))
    with pytest.raises(UnknownVersion, match="version 99"):
        read_dump(str(path))


def test_what_is_not_there_or_not_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.zip", Path("/dev/zero"), tmp_path):
        with pytest.raises(UnreadableDump):
            read_dump(str(path))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(UnreadableDump, match="no manifest"):
        read_dump(str(tmp_path / "other.zip"))


def test_a_damaged_zip_is_refused_and_nothing_else_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "d.zip"
    write_group_dump(str(path), group(), "remora 1")
    whole = path.read_bytes()
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        for _ in range(chance.randrange(4)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_dump(str(path))
        except RemoraError:  # nothing else
            refused += 1
    assert refused > 100


def test_a_part_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.observer.dump.MAX_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", " " * 1_000_000)
        archive.writestr("group.json", "{}")
    with pytest.raises(UnreadableDump, match="MiB"):
        read_dump(str(tmp_path / "bomb.zip"))
