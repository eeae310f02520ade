"""One side of a comparison: a process that imports one tree's Remora, and starts groups of workers that do the same.

The import path of a process is settled when it starts, and worker processes are forked from a server that has imported
Remora already. So each tree has a process of its own, with a server of its own. It does what the comparison asks for over
a pipe: enter a group, run a measure in it, leave it. This file is both ends: `Side` is the asker's, `main` the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from benchmarks.group import MEASURE_TIMEOUT, START_TIMEOUT, GroupFailed, RunMeasure, opened
from benchmarks.measure import Measure, Reading, Setting
from benchmarks.trees import ROOT

END_TIMEOUT = 20.0


@dataclass(frozen=True)
class Enter:
    """Start a group. It stays up until `Leave`."""

    setting: Setting


@dataclass(frozen=True)
class Run:
    """Have the group run this."""

    measure: Measure


@dataclass(frozen=True)
class Leave:
    """End the group."""


Request = Enter | Run | Leave


class Side:
    """`with Side(packages) as side, side.group(setting) as run: run(measure)`: all processes are gone afterwards.

    `variables` are added to the environment of its processes.
    """

    def __init__(self, packages: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._packages = packages.resolve()
        self._pipe, theirs = Pipe()
        with theirs:
            # A session of its own: Ctrl-C at the terminal strikes the asker alone, which then ends both sides in order.
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from benchmarks.side import main; main({theirs.fileno()})"],
                cwd=ROOT,
                env={**os.environ, **variables, "PYTHONPATH": _path_with(self._packages)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def __enter__(self) -> Side:
        try:
            imported = Path(self._receive(START_TIMEOUT)).resolve()
            if not imported.is_relative_to(self._packages):
                raise GroupFailed(f"Remora of {self._packages} was wanted, and {imported} was imported")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    @contextmanager
    def group(self, setting: Setting) -> Iterator[RunMeasure]:
        """A group of this tree's workers; yields a function that runs a measure in it."""
        self._ask(Enter(setting))
        try:
            yield lambda measure: self._ask(Run(measure))
        except Exception:
            self._ask(Leave())
            raise
        # Ctrl-C may have struck between a request and its answer: then nothing more is asked, and `_end` follows.
        self._ask(Leave())

    def _ask(self, request: Request) -> list[Reading]:
        self._pipe.send(request)
        answer: list[Reading] = self._receive(START_TIMEOUT + MEASURE_TIMEOUT)  # more than the other end waits
        return answer

    def _receive(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            self._end()  # a late answer would be taken for that to the next request
            raise GroupFailed(f"no answer within {timeout:g} s from Remora of {self._packages}")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise GroupFailed(f"the process with Remora of {self._packages} died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _end(self) -> None:
        """SIGTERM lets it end its group, whatever it is in the middle of; if it does not, its session is killed."""
        self._process.terminate()  # first: were the pipe closed already, it could strike while the process ends
        self._pipe.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _path_with(packages: Path) -> str:
    """PYTHONPATH comes before what is installed, an editable installation included."""
    return os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))


def main(descriptor: int) -> None:
    """The life of the process."""
    import remora

    signal.signal(signal.SIGTERM, _unwind)
    with Connection(descriptor) as pipe:
        pipe.send(remora.__file__)
        _serve(pipe)


def _unwind(*_: object) -> None:
    """Leave every context manager, so that the processes of the group end, too; but not the end itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _serve(pipe: Connection) -> None:
    with ExitStack() as group:
        run: RunMeasure | None = None
        while (request := _next(pipe)) is not None:
            readings: list[Reading] = []
            try:
                match request:
                    case Enter(setting):
                        run = group.enter_context(opened(setting))
                    case Run(measure):
                        assert run is not None
                        readings = run(measure)
                    case Leave():
                        group.close()
                pipe.send(readings)
            except Exception as error:
                pipe.send(error)


def _next(pipe: Connection) -> Request | None:
    """None when the asker is gone."""
    try:
        request: Request = pipe.recv()
    except EOFError:
        return None
    return request
