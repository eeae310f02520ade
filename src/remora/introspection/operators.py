"""Has torch's profiler note the operators of all threads of this process for a while, on a thread of its own.

The profiler is the one that `torch.profiler` is made of. (That module's own `start` imports the compiler of torch, which
takes seconds.) It is one for the whole process: while the program profiles, there is none for us.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

MOST = 200_000  # operators: more are counted, and lost
PATIENCE = 5.0  # seconds in which `end` expects the profiler to have stopped

Row = list[Any]  # name, category, track, start in nanoseconds of the wall clock, nanoseconds

_one_at_a_time = threading.Lock()  # held by the thread that profiles; `acquire` never waits


class OperatorProfile:
    """One profile. It has begun when `begun`, and `operators` are there when `ended`; `problem` says why there are none."""

    def __init__(self, name: str, seconds: float) -> None:
        self.begun = self.ended = False
        self.problem = ""
        self.operators: list[Row] = []
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"remora-{name}-profile", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop profiling; `ended` is set soon."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread is gone."""
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            if not _one_at_a_time.acquire(blocking=False):
                self.problem = "another profile of this process is being made"
                return
            try:
                self._profile()
            finally:
                _one_at_a_time.release()
        except Exception as error:
            self.problem = f"torch's profiler failed: {error}"
        finally:
            self.begun = self.ended = True

    def _profile(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            self.problem = "the program runs torch's profiler itself"
            return
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        profiler = torch.autograd.profiler.profile(
            use_device="cuda" if has_cuda else None,  # (a process that does not use its GPU shall not begin to)
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        with profiler:
            self.begun = True
            self._stop.wait(self._seconds)
        results = profiler.kineto_results
        assert results is not None
        events = results.events()
        self.operators = [_row(each) for each in events[:MOST] if each.duration_ns() >= 0 and not each.is_hidden_event()]
        if len(events) > MOST:
            self.problem = f"{len(events) - MOST:,} more operators were left out"


def _row(event: Any) -> Row:
    device = event.device_type()
    if device.name == "CPU":
        category, track = "operator", f"cpu {event.device_resource_id()}"
    else:
        category, track = "kernel", f"{device.name} {event.device_index()} stream {event.device_resource_id()}"
    return [event.name(), category, track, event.start_ns(), event.duration_ns()]
