"""Runs workers in processes of their own, for users' tests: starts them together, and ends them whatever happens.

    with Processes(2, faults="drop PYTHON_CALL worker0->worker1 1") as workers:
        assert workers.run(0, call_the_other) == 3   # its value, or what it raises
        workers.kill(1)

Each worker runs the functions it is sent on its main thread, one after the other. Functions travel by name if they can be
imported, else by value. The end of the block ends all processes, also in the midst of a function.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from remora.faults.injector import Report
from remora.faults.kinds import Freeze, Kill
from remora.faults.plan import Plan
from remora.options import check_timeout

T = TypeVar("T")

_context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
_PRELOADED = ["torch", "remora.rpc", "remora.testing.processes"]
_PATIENCE = 10.0
_GLANCE = 0.01  # how long to wait for an answer that may never come before another look at its process


class ProcessEnded(RuntimeError):
    """The process ended before it answered."""


class RemoteTraceback(Exception):
    """The traceback of an exception in the other process; the cause of what `result` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Pending(Generic[T]):
    """A function that a worker runs, or is about to run."""

    def __init__(self, process: WorkerProcess, number: int) -> None:
        self._process = process
        self._number = number

    def done(self) -> bool:
        """Return True if `result` would return at once."""
        try:
            self._process.answer(self._number, 0.0)
        except TimeoutError:
            return False
        return True

    def result(self, timeout: float = 30.0) -> T:
        """Return the result of the function; raise its exception, TimeoutError, or ProcessEnded."""
        timeout = check_timeout(timeout, "the timeout of result()")
        value, error, where = self._process.answer(self._number, timeout)
        if error is not None:
            raise error from RemoteTraceback(where)
        result: T = value
        return result


class WorkerProcess:
    """One process as its parent sees it: it runs the functions that it is sent, on its main thread, one after the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sent = 0
        self._answers: dict[int, bytes] = {}  # each is unpickled by its own waiter: a failure there concerns no other
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        self._sent += 1
        try:
            self._pipe.send((self._sent, cloudpickle.dumps((function, args, kwargs))))
        except BrokenPipeError:
            raise self._ended() from None
        return Pending(self, self._sent)

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(f"worker{self.rank} ended with exit code {self.wait(_PATIENCE)}")

    @property
    def pid(self) -> int:
        pid: int = self.process.pid
        return pid

    @property
    def alive(self) -> bool:
        alive: bool = self.process.is_alive()
        return alive

    def answer(self, number: int, timeout: float) -> tuple[Any, BaseException | None, str]:
        end = time.monotonic() + timeout
        while number not in self._answers:
            if not self._pipe.poll(max(end - time.monotonic(), 0.0)):
                raise TimeoutError(f"worker{self.rank} did not answer within {timeout:g} s")
            try:
                arrived, pickled = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                raise self._ended() from None
            self._answers[arrived] = pickled
        answer: tuple[Any, BaseException | None, str] = cloudpickle.loads(self._answers[number])
        return answer

    def signal(self, number: int) -> None:
        if self.alive:  # asked first: the number of a process that has ended may be another one's by now
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + _PATIENCE
        while self.alive and not _stands_still(self.pid) and time.monotonic() < end:
            time.sleep(0.001)

    def dismiss(self) -> None:
        """Have it end by itself, when it has run what it was sent."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def wait(self, timeout: float) -> int | None:
        """Wait until it has ended. Its exit code; None if it did not end in time."""
        self.process.join(timeout)
        code: int | None = self.process.exitcode
        return code

    def close(self) -> None:
        """End it, if it has not ended, and let go of what stands for it."""
        self._pipe.close()
        self.signal(signal.SIGKILL)
        self.process.join(_PATIENCE)
        self.process.close()


