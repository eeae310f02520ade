"""Observing a group of processes from outside: also those that are stuck, stopped, held by C code, or dead."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora import rpc
from remora.errors import AuthenticationError, NothingFound, ObserverError
from remora.introspection import questions
from remora.observer import directory, stopped
from remora.observer.group_observer import GroupObserver, groups
from remora.observer.model import GroupSnapshot, Query, Stage
from remora.testing.processes import Processes
from remora.testing.world import World
from tests import leaks
from tests.eventually import eventually

SECRET = "a secret that is long enough"
CALLS = Query(parts=("calls", "waits", "threads"))


@pytest.fixture(autouse=True, scope="module")
def _fork_server() -> None:
    """It is started once, and stays."""
    with leaks.kept(), Processes(1):
        pass


@pytest.fixture(scope="module")
def workers() -> Iterator[Processes]:
    with Processes(3, num_worker_threads=2, secret=SECRET) as found:
        yield found


@pytest.fixture
def observer(workers: Processes) -> Iterator[GroupObserver]:
    (one,) = {each.group for each in directory.entries() if each.pid == workers.pid(0)}
    with GroupObserver.find(group=one) as found:
        yield found


def names(snapshot: GroupSnapshot) -> tuple[list[str], list[tuple[str, str]]]:
    return [each.name for each in snapshot.workers], [(each.name, each.state) for each in snapshot.missing]


# In the workers.


def hold_interpreter(path: str) -> None:
    pipe = os.open(path, os.O_RDONLY)  # which waits until the test opens it, too
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # … and this until it writes: no other thread runs
    os.close(pipe)


def answer_slowly(seconds: float) -> None:
    """Have this worker take so long for its next answer."""
    real = questions.snapshot.take

    def take(*arguments: Any) -> Any:
        questions.snapshot.take = real
        time.sleep(seconds)
        return real(*arguments)

    questions.snapshot.take = take


def start_holding(path: str) -> None:
    threading.Thread(target=hold_interpreter, args=(path,), daemon=True).start()


def wait_for(path: str) -> int:
    while not os.path.exists(path):
        time.sleep(0.01)
    return 1


def take_all_slots(to: str, path: str) -> None:
    for _ in range(4):
        rpc.rpc_async(to, wait_for, args=(path,))


async def stick(path: str) -> int:
    return wait_for(path)  # which holds the event loop up


def stick_loop(to: str, path: str) -> None:
    rpc.rpc_async(to, stick, args=(path,))


# Without anything being prepared.


def test_all_workers_answer_and_say_what_they_are(workers: Processes, observer: GroupObserver) -> None:
    found = observer.snapshot(timeout=10.0)
    assert names(found) == (["worker0", "worker1", "worker2"], [])
    assert [each.pid for each in found.workers] == [workers.pid(i) for i in range(3)]
    assert found.worker("worker1") is found.workers[1]
    for worker in found.workers:
        assert abs(found.clock_offsets[worker.name]) <= found.clock_errors[worker.name] + 0.01


def test_a_group_is_found_by_its_beginning_and_its_secret_need_not_be_known(workers: Processes) -> None:
    (entry,) = [each for each in directory.entries() if each.pid == workers.pid(1)]
    assert SECRET not in (Path(directory.folder()) / f"{entry.incarnation}.json").read_text()
    assert entry.group in {each.group for each in groups()}
    with GroupObserver.find(group=entry.group[:10]) as found:
        assert found.group == entry.group
    with pytest.raises(NothingFound, match="no group 'nothing like it'"):
        GroupObserver.find(group="nothing like it")


def test_one_worker_leads_to_all_others(workers: Processes) -> None:
    (entry,) = [each for each in directory.entries() if each.pid == workers.pid(2)]
    for address in entry.addresses:
        with GroupObserver.find(address, secret=SECRET) as found:
            assert names(found.snapshot(timeout=10.0))[0] == ["worker0", "worker1", "worker2"]
    with pytest.raises(AuthenticationError, match="same secret"):
        GroupObserver.find(entry.addresses[0], secret="another secret, also long")
    with pytest.raises(NothingFound, match="belongs to the group"):
        GroupObserver.find(entry.addresses[0], group="x", secret=SECRET)


def test_the_store_of_the_group_leads_there(workers: Processes) -> None:
    store = f"file://{workers._folder.name}/rendezvous"
    with GroupObserver.find(store, secret=SECRET) as found:
        assert len(found.snapshot(timeout=10.0).workers) == 3
    with pytest.raises(NothingFound, match="no worker of the group"):
        GroupObserver.find(store, secret="another secret, also long")
    with pytest.raises(NothingFound, match="there is no file"):
        GroupObserver.find("file:///nowhere/at/all", secret=SECRET)
    assert not os.path.exists("/nowhere")


def test_questions_that_no_worker_knows_are_errors_of_each(observer: GroupObserver) -> None:
    found = observer.ask_all("what", 10.0)
    assert sorted(found) == ["worker0", "worker1", "worker2"]
    assert all(isinstance(each, ObserverError) and "no question" in str(each) for each in found.values())
    stacks = observer.ask_all("stacks", 10.0)
    told: Any = stacks["worker0"]
    assert all("remora-worker0-observer" not in str(each) for each in told)
    assert any(each["role"] == "timers" for each in told)


# Trouble.


def test_a_worker_answers_while_all_its_threads_and_its_event_loop_are_stuck(
    workers: Processes, observer: GroupObserver, tmp_path: Path
) -> None:
    path = str(tmp_path / "go on")
    try:
        workers.run(0, stick_loop, "worker1", path)
        workers.run(0, take_all_slots, "worker1", path)

        def stages() -> list[Stage]:
            worker = observer.snapshot(CALLS, timeout=10.0).worker("worker1")
            return sorted(each.stage for each in worker.calls) if worker is not None else []

        eventually(lambda: stages() == [Stage.QUEUED] * 2 + [Stage.RUNNING] * 3, what=stages)
    finally:
        Path(path).touch()
    eventually(lambda: not stages())


def test_a_stopped_worker_is_silent_and_the_reason_is_said(workers: Processes, observer: GroupObserver) -> None:
    observer.snapshot(timeout=10.0)
    workers.freeze(1)
    try:
        began = time.monotonic()
        found = observer.snapshot(timeout=1.5)
        assert time.monotonic() - began < 2.5
        assert names(found) == (["worker0", "worker2"], [("worker1", "silent")])
        assert "is stopped (SIGSTOP" in found.missing[0].reason
        assert found.missing[0].pid == workers.pid(1)
        assert found.missing[0].stacks == ""
    finally:
        workers.thaw(1)
    eventually(lambda: len(observer.snapshot(timeout=5.0).workers) == 3)


def test_a_worker_that_is_slow_to_answer_is_not_said_to_be_stuck(workers: Processes, observer: GroupObserver) -> None:
    observer.snapshot(timeout=10.0)
    workers.run(2, answer_slowly, 2.0)
    found = observer.snapshot(timeout=1.0)
    assert names(found) == (["worker0", "worker1"], [("worker2", "silent")])
    assert "it was still making its answer" in found.missing[0].reason
    eventually(lambda: len(observer.snapshot(timeout=5.0).workers) == 3)


def test_c_code_that_holds_the_interpreter_is_shown_with_stacks(
    workers: Processes, observer: GroupObserver, tmp_path: Path
) -> None:
    observer.snapshot(timeout=10.0)
    os.mkfifo(tmp_path / "pipe")
    workers.run(2, start_holding, str(tmp_path / "pipe"))
    with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
        eventually(lambda: names(observer.snapshot(timeout=1.0))[1] == [("worker2", "silent")])
        found = observer.snapshot(timeout=2.0)
        pipe.write(b"x")
    assert names(found) == (["worker0", "worker1"], [("worker2", "silent")])
    (missing,) = found.missing
    assert "C code may hold the interpreter" in missing.reason
    assert "hold_interpreter" in missing.stacks
    assert "Thread 0x" in missing.stacks
    eventually(lambda: len(observer.snapshot(timeout=5.0).workers) == 3)
    again = observer.snapshot(timeout=10.0)
    assert again.missing == ()  # it lives on: the signal did it no harm


def test_no_signal_is_sent_to_a_process_that_does_not_handle_it_or_is_another(workers: Processes) -> None:
    (entry,) = [each for each in directory.entries() if each.pid == workers.pid(0)]
    assert entry.stack_signal is not None
    assert stopped._handles(entry.pid, entry.stack_signal)
    assert not stopped._handles(entry.pid, signal.SIGRTMAX - 4)
    assert not stopped._handles(2**22 + 5, entry.stack_signal)
    reused = directory.WorkerEntry(**{name: getattr(entry, name) for name in entry.__slots__} | {"started": 1})
    assert stopped.explain(reused, "", time.monotonic() + 1)[0] == "dead"


def test_the_dead_are_missing_and_the_rest_answers() -> None:
    with Processes(3) as workers:
        (one,) = {each.group for each in directory.entries() if each.pid == workers.pid(0)}
        with GroupObserver.find(group=one) as observer:
            assert len(observer.snapshot(timeout=10.0).workers) == 3
            workers.kill(2)
            found = observer.snapshot(timeout=5.0)
            assert names(found) == (["worker0", "worker1"], [("worker2", "dead")])
            eventually(lambda: "process" in observer.snapshot(timeout=5.0).missing[0].reason)
        with GroupObserver.find(group=one) as newcomer:  # which learns of the dead from the living
            eventually(lambda: names(newcomer.snapshot(timeout=5.0))[1] == [("worker2", "dead")])
        for i in (0, 1):
            workers.kill(i)
        assert one not in {each.group for each in groups()}
        with pytest.raises(NothingFound):
            GroupObserver.find(group=one)


def test_fifty_workers_within_two_seconds() -> None:
    with World(50, transports=["unix"], threads=1, shared_memory=0) as world:
        with GroupObserver.find(group=world[0].group.group_id) as observer:
            observer.snapshot(timeout=20.0)  # (in one process, one interpreter shakes hands with itself fifty times)
            began = time.monotonic()
            found = observer.snapshot(Query(parts=("calls", "waits", "links")), timeout=10.0)
            took = time.monotonic() - began
        assert len(found.workers) == 50
        assert found.missing == ()
        assert took < 2.0


def test_observing_leaves_nothing_in_the_workers(workers: Processes) -> None:
    before = workers.run_all(descriptors)
    for _ in range(3):
        (one,) = {each.group for each in directory.entries() if each.pid == workers.pid(0)}
        with GroupObserver.find(group=one) as observer:
            observer.snapshot(timeout=10.0)
    eventually(lambda: workers.run_all(descriptors) == before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_worker_that_lets_no_observers_in_has_no_entry_and_no_thread() -> None:
    before = {each.incarnation for each in directory.entries()}
    with World(2, transports=["unix"], observers=False):
        assert {each.incarnation for each in directory.entries()} == before
        assert not [each for each in threading.enumerate() if each.name.endswith("-observer")]


def test_an_entry_goes_when_its_worker_ends() -> None:
    with World(1, transports=["unix"]) as world:
        one = world[0].group.group_id
        assert [each.group for each in groups()].count(one) == 1
        stacks: Any = directory.stacks_path(os.getpid())
        assert os.path.exists(stacks)
    assert one not in {each.group for each in groups()}
    assert not os.path.exists(stacks)


def test_a_group_of_several_is_chosen_or_named() -> None:
    with World(1, transports=["unix"]) as one, World(1, transports=["unix"]) as two:
        with pytest.raises(NothingFound, match="there are several groups"):
            GroupObserver.find()
        for world in (one, two):
            with GroupObserver.find(group=world[0].group.group_id) as observer:
                assert len(observer.snapshot(timeout=10.0).workers) == 1
