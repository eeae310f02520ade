"""A profiler of everything that this worker serves, whatever thread it runs on. Mostly begun by another worker:
`rpc.remote(…).rpc_sync().__enter__()`.

While such a profile is on, it observes what the worker executes; otherwise nothing of this runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import EventList, FunctionEvent

from remora.agent.serving.execution import Execution
from remora.rpc.current_worker import _get_current_rpc_agent
from remora.rpc.profiler import profiler_trace
from remora.rpc.profiler.profiler_trace import What

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
            execution = _get_current_rpc_agent().agent.execution
            running = _profiles.setdefault(execution, [])
            running.append(self)
            execution.observer = partial(_call, running)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.enabled:
            return
        for execution, running in _profiles.items():
            if self in running:
                running.remove(self)
                if not running:
                    execution.observer = None
        flat = [event for events_of_one in self.process_global_function_events for event in events_of_one]
        make_list: Any = EventList
        self.function_events = make_list(flat, profile_memory=self.profile_memory, with_flops=self.with_flops)
        self.function_events._build_tree()

    @property
    def what(self) -> What:
        return What(self.record_shapes, self.profile_memory, self.with_flops)


def _call(
    running: list[_server_process_global_profile], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function for all the profiles that are on. They have its events before its caller has the answer."""
    concerned = list(running)
    if not concerned or profiler_trace.start(concerned[-1].what) is None:
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    finally:
        recorded = profiler_trace.stop()
        for each in concerned:
            if recorded and each in running:
                each.process_global_function_events.append(copy.deepcopy(recorded))
