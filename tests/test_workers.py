"""The worker processes of the tests do as they are told, report what went wrong and never outlive a test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from remora.testing.processes import ProcessEnded
from tests.eventually import eventually
from tests.workers import Workers


def torch_workers(n: int, **settings: Any) -> Workers:
    """These tests are about the processes, so they stand on an RPC that is known to work."""
    return Workers(n, rpc="torch.distributed.rpc", leak_timeout=None, **settings)


def add_on(worker: str, a: int, b: int) -> int:
    import torch.distributed.rpc as rpc

    total: int = rpc.rpc_sync(worker, int.__add__, args=(a, b))
    return total


def sleep_forever() -> None:
    print("asleep")
    threading.Event().wait()


def test_workers_join_a_group_and_call_each_other() -> None:
    with torch_workers(2) as workers:
        assert workers.run(0, add_on, "worker1", 3, 4) == 7
        assert workers.run_all(os.getpid) == [workers.pid(0), workers.pid(1)]


def test_options_reach_the_backend() -> None:
    def timeout() -> Any:
        import torch.distributed.rpc as rpc

        return rpc.api.get_rpc_timeout()  # type: ignore[attr-defined]

    with torch_workers(2, options=lambda rank: {"rpc_timeout": 10.0 + rank}) as workers:
        assert workers.run_all(timeout) == [10.0, 11.0]


def test_an_exception_arrives_with_its_type_and_the_workers_traceback() -> None:
    with torch_workers(1, join=False) as workers:
        with pytest.raises(KeyError, match="missing") as caught:
            workers.run(0, lambda: dict[str, int]()["missing"])
        assert "in <lambda>" in str(caught.value.__cause__)
        assert workers.run(0, abs, -1) == 1, "the worker lives on"


def test_what_cannot_be_sent_back_is_an_error_and_not_a_hang() -> None:
    class Stubborn(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    def refuse() -> None:
        raise Stubborn("words")

    with torch_workers(1, join=False) as workers:
        with pytest.raises(RuntimeError, match="could not be sent back"):
            workers.run(0, threading.Lock)
        with pytest.raises(RuntimeError, match=r"Stubborn.*could not be sent back.*words"):
            workers.run(0, refuse)


def test_results_may_be_asked_for_in_any_order() -> None:
    with torch_workers(1, join=False) as workers:
        first, second = workers.start(0, abs, -1), workers.start(0, abs, -2)
        assert second.result() == 2
        assert first.done()
        assert first.result() == 1


def test_a_killed_worker_is_gone_and_says_so() -> None:
    with torch_workers(2, join=False) as workers:
        pending = workers.start(0, sleep_forever)
        workers.kill(0)
        with pytest.raises(ProcessEnded, match="worker0 ended with exit code -9"):
            pending.result()
        assert workers.run(1, abs, -1) == 1
        workers.add(0)
        assert workers.run(0, abs, -3) == 3


def test_a_stopped_worker_is_silent_until_it_goes_on() -> None:
    with torch_workers(1, join=False) as workers:
        workers.stop(0)
        pending = workers.start(0, abs, -1)
        with pytest.raises(TimeoutError, match=r"worker0 did not answer within 0\.05 s"):
            pending.result(timeout=0.05)
        workers.cont(0)
        assert pending.result() == 1


def test_a_worker_left_stopped_does_not_outlive_the_block() -> None:
    with torch_workers(1, join=False) as workers:
        pid = workers.pid(0)
        workers.stop(0)
    assert not Path(f"/proc/{pid}").exists()


def test_after_an_error_nothing_survives_and_the_stacks_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), torch_workers(2, join=False) as workers:  # noqa: PT012
        pids = [workers.pid(0), workers.pid(1)]
        workers.run(1, print, "a word from worker 1")
        workers.start(0, sleep_forever)
        eventually(lambda: "asleep" in workers.output(0))
        raise ZeroDivisionError
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    printed = capfd.readouterr().out
    assert "a word from worker 1" in printed
    assert "in sleep_forever" in printed


def test_a_worker_that_does_not_leave_is_an_error() -> None:
    with pytest.raises(TimeoutError, match="worker0"), torch_workers(1, join=False, timeout=5.0) as workers:  # noqa: PT012
        workers._timeout = 0.2
        workers.start(0, sleep_forever)


def test_a_worker_that_cannot_exit_is_an_error() -> None:
    def leave_a_thread_behind() -> None:
        threading.Thread(target=sleep_forever).start()

    with pytest.raises(AssertionError, match="worker 0 did not exit in time"), torch_workers(1, join=False) as workers:  # noqa: PT012
        workers.run(0, leave_a_thread_behind)
        workers._timeout = 0.2


def test_a_worker_that_leaks_is_an_error() -> None:
    def leak() -> None:
        os.memfd_create("forgotten")

    workers = Workers(1, rpc="torch.distributed.rpc", leak_timeout=0.1)
    with pytest.raises(AssertionError, match="/memfd:forgotten"), workers:
        workers.run(0, leak)


def test_workers_end_when_the_test_run_dies(tmp_path: Path) -> None:
    """pytest-timeout ends a hanging run by os._exit, which runs no cleanup."""
    script = (
        "import os; from tests.test_workers import sleep_forever, torch_workers\n"
        "workers = torch_workers(1, join=False).__enter__(); workers.start(0, sleep_forever)\n"
        "print(workers.pid(0), flush=True); os._exit(3)"
    )
    root = Path(__file__).parent.parent
    command, environment = [sys.executable, "-c", script], {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3, ended.stderr
    pid = int(ended.stdout)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