class Processes:
    """`n` workers, worker0, worker1, …, each in a process of its own.

    `options` are those of `RemoraRpcBackendOptions`, the same for all; `faults` is a plan that all of them follow.
    """

    def __init__(self, n: int, *, faults: Plan | str = "", timeout: float = 60.0, **options: Any) -> None:
        if hasattr(_context, "set_forkserver_preload"):
            _context.set_forkserver_preload(_PRELOADED)
        self._timeout = check_timeout(timeout, "timeout")
        self._folder = tempfile.TemporaryDirectory(prefix="remora-")
        self._processes: list[WorkerProcess] = []
        settings = {"init_method": f"file://{self._folder.name}/rendezvous", "faults": str(faults), **options}
        try:
            self._processes += [WorkerProcess(rank) for rank in range(n)]
            starting = [process.send(_join, process.rank, n, settings) for process in self._processes]
            for pending in starting:
                pending.result(timeout)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    def pid(self, rank: int) -> int:
        """Return the process id of a worker."""
        return self._processes[rank].pid

    def start(self, rank: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        """Make a worker run a function, without waiting for it."""
        return self._processes[rank].send(function, *args, **kwargs)

    def run(self, rank: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Make a worker run a function; return its value, or raise its exception."""
        return self.start(rank, function, *args, **kwargs).result(self._timeout)

    def run_all(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Make all living workers run it at the same time; return the values in order."""
        living = [process for process in self._processes if process.alive]
        return [each.result(self._timeout) for each in [process.send(function, *args, **kwargs) for process in living]]

    def set_faults(self, plan: Plan | str) -> None:
        """Make all living workers follow another plan from now on. A worker that the plan kills or freezes need not
        confirm."""
        parsed = Plan.parse(plan) if isinstance(plan, str) else plan
        victims = {fault.worker for fault in parsed.faults if isinstance(fault, Freeze | Kill)}
        living = [process for process in self._processes if process.alive]
        for process, pending in [(process, process.send(_set_faults, str(parsed))) for process in living]:
            if f"worker{process.rank}" in victims:
                self._await_answer_or_silence(process, pending)
            else:
                pending.result(self._timeout)

    def _await_answer_or_silence(self, process: WorkerProcess, pending: Pending[None]) -> None:
        end = time.monotonic() + self._timeout
        while True:
            try:
                pending.result(_GLANCE)
                return
            except ProcessEnded:
                return
            except TimeoutError:
                if _stands_still(process.pid):
                    return
                if time.monotonic() > end:
                    raise

    def fault_report(self, rank: int) -> Report:
        """Return what the plan did on one worker, to the messages it sent."""
        return self.run(rank, _fault_report)

    def kill(self, rank: int) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._processes[rank].signal(signal.SIGKILL)
        self._processes[rank].wait(_PATIENCE)

    def freeze(self, rank: int) -> None:
        """Send SIGSTOP: the process is alive, and silent. Return when all its threads stand still (where that can be
        seen)."""
        self._processes[rank].freeze()

    def thaw(self, rank: int) -> None:
        """Send SIGCONT."""
        self._processes[rank].signal(signal.SIGCONT)

    def shutdown(self, graceful: bool = True) -> None:
        """Make all living workers shut down. Not needed: the end of the block ends them anyway."""
        self.run_all(_shutdown, graceful)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.freeze()  # all of them first: a worker that still ran would report that the others are gone
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._folder.cleanup()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _stands_still(pid: int) -> bool:
    folder = f"/proc/{pid}/task"
    if not os.path.isdir(folder):
        return True
    try:
        return all(_state(f"{folder}/{task}/stat") in "TtZX" for task in os.listdir(folder))
    except OSError:  # a thread ended while we looked
        return False


def _state(path: str) -> str:
    with open(path) as stat:
        return stat.read().rpartition(")")[2].split()[0]


# In the other process. Imports are made here: the parent needs none of them.


def _serve(pipe: Connection) -> None:
    while True:
        try:
            request = pipe.recv()
            if request is None:
                return  # it was dismissed
            number, pickled = request
            pipe.send((number, _run(pickled)))
        except (EOFError, ConnectionError):
            os._exit(0)  # the process of the test has ended


def _run(pickled: bytes) -> bytes:
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
        value, error, where = function(*args, **kwargs), None, ""
    except BaseException as raised:
        value, error, where = None, raised, traceback.format_exc()
    try:
        answer: bytes = cloudpickle.dumps((value, error, where))
        cloudpickle.loads(answer)  # some values and exceptions can be pickled and not be rebuilt
    except Exception as failure:
        about = value if error is None else error
        told = RuntimeError(f"{type(about).__name__} could not be sent back to the test ({failure!r}): {about!r}")
        answer = cloudpickle.dumps((None, told, where))
    return answer


def _join(rank: int, n: int, options: Mapping[str, Any]) -> None:
    from remora import rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.RemoraRpcBackendOptions(**options))


def _shutdown(graceful: bool) -> None:
    from remora import rpc

    rpc.shutdown(graceful=graceful)


def _set_faults(plan: str) -> None:
    from remora.testing import faults

    faults.set(plan)


def _fault_report() -> Report:
    from remora.testing import faults

    return faults.report()
