"""A process that receives damaged bytes in our place. That it dies, falls silent or grows is what we want to know.

    with Subject() as subject:
        verdict = subject.ask(Question("body", sample, mutations))

The process is forked from a server that has imported everything, so a new one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from tests import leaks
from tests.damage.receivers import CLEAR, GROWTH, RECEIVERS, BeyondUs, Exposed, Sample, memos_bounded

PATIENCE = 30.0  # seconds for an answer, on a host with other things to do
MOST_SHOWN = 20_000  # characters of its stacks
M_ARENA_MAX = -8  # of glibc
ADDRESS_SPACE = 2 << 30  # bytes more than it has when it starts: who asks for as much is told that there is none

_fork = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "remora.rpc", "remora.testing.world", "tests.damage.subject", "tests.damage.trials", "tests.workers"]


@dataclass(frozen=True)
class Verdict:
    """What became of it. `problem` is empty if all is as it should be."""

    problem: str
    outcome: str = ""
    seconds: float = 0.0
    grown: int = 0  # bytes of memory that the process had at most, beyond what it ever had before

    def __str__(self) -> str:
        return self.problem or f"well: {self.outcome}"


class Subject:
    """The process, seen from here. One that is gone is replaced by the next question."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._process: Any = None
        self._pipe: Connection | None = None
        self._stacks = ""  # the file to which the process writes where its threads are when it ends by a signal
        self.started = 0

    def ask(self, task: Callable[..., str], *args: Any) -> Verdict:
        """Have it run `task(*args)`, which returns what came of it, or raises what is wrong."""
        if self._process is None:
            self.start()
        assert self._pipe is not None
        begun = time.monotonic()
        try:
            self._pipe.send((task, args))
            if not self._pipe.poll(self._patience):
                return self._end(f"no answer for {self._patience:g} s", time.monotonic() - begun)
            verdict: Verdict = self._pipe.recv()
        except (EOFError, OSError):
            return self._end("", time.monotonic() - begun)
        if verdict.problem:
            self.close()  # what it is like now should not count for the next one
        return verdict

    def receive(self, sample: Sample) -> Verdict:
        """Give one receiver some bytes."""
        return self.ask(receive, sample)

    def start(self) -> None:
        """Have the process now."""
        _fork.set_forkserver_preload(_PRELOADED)
        with leaks.kept():
            multiprocessing.forkserver.ensure_running()
        self._pipe, theirs = _fork.Pipe()
        number, self._stacks = tempfile.mkstemp(prefix="remora-damage-")
        os.close(number)
        self._process = _fork.Process(target=_serve, args=(theirs, self._stacks), daemon=True)
        self._process.start()
        theirs.close()
        self.started += 1

    def _end(self, problem: str, seconds: float) -> Verdict:
        process = self._process
        if problem:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)
        process.join(10.0)
        code = process.exitcode
        if not problem:
            died = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            problem = f"the process died: {died}"
        with open(self._stacks) as file:
            stacks = file.read(MOST_SHOWN)
        self.close()
        return Verdict(f"{stacks}\n{problem}", "", seconds)

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join(10.0)
        self._process.close()
        assert self._pipe is not None
        self._pipe.close()
        self._process = self._pipe = None
        os.unlink(self._stacks)

    def __enter__(self) -> Subject:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


# In the process.


def receive(sample: Sample) -> str:
    """What a receiver makes of its sample. Raises if that is not as it should be."""
    try:
        with memos_bounded():
            found = RECEIVERS[sample.receiver](sample)
    except BeyondUs:
        return "beyond us"
    except Exposed:
        raise
    except MemoryError:
        return "MemoryError"
    except Exception as error:
        if not isinstance(error, CLEAR.get(sample.receiver, (Exception,))):
            raise
        return type(error).__name__
    return f"{type(found).__name__}"


def _serve(pipe: Connection, stacks: str) -> None:
    _prepare(stacks)
    while True:
        try:
            task, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send(_judged(task, args))


def _prepare(stacks: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        # An arena for each thread takes 64 MB of addresses, and with many processors there are as many as threads: all that
        # the limit leaves.
        mallopt(M_ARENA_MAX, 2)
    with open("/proc/self/statm") as file:
        space = int(file.read().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    logging.disable(logging.CRITICAL)
    if not os.environ.get("REMORA_DAMAGE_OUTPUT"):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    faulthandler.enable(os.open(stacks, os.O_WRONLY))
    threading.excepthook = _note_thread
    gc.collect()
    gc.freeze()  # the collector need not look at all of torch each time


_lost: list[str] = []


def _note_thread(args: Any) -> None:
    """A thread ended by an exception: none should."""
    _lost.append("".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)))


def _judged(task: Callable[..., str], args: tuple[Any, ...]) -> Verdict:
    begun, before = time.monotonic(), _peak()
    _lost.clear()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome, problem = task(*args), ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            sys.exit(1)
        outcome, problem = "", "".join(traceback.format_exception(error))
    seconds, grown = time.monotonic() - begun, _peak() - before
    if _lost and not problem:
        problem = f"a thread ended by an exception: {_lost[0]}"
    if grown > GROWTH and not problem:
        problem = f"the process grew by {grown >> 20} MB"
    return Verdict(problem, outcome, seconds, grown)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
