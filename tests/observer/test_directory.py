"""The workers of this user on this host: entries of the living are found, those of the dead are removed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remora.errors import AuthenticationError
from remora.observer import directory
from remora.observer.directory import WorkerEntry


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "remora" / "workers"


def entry(incarnation: str = "one", pid: int | None = None, **changes: object) -> WorkerEntry:
    pid = os.getpid() if pid is None else pid
    made = WorkerEntry(
        name="worker0",
        rank=0,
        group="g",
        incarnation=incarnation,
        pid=pid,
        started=directory.start_of(pid),
        host="here",
        home=directory.home(),
        addresses=("unix://@x",),
        key="00ff",
        stack_signal=61,
        stacks_file=directory.stacks_path(pid),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_what_is_written_is_found_until_it_is_removed(place: Path) -> None:
    assert directory.entries() == []
    assert not place.exists()  # to look makes nothing
    one, two = entry("one", rank=3), entry("two", rank=1)
    directory.write(one)
    directory.write(two)
    assert directory.entries() == [two, one]
    directory.remove(one)
    directory.remove(one)
    assert directory.entries() == [two]


def test_only_this_user_can_read_it(place: Path) -> None:
    directory.write(entry())
    assert place.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in place.iterdir()} == {0o600}
    assert "00ff" not in repr(entry())


def test_the_entry_of_a_dead_process_goes_with_its_stacks(place: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    directory.write(entry("dead", process.pid))
    stacks = Path(directory.stacks_path(process.pid))
    stacks.write_text("…")
    assert [each.pid for each in directory.entries()] == [process.pid]
    process.communicate(b"\n")
    assert directory.entries() == []
    assert list(place.iterdir()) == []


def test_a_number_that_is_used_again_is_another_process(place: Path) -> None:
    directory.write(entry(started=directory.start_of(os.getpid()) + 1))
    assert directory.entries() == []
    assert list(place.iterdir()) == []


def test_an_entry_of_another_container_is_neither_shown_nor_removed(place: Path) -> None:
    directory.write(entry(home="elsewhere/1/2", started=1))
    assert directory.entries() == []
    assert len(list(place.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "x"}', "[" * 100_000, "\x00" * 10])
def test_junk_is_passed_over(place: Path, text: str) -> None:
    directory.write(entry())
    (place / "junk.json").write_text(text)
    assert directory.entries() == [entry()]


def test_links_and_pipes_in_it_are_passed_over(place: Path, tmp_path: Path) -> None:
    directory.write(entry())
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text((place / "one.json").read_text().replace("worker0", "liar"))
    (place / "link.json").symlink_to(elsewhere)
    os.mkfifo(place / "pipe.json")
    assert directory.entries() == [entry()]


def test_a_directory_that_others_can_use_is_refused(place: Path) -> None:
    directory.write(entry())
    place.chmod(0o755)
    with pytest.raises(AuthenticationError, match="can be used by others"):
        directory.entries()
    with pytest.raises(AuthenticationError):
        directory.write(entry("two"))
    directory.remove(entry())  # says nothing: the worker ends anyway
    place.chmod(0o700)
    assert directory.entries() == [entry()]
