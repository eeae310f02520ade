"""One test case, run in a process group of its own that is gone when the outcome is known. Judges nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "skipped"]
Case = Callable[[], unittest.TestCase]

_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Outcome:
    """What became of one test: why it failed or was skipped, and all that its processes printed."""

    test: str
    status: Status
    seconds: float
    why: str = ""
    output: str = ""


def run_all(cases: Iterable[tuple[str, Case]], jobs: int, timeout: float) -> Iterator[Outcome]:
    """Run the cases, `jobs` at a time, and yield each outcome as it is known. Nothing is left, however this ends."""
    waiting = deque(cases)
    running: list[Trial] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Trial(*waiting.popleft(), timeout))
            for trial in _over(running):
                running.remove(trial)
                yield trial.conclude()
    finally:
        for trial in running:
            trial.conclude()


def _over(running: list[Trial]) -> list[Trial]:
    """Those that have ended, or whose time is up; waits for the first."""
    first_deadline = min(trial.deadline for trial in running)
    ended = wait([trial.sentinel for trial in running], max(0.0, first_deadline - time.monotonic()))
    return [trial for trial in running if trial.sentinel in ended or trial.deadline <= time.monotonic()]


class Trial:
    """A case that has been started."""

    def __init__(self, name: str, case: Case, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="remora-trial-", ignore_cleanup_errors=True)
        self._process = _fork.Process(target=_play, args=(case, Path(self._folder.name)))
        self._process.start()

    @property
    def deadline(self) -> float:
        return self._started + self._timeout

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process has ended."""
        return self._process.sentinel

    def conclude(self) -> Outcome:
        """End what is left of it, and say what became of it."""
        seconds = time.monotonic() - self._started
        ended = bool(wait([self.sentinel], 0.0))
        self._end()
        try:
            status, why = self._verdict(ended)
            return Outcome(self._name, status, seconds, why, _read(Path(self._folder.name, "output")))
        finally:
            self._process.close()
            self._folder.cleanup()

    def _end(self) -> None:
        # Before anyone waits for the process: until then its number, which is the group's, is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended before it had a group
            os.killpg(self._process.ident or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _verdict(self, ended: bool) -> tuple[Status, str]:
        told = _read(Path(self._folder.name, "verdict"))
        if told:
            status, why = json.loads(told)
            return status, why
        if not ended:
            return "failed", f"still running after {self._timeout:g} s"
        return "failed", f"the process that ran the test ended with exit code {self._process.exitcode}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _play(case: Case, folder: Path) -> None:
    """Inside the process: run the case, and leave the verdict in the folder."""
    os.setpgid(0, 0)
    die_with_parent()
    _redirect_output(folder / "output")
    tempfile.tempdir = str(folder)  # tests leave their files behind; the folder goes
    result = unittest.TestResult()
    case().run(result)
    verdict = _status(result)
    unfinished = folder / "unfinished"
    unfinished.write_text(json.dumps(verdict))
    unfinished.rename(folder / "verdict")
    os.killpg(0, signal.SIGKILL)  # itself, and whatever the test left running


def die_with_parent() -> None:
    """However the parent of this process ends, it ends with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def _status(result: unittest.TestResult) -> tuple[Status, str]:
    failures = [text for _, text in (*result.errors, *result.failures)]
    if failures:
        return "failed", "\n".join(failures)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return ("passed", "") if result.testsRun else ("failed", "nothing was run")
