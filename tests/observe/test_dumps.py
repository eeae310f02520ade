"""Dumps of real groups: asked for, and written by the workers themselves; and what `remora explain` says of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.command.main import main
from remora.observer.dump import Cause, read_dump
from remora.observer.explain import Kind, explain
from remora.observer.group_observer import GroupObserver, groups
from remora.observer.model import Query, Stage
from remora.testing.processes import Processes
from tests.eventually import eventually
from tests.observe import programs

Explained = Callable[[Path], tuple[int, str]]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Explained:
    """Run `remora explain`: its exit code, and what it prints."""

    def run(path: Path) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["explain", str(path)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dumps"


@pytest.fixture
def workers(folder: Path, fork_server: None) -> Iterator[Processes]:
    with Processes(3, dump_folder=str(folder)) as found:
        yield found


def serving(workers: Processes, rank: int) -> int:
    """How many functions a worker runs."""
    with GroupObserver.find(group=group_of(workers)) as group:
        worker = group.snapshot(Query(parts=("calls",))).worker(f"worker{rank}")
        return 0 if worker is None else sum(call.stage is Stage.RUNNING for call in worker.calls)


def group_of(workers: Processes) -> str:
    """The group of these workers, whatever others run on this host."""
    (mine,) = [each for each in groups() if workers.pid(0) in [entry.pid for entry in each.workers]]
    return mine.group


def dumps(folder: Path) -> list[tuple[str, Cause]]:
    if not folder.is_dir() or not any(each.suffix == ".json" for each in folder.iterdir()):
        return []
    return sorted((each.snapshot.name, each.cause) for each in read_dump(str(folder)).workers)


def test_the_peers_of_a_killed_worker_explain_it(workers: Processes, folder: Path, explained: Explained) -> None:
    waiting = [workers.start(rank, programs.call_and_lose, "worker2") for rank in (0, 1)]
    eventually(lambda: serving(workers, 2) == 2)
    workers.kill(2)
    assert [each.result() for each in waiting] == ["WorkerLost", "WorkerLost"]
    eventually(lambda: {("worker0", Cause.PEER_LOST), ("worker1", Cause.PEER_LOST)} <= set(dumps(folder)))
    code, text = explained(folder)
    assert code == 1
    assert "1. worker2 died, and left no last words" in text
    assert "worker0 says:" in text
    assert explain(read_dump(str(folder)))[0].workers == ("worker2",)


def test_a_call_that_times_out_is_worth_one_dump(workers: Processes, folder: Path, explained: Explained) -> None:
    for _ in range(3):
        workers.run(0, programs.let_a_call_time_out, "worker1")
    eventually(lambda: dumps(folder))
    workers.run(1, programs.send_signal_to_self)
    eventually(lambda: len(dumps(folder)) == 2)
    assert dumps(folder) == [("worker0", Cause.TIMEOUT), ("worker1", Cause.SIGNAL)]
    code, text = explained(folder)
    assert code == 1
    assert "1. on worker0 a call timed out: " in text
    assert "programs.sleep on worker1" in text
    (first,) = [each for each in read_dump(str(folder)).workers if each.cause is Cause.TIMEOUT]
    assert any(call.function.endswith("sleep") for call in read_dump(str(folder)).group.workers[1].calls)
    assert first.snapshot.threads, "the stacks are in it"


def test_a_dump_that_is_asked_for_has_everybody(workers: Processes, tmp_path: Path, explained: Explained) -> None:
    pending = workers.start(0, programs.call_and_lose, "worker1")
    eventually(lambda: serving(workers, 1) == 1)
    workers.freeze(2)
    path = tmp_path / "d.zip"
    assert main(["dump", "--group", group_of(workers), "-o", str(path), "--timeout", "2s"]) == 1
    dump = read_dump(str(path))
    assert [each.name for each in dump.group.workers] == ["worker0", "worker1"]
    assert [(each.name, each.state) for each in dump.group.missing] == [("worker2", "silent")]
    code, text = explained(path)
    assert code == 1
    assert text.splitlines()[2].startswith("1. worker2 is silent")
    assert [each.kind for each in explain(dump, older_than=0.0)] == [Kind.SILENT, Kind.STUCK]
    assert "programs.sleep has run on worker1" in explain(dump, older_than=0.0)[1].text
    workers.thaw(2)
    workers.kill(1)
    pending.result()


def test_the_last_words_of_a_worker_explain_the_end_of_all(
    folder: Path, tmp_path: Path, explained: Explained, fork_server: None
) -> None:
    context = multiprocessing.get_context("forkserver")
    both = [context.Process(target=programs.one_of_two, args=(rank, str(tmp_path), str(folder))) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [1, 1]
    assert {("worker0", Cause.ERROR), ("worker1", Cause.ERROR)} <= set(dumps(folder))
    code, text = explained(folder)
    assert code == 1
    assert "1. worker1 ended with an error: ValueError: there is no batch 17" in text
    assert "programs.py" in text
    assert [each.workers for each in explain(read_dump(str(folder))) if each.kind is Kind.CONSEQUENCE] == [("worker0",)]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nonsense", b"{}", b'{"format": "remora dump", "version": 99}'])
def test_a_file_that_is_no_dump_is_one_line_and_exit_code_2(tmp_path: Path, content: bytes, explained: Explained) -> None:
    path = tmp_path / "d.zip"
    path.write_bytes(content)
    for each in (path, tmp_path, tmp_path / "missing"):
        code, text = explained(each)
        assert code == 2
        assert len(text.splitlines()) == 1
        assert text.startswith("remora: ")
