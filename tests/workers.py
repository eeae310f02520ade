"""Real worker processes for tests: started in tens of milliseconds, told what to run, ended whatever happens.

    with Workers(3) as workers:
        assert workers.run(0, call, "worker1") == 7  # call("worker1") on worker 0: its value, or what it raises
        pending = workers.start(1, call_slowly, "worker2")  # the same without waiting
        workers.kill(2)
        with pytest.raises(ProcessEnded):
            pending.result(timeout=5)

Each worker runs what it is sent on its main thread, one after another. At the end of the `with` block the workers shut
down gracefully, or at once if some were killed or stopped, and must exit cleanly in time. What they printed is printed
then, so pytest shows it when the test fails; after an error, with the stacks of all their threads.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from remora.testing.processes import Pending, WorkerProcess
from tests import leaks, worker_process
from tests.worker_process import Assignment

T = TypeVar("T")
Settings = Mapping[str, Any]

_PRELOADED = ["torch", "torch.distributed.rpc", "remora.rpc", "remora.testing.processes", "pytest", "tests.worker_process"]
_STACK_DUMP_TIMEOUT = 1.0


class _Worker(WorkerProcess):
    """A worker process, what it printed, and whether it was stopped."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment.rank)
        self.output = Path(assignment.output)
        self.stopped = False
        self.send(worker_process.prepare, assignment)


class Workers:
    """`n` worker processes that have joined one group as worker0, worker1, …

    `options` are settings for the backend options, or a function of the rank that yields them. `rpc` names the module
    under test. With `join=False` the processes start and join nothing. `timeout` bounds starting, and ending.
    After shutdown each worker has `leak_timeout` to be rid of what it did not hold before it joined; None: no check.
    """

    def __init__(
        self,
        n: int,
        *,
        options: Settings | Callable[[int], Settings] = {},  # noqa: B006 (never changed)
        rpc: str = "remora.rpc",
        join: bool = True,
        timeout: float = 30.0,
        leak_timeout: float | None = 3.0,
    ) -> None:
        self.world_size = n
        self.rpc = rpc
        self._options = options
        self._join = join
        self._timeout = timeout
        self._leak_timeout = leak_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="remora-test-")
        self._processes: dict[int, _Worker] = {}
        self._all_well = True

    @property
    def init_method(self) -> str:
        """Where the workers meet."""
        return f"file://{self._folder.name}/rendezvous"

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def output(self, rank: int) -> str:
        """What the worker has printed so far."""
        return self._processes[rank].output.read_text(errors="replace")

    def start(self, rank: int, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        return self._processes[rank].send(fn, *args, **kwargs)

    def run(self, rank: int, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.start(rank, fn, *args, **kwargs).result(self._timeout)

    def run_all(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run it on every worker at the same time; the values in order of rank."""
        pending = [self.start(rank, fn, *args, **kwargs) for rank in sorted(self._processes)]
        deadline = time.monotonic() + self._timeout
        return [each.result(max(0.0, deadline - time.monotonic())) for each in pending]

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._all_well = False
        self._processes[rank].signal(signal.SIGKILL)
        if self._processes[rank].wait(self._timeout) is None:
            raise TimeoutError(f"worker {rank} survived SIGKILL for {self._timeout:g} s")

    def stop(self, rank: int) -> None:
        """SIGSTOP: alive, and silent."""
        self._processes[rank].stopped = True
        self._processes[rank].signal(signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """SIGCONT: go on after `stop`."""
        self._processes[rank].signal(signal.SIGCONT)
        self._processes[rank].stopped = False

    def add(self, rank: int) -> None:
        """Start one more process, or a new one in the place of one that was killed. It has not joined the group."""
        if rank in self._processes:
            self._processes.pop(rank).close()
        descriptor, output = tempfile.mkstemp(dir=self._folder.name, prefix=f"worker{rank}-")
        os.close(descriptor)
        settings = dict(self._options(rank) if callable(self._options) else self._options)
        self._processes[rank] = _Worker(
            Assignment(self.rpc, rank, self.world_size, self.init_method, settings, output, self._leak_timeout)
        )

    def join(self, rank: int) -> Pending[None]:
        """Have a worker call `init_rpc`."""
        return self.start(rank, worker_process.join)

    def __enter__(self) -> Workers:
        _start_fork_server()
        try:
            for rank in range(self.world_size):
                self.add(rank)
            self.run_all(worker_process.join if self._join else worker_process.arrive)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            self._leave()
        except BaseException:
            self._abandon()
            raise
        self._close()

    def _leave(self) -> None:
        deadline = time.monotonic() + self._timeout
        present = [worker for worker in self._processes.values() if worker.alive and not worker.stopped]
        graceful = self._all_well and len(present) == len(self._processes)
        for pending in [worker.send(worker_process.leave, graceful) for worker in present]:
            pending.result(max(0.0, deadline - time.monotonic()))
        for worker in present:
            worker.dismiss()
        for worker in present:
            code = worker.wait(max(0.0, deadline - time.monotonic()))
            if code != 0:
                state = "did not exit in time" if code is None else f"exited with code {code}"
                raise AssertionError(f"worker {worker.rank} {state} after shutdown")

    def _abandon(self) -> None:
        """The test has failed: have the workers say where they stand, then end them."""
        for worker in self._processes.values():
            if worker.alive and not worker.stopped:
                _dump_stacks(worker)
        self._close()

    def _close(self) -> None:
        for worker in self._processes.values():
            worker.signal(signal.SIGKILL)  # all before waiting for any, or the last complain about the first
        for rank, worker in self._processes.items():
            worker.close()
            if text := self.output(rank).strip():
                print(f"--- worker {rank} printed ---\n{text}")
        self._folder.cleanup()


def _dump_stacks(worker: _Worker) -> None:
    size = worker.output.stat().st_size
    worker.signal(signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_DUMP_TIMEOUT
    while worker.alive and worker.output.stat().st_size == size and time.monotonic() < deadline:
        time.sleep(0.005)


def _start_fork_server() -> None:
    multiprocessing.forkserver.set_forkserver_preload(_PRELOADED)
    with leaks.kept():
        multiprocessing.forkserver.ensure_running()
