"""A group of worker processes of one contestant, in which worker0 runs benchmarks and the others serve."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType

from benchmarks.contestants import Place
from benchmarks.measure import Measure, Reading, Setting, Skipped

START_TIMEOUT = 180.0
MEASURE_TIMEOUT = 300.0
END_TIMEOUT = 30.0

RunMeasure = Callable[[Measure], list[Reading]]

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torch", "torch.distributed.rpc", "remora.rpc", "benchmarks.suite"])


class GroupFailed(RuntimeError):
    """A worker raised, died or did not answer."""


class Group:
    """`with Group(setting) as group: group.run(measure)`: processes are fresh, and gone afterwards."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._folder = tempfile.TemporaryDirectory(prefix="remora-bench-")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._lost: str | None = None  # why worker0 cannot be asked any more

    def __enter__(self) -> Group:
        try:
            for rank in range(self._setting.contestant.processes(self._setting.workers)):
                self._start(rank)
            for pipe in self._pipes:
                _answer(pipe, START_TIMEOUT)
        except BaseException:
            self._kill()
            raise
        return self

    def _start(self, rank: int) -> None:
        ours, theirs = _fork.Pipe()
        init_method = f"file://{self._folder.name}/store"
        process = _fork.Process(target=_serve, args=(self._setting, rank, init_method, theirs), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def run(self, measure: Measure) -> list[Reading]:
        """Have worker0 run it."""
        if self._lost:
            raise GroupFailed(self._lost)
        try:
            self._pipes[0].send(measure)
            return _answer(self._pipes[0], MEASURE_TIMEOUT)
        except OSError as error:
            self._lost = f"{self._setting.contestant.name} was lost earlier: {error or type(error).__name__}"
            raise GroupFailed(self._lost) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None and self._lost is None:
            for pipe in self._pipes:
                pipe.send(None)
            for process in self._processes:
                process.join(END_TIMEOUT)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


@contextmanager
def opened(setting: Setting) -> Iterator[RunMeasure]:
    """What runs a measure in a fresh group; for a benchmark without workers, in this process."""
    if not setting.workers:
        yield lambda measure: list(measure(setting))
        return
    with Group(setting) as group:
        yield group.run


def _answer(pipe: Connection, timeout: float) -> list[Reading]:
    if not pipe.poll(timeout):
        raise TimeoutError(f"no answer within {timeout:g} s")
    try:
        answer: list[Reading] | Exception = pipe.recv()
    except EOFError:
        raise ConnectionError("a worker died") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(setting: Setting, rank: int, init_method: str, pipe: Connection) -> None:
    """The life of one worker."""
    warnings.simplefilter("ignore")  # torch.distributed.rpc warns of its own use of deprecated things
    try:
        with setting.contestant.joined(Place(rank, setting.workers, setting.transport, init_method)) as calls:
            pipe.send([])
            while (measure := pipe.recv()) is not None:
                pipe.send(_attempt(measure, replace(setting, joined=calls)))
    except Exception:
        pipe.send(GroupFailed(traceback.format_exc()))
        os._exit(1)


def _attempt(measure: Measure, setting: Setting) -> list[Reading] | Exception:
    try:
        return list(measure(setting))
    except Skipped as error:
        return error
    except Exception:
        return GroupFailed(traceback.format_exc())
