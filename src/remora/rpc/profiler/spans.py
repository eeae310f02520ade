"""Calls made while a profiler is on, so that it shows them: `rpc_sync#f(a -> b)`. The caller's part.

Under torch's legacy profiler the callee profiles the function, too (`profiled.py`). Its events come back with the result
and are shown as `rpc_sync#f(a -> b)#remote_op: aten::add`. Under any other profiler the call is an event, and the callee is
not concerned. Without a profiler nothing of this runs.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from remora.agent.calls.future import Future, failure_of
from remora.agent.calls.unseen_failures import Origin
from remora.agent.peers.manager import Peer
from remora.rpc.functions import MARK
from remora.rpc.internal import RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler
from remora.rpc.profiler import profiler_trace
from remora.rpc.profiler.callee_events import Order, Profiled, hand_over, run, run_and_keep
from remora.rpc.profiler.profiler_trace import Event, Trace, TracedCall
from remora.rpc.request_builder import arguments, pack_call, remote_target, script_name
from remora.rref.create import create
from remora.rref.proxy import call_method, method_called
from remora.rref.rref import RRef
from remora.worker import Worker

_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY

_next_ticket = itertools.count()


class Target(NamedTuple):
    """A function and its arguments, as the program gave them."""

    func: Any
    args: Any
    kwargs: dict[str, Any] | None

    @property
    def named(self) -> object:
        """Return what messages to people name the call by."""
        return self.func if self.func is not call_method else method_called(self.args)


def rpc_sync(worker: Worker, peer: Peer, target: Target, timeout: float, pickler: Any) -> Any:
    """Like the function of that name, under a profiler."""
    trace, span = _begin(RPCExecMode.SYNC, worker, peer, target)
    try:
        request = pack_call(peer, *_profiled(peer, trace, target), pickler)
        result = worker.agent.caller.call(peer, *request, timeout, target.named)
    except BaseException:
        span.end([])
        raise
    return _unwrap(result, span)


def rpc_async(
    worker: Worker, peer: Peer, target: Target, timeout: float, pickler: Any, origin: Origin
) -> Future[Any]:
    """Like the function of that name, under a profiler."""
    trace, span = _begin(RPCExecMode.ASYNC, worker, peer, target)
    try:
        request = pack_call(peer, *_profiled(peer, trace, target), pickler)
        inner = worker.agent.caller.call_async(peer, *request, timeout, target.named, origin)
    except BaseException:
        span.end([])
        raise
    return _Following(inner, span, origin).future


def remote(worker: Worker, peer: Peer, target: Target, timeout: float) -> RRef[Any]:
    """Like the function of that name, under a profiler. The profiling future of the reference is done when all is known."""
    kind, what, flags = remote_target(peer, *target)
    trace, span = _begin(RPCExecMode.REMOTE, worker, peer, target)
    ticket = f"{worker.get_worker_info().name} {next(_next_ticket)}"
    if trace is not None:
        kind, what, flags = remote_target(peer, run_and_keep, (ticket, _order(peer, trace, target)), None)
    try:
        rref = create(worker.references, peer, kind, what, target.named, flags, timeout)
    except BaseException:
        span.end([])
        raise
    known: Future[None] = Future("the profile of a call")
    rref._set_profiling_future(known)
    if trace is not None:
        rref._get_future().add_done_callback(lambda _: _fetch(worker, peer, ticket, span, known))
    else:
        rref._get_future().add_done_callback(lambda _: _conclude([], span, known))
    return rref


def _fetch(worker: Worker, peer: Peer, ticket: str, span: Span, known: Future[None]) -> None:
    """The value was made, or not: ask for the events."""
    request = pack_call(peer, hand_over, (ticket,), None, _internal_rpc_pickler)
    arriving = worker.agent.caller.call_async(peer, *request, -1.0, hand_over)
    arriving.add_done_callback(
        lambda arrived: _conclude([] if failure_of(arrived) is not None else arrived.value(), span, known)
    )


def _conclude(remote: list[Event], span: Span, known: Future[None]) -> None:
    span.end(remote)
    known._succeed(None)


def _unwrap(result: Any, span: Span) -> Any:
    if type(result) is not Profiled:
        span.end([])
        return result
    span.end(result.events)
    return result.value


# What is sent.


def _begin(mode: RPCExecMode, worker: Worker, peer: Peer, target: Target) -> tuple[Trace | None, Span]:
    """The trace of the legacy profiler, if it is the one; and the event."""
    me = worker.get_worker_info()
    key = _build_rpc_profiling_key(mode, _name(target), me.name, peer.name)
    if torch._C._autograd._profiler_type() != _LEGACY:
        return None, _Record(key)
    trace = profiler_trace.current_trace()
    return trace, trace.call(key, me.id, is_async=mode is not RPCExecMode.SYNC)


def _name(target: Target) -> str:
    func = target.func
    script = script_name(func)
    if script is not None:
        kind, name = script
        return f"aten::{name}" if kind == "operator" else name
    if func is call_method:
        return str(target.args[1])
    return getattr(func, "__qualname__", None) or type(func).__qualname__


def _profiled(peer: Peer, trace: Trace | None, target: Target) -> Target:
    return target if trace is None else Target(run, (_order(peer, trace, target),), None)


def _order(peer: Peer, trace: Trace, target: Target) -> Order:
    func = target.func
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__}")
    script = script_name(func)
    return Order(
        trace.what,
        script,
        func if script is None else None,
        *arguments(peer, *target),
        hasattr(func, MARK),
    )


class _Record:
    """An event of a profiler that is not the legacy one. It may end on another thread."""

    def __init__(self, key: str) -> None:
        self._over: torch.futures.Future[None] = torch.futures.Future()
        record: Any = record_function(key)
        record.__enter__()
        record._call_end_callbacks_on_future(self._over)  # keeps what the profiler knows of this thread

    def end(self, remote: list[Event]) -> None:
        self._over.set_result(None)


Span = TracedCall | _Record  # a call, as an event of the profiler


class _Following:
    """A future that has the outcome of another one, after the profiler was told."""

    def __init__(self, inner: Future[Any], span: Span, origin: Origin) -> None:
        self._inner = inner
        self._span = span
        self.future: Future[Any] = Future(self, origin)
        inner.add_done_callback(self._follow)

    @property
    def what(self) -> str:
        return self._inner.what

    def cancel(self) -> bool:
        """The caller gives up."""
        return self._inner.cancel()

    def _follow(self, _: object) -> None:
        error = self._inner.exception()
        if error is None:
            self.future._succeed(_unwrap(self._inner.value(), self._span))
            return
        self._span.end([])
        if not self._inner.cancelled():  # else it was by our future, which knows
            self.future._fail(error)
