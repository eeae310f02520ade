"""Workers in processes of their own, as users' tests start them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from remora import rpc
from remora.errors import RemoraError
from remora.testing import faults, processes
from remora.testing.processes import ProcessEnded, Processes
from tests import leaks
from tests.eventually import eventually

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def _fork_server() -> None:
    """It is started once, and stays."""
    with leaks.kept(), Processes(1):
        pass


def add(a: int, b: int) -> int:
    return a + b


def call(to: str, a: int, b: int) -> int:
    return rpc.rpc_sync(to, add, args=(a, b), timeout=20)


def fail(text: str) -> None:
    raise KeyError(text)


def test_they_run_what_they_are_sent() -> None:
    with Processes(2) as workers:
        assert len(workers) == 2
        assert workers.run(0, call, "worker1", 1, 2) == 3
        assert workers.run_all(call, "worker0", 3, 4) == [7, 7]
        assert workers.run(1, lambda: os.getpid()) == workers.pid(1)
        with pytest.raises(KeyError, match="no such key") as caught:
            workers.run(0, fail, "no such key")
        assert "in fail" in str(caught.value.__cause__)
        workers.shutdown()


class Homebound:
    """Can be rebuilt in the process it comes from, and nowhere else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return received_by_owner, (os.getpid(),)


def received_by_owner(pid: int) -> str:
    if os.getpid() != pid:
        raise LookupError("this is not my home")
    return "home"


def test_an_answer_that_cannot_be_read_is_no_other_answer() -> None:
    with Processes(1) as workers:
        strange, plain = workers.start(0, Homebound), workers.start(0, add, 1, 2)
        assert plain.result(10) == 3
        for _ in range(2):
            with pytest.raises(LookupError, match="not my home"):
                strange.result(10)


def complain_to(path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)


def test_who_is_busy_when_the_block_ends_is_ended_in_silence(tmp_path: Path) -> None:
    """It says neither that it cannot answer nor that the others are gone."""
    with Processes(2) as workers:
        for rank in range(2):
            workers.run(rank, complain_to, str(tmp_path / f"{rank}"))
        workers.start(0, add, 1, 2)  # its answer is not read
        workers.start(1, time.sleep, 0.1)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["", ""]


def test_they_follow_a_plan_and_tell_what_it_did() -> None:
    with Processes(2, faults="fail PYTHON_CALL worker0->worker1 1") as workers:
        with pytest.raises(RemoraError, match="RPCErr:2:"):
            workers.run(0, call, "worker1", 1, 2)
        assert workers.run(0, call, "worker1", 1, 2) == 3
        assert [record.deed for record in workers.fault_report(0).records] == ["fail"]
        workers.set_faults("corrupt PYTHON_CALL * 1")
        assert workers.run(0, call, "worker1", 1, 2) == 3
        assert len(workers.fault_report(0)) == 2


def test_they_can_be_killed_and_frozen() -> None:
    with Processes(2) as workers:
        assert workers.run(0, call, "worker1", 1, 2) == 3
        workers.freeze(1)
        slow = workers.start(0, call, "worker1", 3, 4)
        with pytest.raises(TimeoutError):
            slow.result(0.2)
        workers.thaw(1)
        assert slow.result() == 7
        workers.kill(1)
        with pytest.raises(RemoraError, match="worker1"):
            workers.run(0, call, "worker1", 1, 2)
        with pytest.raises(ProcessEnded, match="exit code -9"):
            workers.run(1, call, "worker0", 1, 2)


def test_a_plan_may_freeze_and_kill_them_at_once() -> None:
    with Processes(2, timeout=3.0) as workers:
        workers.set_faults("freeze worker1")
        eventually(lambda: processes._stands_still(workers.pid(1)))
        workers.thaw(1)
        assert workers.run(0, call, "worker1", 1, 2) == 3
        workers.set_faults("kill worker0; kill worker1")
        for rank in range(2):
            with pytest.raises(ProcessEnded, match="exit code -9"):
                workers.run(rank, time.sleep, 3.0)
        with pytest.raises(ValueError, match="'kil' is no deed"):
            workers.set_faults("kil worker0")


def freeze_late(plan: str) -> list[str]:
    """Follow a plan by which this process is stopped, while it is so busy that it comes to that late."""
    start = subprocess.Popen.__init__

    def start_and_pause(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        time.sleep(0.15)

    subprocess.Popen.__init__ = start_and_pause  # type: ignore[method-assign]
    faults.set(plan)
    end = time.monotonic() + 20
    while len(faults.report()) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    return [record.deed for record in faults.report().records]


def test_a_plan_does_not_freeze_a_busy_process_for_longer_than_it_says() -> None:
    with Processes(1) as workers:
        assert workers.start(0, freeze_late, "freeze worker0 for 20ms").result(5) == ["freeze", "thaw"]


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
        except OSError:
            pass  # it ended while we looked
    return found


def runs(pid: int) -> bool:
    try:
        return processes._state(f"/proc/{pid}/stat") not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked for in /proc")
def test_whoever_is_frozen_by_a_plan_can_be_thawed_and_ended_before_its_time() -> None:
    with Processes(2) as workers:
        pids = [workers.pid(0), workers.pid(1)]
        before = set(children(pids[0]) + children(pids[1]))
        for rank in range(2):
            workers.start(rank, faults.set, f"freeze worker{rank} for 60s")
            eventually(lambda pid=pids[rank]: processes._stands_still(pid))
        wakers = set(children(pids[0]) + children(pids[1])) - before
        assert wakers
        workers.thaw(0)
        assert workers.run(0, call, "worker0", 1, 2) == 3
    eventually(lambda: not any(map(runs, wakers)))


def test_what_they_are_still_doing_ends_with_the_block() -> None:
    started = time.monotonic()
    with Processes(2) as workers:
        workers.start(0, time.sleep, 60)
        pid = workers.pid(0)
    assert time.monotonic() - started < 20
    assert not os.path.exists(f"/proc/{pid}")
