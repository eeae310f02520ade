"""Shows calls in torch's legacy profiler: the calls themselves, and what their callees did. Makes no calls.

That profiler knows one thread. A *trace* belongs to one profile of one thread: it notes the calls that the thread makes
meanwhile, and what comes back of them. When the profile ends, torch turns its records into events, and the events of the
trace are added to them there. All times are microseconds; those on the wire are of the wall clock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

USER_SCOPE = 7  # what record_function gives its events
REMOTE = "#remote_op: "

_next_id = itertools.count(1 << 40)
_legacy: Any = profiler_legacy  # neither is typed
_make_event: Any = FunctionEvent


class What(NamedTuple):
    """The options of a profile: what it records beside names and times."""

    shapes: bool = False
    memory: bool = False
    flops: bool = False


class Event(NamedTuple):
    """An event of a callee, as it is sent to the caller."""

    name: str
    thread: int
    worker: int
    start: float
    end: float
    shapes: Any
    memory: int
    is_async: bool
    sequence: int
    scope: int
    forward_thread: int | None
    flops: int | None


class TracedCall:
    """A call that a profiled thread has made."""

    def __init__(self, key: str, is_async: bool) -> None:
        self.key = key
        self.is_async = is_async
        self.started = now()
        self.ended: float | None = None
        self.remote: list[Event] = []

    def end(self, remote: list[Event] | None = None) -> None:
        """It is over, and this is what its callee did."""
        self.remote = remote or []
        self.ended = now()  # last: another thread may look


class Trace:
    """The calls that one thread makes during one profile."""

    def __init__(self, what: What) -> None:
        self.what = what
        self.opened = now()
        self.worker = -1  # for which the thread makes calls
        self.thread = 0  # as the profiler numbers it
        self._open: list[TracedCall] = []

    def call(self, key: str, worker: int, is_async: bool) -> TracedCall:
        """Take note of a call that begins now."""
        self.worker = worker
        call = TracedCall(key, is_async)
        self._open.append(call)
        return call

    def complete(self, events: list[FunctionEvent]) -> list[FunctionEvent]:
        """Add the calls that have ended to the events of the profile."""
        for event in events:
            if event.node_id == -1 and self.worker != -1:
                event.node_id = self.worker
        events = [*events, *self.take()]
        return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))

    def take(self) -> list[FunctionEvent]:
        """The events of the calls that have ended since the last time."""
        over = [call for call in self._open if call.ended is not None]
        self._open = [call for call in self._open if call not in over]
        return [event for call in over for event in self._events(call)]

    def _events(self, call: TracedCall) -> Iterator[FunctionEvent]:
        assert call.ended is not None
        mine = Event(
            call.key, self.thread, self.worker, call.started, call.ended, [], 0, call.is_async, -1, USER_SCOPE, None, None
        )
        yield self._function_event(mine, is_remote=False)
        skew = _skew(call)
        for event in call.remote:
            moved = event._replace(name=call.key + REMOTE + event.name, start=event.start + skew, end=event.end + skew)
            yield self._function_event(moved, is_remote=True)

    def _function_event(self, event: Event, is_remote: bool) -> FunctionEvent:
        made: FunctionEvent = _make_event(
            id=next(_next_id),
            name=event.name,
            trace_name=event.name,
            thread=event.thread,
            node_id=event.worker,
            start_us=event.start - self.opened,
            end_us=event.end - self.opened,
            fwd_thread=event.forward_thread,
            input_shapes=event.shapes,
            stack=[],
            scope=event.scope,
            cpu_memory_usage=event.memory,
            is_async=event.is_async,
            is_remote=is_remote,
            sequence_nr=event.sequence,
            is_legacy=True,
            flops=event.flops,
        )
        return made


def _skew(call: TracedCall) -> float:
    """Return the time to add to those of the callee. Nothing, if its clock puts its events inside the call, as it should."""
    assert call.ended is not None
    if not call.remote:
        return 0.0
    first, last = min(event.start for event in call.remote), max(event.end for event in call.remote)
    if call.started <= first and last <= call.ended:
        return 0.0
    return (call.started + call.ended - first - last) / 2


def now() -> float:
    """Microseconds of the wall clock."""
    return time.time_ns() / 1000


# The profile of the current thread.


class _Thread(threading.local):
    trace: Trace | None = None


_thread = _Thread()


def current_trace() -> Trace:
    """The trace of the profile that is on; of an unknown one, if it was begun behind our back."""
    if _thread.trace is None:
        _thread.trace = Trace(What())
    return _thread.trace


def start(what: What) -> Trace | None:
    """Begin a profile of this thread; None if one is on."""
    if torch._C._autograd._profiler_enabled():
        return None
    asked = _legacy.profile(record_shapes=what.shapes, profile_memory=what.memory, with_flops=what.flops)
    _legacy._enable_profiler_legacy(asked.config())
    _thread.trace = Trace(what)
    return _thread.trace


def stop() -> list[FunctionEvent]:
    """End the profile that `start` began. Its events, those of calls that have ended among them."""
    found: list[FunctionEvent] = _legacy._parse_legacy_records(_legacy._disable_profiler_legacy())
    return found


def _parse_with_calls(records: Any) -> list[FunctionEvent]:
    """In the place of what torch does when a profile ends."""
    events = _parse(records)
    trace, _thread.trace = _thread.trace, None
    if trace is None:
        return events
    first = next((record for thread in records for record in thread if record.name() == "__start_profile"), None)
    if first is not None:
        trace.thread = first.thread_id()
        # The profiler's own zero: this thread may have been descheduled between that record and the trace's beginning.
        trace.opened = first.start_us()
    return trace.complete(events)


def _start_with_trace(profile: Any) -> None:
    """In the place of what torch does when a profile begins."""
    _start(profile)
    _thread.trace = Trace(What(profile.record_shapes, profile.profile_memory, profile.with_flops))


# Two functions of torch, replaced when this module is imported: a profile may begin before a worker does.
_parse: Callable[[Any], list[FunctionEvent]] = _legacy._parse_legacy_records
_start: Callable[[Any], None] = _legacy.profile._start_trace
_legacy._parse_legacy_records = _parse_with_calls
_legacy.profile._start_trace = _start_with_trace
