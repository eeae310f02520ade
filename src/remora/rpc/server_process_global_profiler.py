"""A profiler of everything that this worker serves, whatever thread it runs on. See `rpc.remote(…).rpc_sync().__enter__()`.

While such a profile is on, the worker's two ways to run something are wrapped; otherwise nothing of this runs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from remora.agent.dispatch import Request
from remora.agent.execution import Execution, Finish
from remora.rpc import api, events
from remora.rpc.events import What

Run = Callable[[Request, Any, Finish], None]

_profiles: WeakKeyDictionary[Execution, list[_server_process_global_profile]] = WeakKeyDictionary()


class _server_process_global_profile(profile):
    """Profiles may overlap: what runs while several are on is part of all of them.

    After it, `process_global_function_events` has the events of each request by itself, `function_events` all of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.process_global_function_events: list[list[FunctionEvent]] = []

    def __enter__(self) -> _server_process_global_profile:
        if self.enabled:
            if self.entered:
                raise RuntimeError("Profiler context manager is not reentrant")
            self.entered = True
            _begin(api._get_current_rpc_agent().agent.execution, self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.enabled:
            return
        _end(self)
        flat = [event for events_of_one in self.process_global_function_events for event in events_of_one]
        make_list: Any = EventList
        self.function_events = make_list(flat, profile_memory=self.profile_memory, with_flops=self.with_flops)
        self.function_events._build_tree()

    @property
    def what(self) -> What:
        return What(self.record_shapes, self.profile_memory, self.with_flops)


def _begin(execution: Execution, wanted: _server_process_global_profile) -> None:
    running = _profiles.setdefault(execution, [])
    running.append(wanted)
    if len(running) == 1:
        for name in ("run_function", "run_script"):
            setattr(execution, name, _profiled(getattr(execution, name), running))


def _end(wanted: _server_process_global_profile) -> None:
    for execution, running in _profiles.items():
        if wanted in running:
            running.remove(wanted)
            if not running:
                del execution.run_function, execution.run_script  # those of the class show again


def _profiled(run: Run, running: list[_server_process_global_profile]) -> Run:
    """Run a request for all the profiles that are on. They have its events before its caller has the answer."""

    def profiled(request: Request, target: Any, finish: Finish) -> None:
        trace = events.start(running[-1].what) if running else None
        concerned = list(running) if trace is not None else []
        thread = threading.get_ident()

        def report() -> None:
            if not concerned or threading.get_ident() != thread:  # the answer came later, or from another thread
                return
            recorded = events.stop()
            while concerned:
                each = concerned.pop()
                if each in running and recorded:
                    each.process_global_function_events.append(copy.deepcopy(recorded))

        def finished(value: object, error: BaseException | None) -> None:
            report()
            finish(value, error)

        try:
            run(request, target, finished)
        finally:
            report()

    return profiled
