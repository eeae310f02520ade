"""Records what the workers of this process's group do, as a timeline that Perfetto opens (docs/observing.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from remora.observe.snapshots import observer
from remora.observer.group_observer import GroupObserver
from remora.observer.group_trace import GroupTrace
from remora.observer.trace import write_trace

log = logging.getLogger("remora")

LONGEST = 600.0  # seconds of a block that are recorded


class GroupProfile:
    """A timeline being recorded. It is written at the end of the block, or after so many steps."""

    def __init__(self, path: str, group: GroupObserver, torch: bool, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be a positive number, or None, got {steps!r}")
        self._path = path
        self._steps_left = steps
        self._trace: GroupTrace | None = GroupTrace(group, LONGEST, torch)

    def step(self) -> None:
        """A step of the program is over. The last of the steps that were asked for writes the file."""
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.end()

    def end(self) -> None:
        """Write the file. Harmless if done twice."""
        trace, self._trace = self._trace, None
        if trace is not None:
            timeline = trace.end()
            write_trace(self._path, timeline)
            for name, problem in sorted(trace.problems.items()):
                log.warning("the trace %s lacks a part of %s: %s", self._path, name, problem)


@contextmanager
def trace(path: str | os.PathLike[str], *, torch: bool = False) -> Iterator[None]:
    """Record all calls between the workers of the group while the block runs, and write them to a file at its end. `torch`:
    the operators of torch, too. At most ten minutes are recorded."""
    with _recorded(path, torch, None):
        yield


@contextmanager
def profile_group(path: str | os.PathLike[str], *, steps: int | None = None) -> Iterator[GroupProfile]:
    """Run torch's profiler on every worker of the group while the block runs, and write one file of all operators and
    calls. `steps`: stop after the program has called `step()` of what this yields so many times."""
    with _recorded(path, True, steps) as profile:
        yield profile


@contextmanager
def _recorded(path: str | os.PathLike[str], torch: bool, steps: int | None) -> Iterator[GroupProfile]:
    with observer() as group:
        profile = GroupProfile(os.fspath(path), group, torch, steps)
        try:
            yield profile
        finally:
            profile.end()
