"""The callee's part of a profiled call: it runs the function under a profiler, and its events go to the caller."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent

from remora.agent.calls.future import Future, failure_of, when_done
from remora.agent.runtime.current import current_worker
from remora.agent.serving.execution import Deferred, call_script
from remora.rpc.profiler import profiler_trace
from remora.rpc.profiler.profiler_trace import Event, Trace, What

_MOST_KEPT = 1024

_kept: dict[str, list[Event]] = {}  # of functions that made the value of a reference, until their caller asks


class Order(NamedTuple):
    """A function to run under the profiler, and what to record of it."""

    what: What
    script: tuple[str, str] | None  # a torch operator or scripted function, by name
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_async: bool

    def run(self) -> Any:
        """Call the function."""
        if self.script is not None:
            return call_script(*self.script, self.args, self.kwargs)
        assert self.function is not None
        return self.function(*self.args, **self.kwargs)


class Profiled(NamedTuple):
    """A result, and what was recorded while it was made."""

    value: Any
    events: list[Event]


Package = Callable[[Any, list[Event]], Any]


def run(order: Order) -> Any:
    """Run what was ordered; the result together with the events."""
    return _observe(order, Profiled)


def run_and_keep(ticket: str, order: Order) -> Any:
    """Run what was ordered, and keep the events until the caller asks for them: the result becomes a value here."""

    def keep(value: Any, recorded: list[Event]) -> Any:
        _kept[ticket] = recorded
        while len(_kept) > _MOST_KEPT:  # of callers that never asked
            del _kept[next(iter(_kept))]
        return value

    return _observe(order, keep)


def hand_over(ticket: str) -> list[Event]:
    """Return the events that were kept."""
    return _kept.pop(ticket, [])


def _observe(order: Order, package: Package) -> Any:
    """Run it. If it goes on after it returned, the calls that it made are events when it is done."""
    me = current_worker().get_worker_info().id
    trace = profiler_trace.start(order.what)  # None: all that this worker serves is being profiled, and that goes first
    try:
        result = order.run()
    finally:
        recorded = profiler_trace.stop() if trace is not None else []

    def conclude(value: Any) -> Any:
        late = trace.take() if trace is not None else []
        return package(value, [_as_sent(event, trace, me) for event in (*recorded, *late) if trace is not None])

    if type(result) is CoroutineType:
        return _awaited(result, conclude)
    if order.is_async:
        return Deferred(order.function or order.script, _followed(result, conclude))
    return conclude(result)


def _as_sent(event: FunctionEvent, trace: Trace, me: int) -> Event:
    return Event(
        event.name,
        event.thread,
        event.node_id if event.node_id != -1 else me,
        event.time_range.start + trace.opened,
        event.time_range.end + trace.opened,
        event.input_shapes,
        event.cpu_memory_usage,
        event.is_async,
        event.sequence_nr,
        event.scope,
        event.fwd_thread,
        event.flops,
    )


async def _awaited(coroutine: Coroutine[Any, Any, Any], conclude: Callable[[Any], Any]) -> Any:
    return conclude(await coroutine)


def _followed(result: Any, conclude: Callable[[Any], Any]) -> Any:
    """Return the answer for the time when the future that an asynchronous function returned is done."""
    if not isinstance(result, torch._C.Future):
        return result  # an error, and its wording is not ours
    answer: Future[Any] = Future("the result of a profiled function")

    def pass_on(done: torch.futures.Future[Any]) -> None:
        error = failure_of(done)
        if error is not None:
            answer._fail(error)
        else:
            answer._succeed(conclude(done.value()))

    when_done(result, pass_on)  # type: ignore[arg-type]
    return answer
