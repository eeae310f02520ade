"""The functions of `torch.distributed.rpc.api`, on the current worker of this process. A call begins here."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar, TypeVarTuple, overload

import torch

from remora import autograd
from remora.agent.calls.future import Future
from remora.agent.runtime.current import acting_worker, current_worker, process_state, thread_state
from remora.options import check_timeout
from remora.rpc import all_gather, request_builder
from remora.rpc.all_gather import AllGatherStates
from remora.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from remora.rpc.current_worker import _get_current_rpc_agent, _require_initialized, _reset_current_rpc_agent

# As torch's module offers them.
from remora.rpc.current_worker import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from remora.rpc.current_worker import _set_and_start_rpc_agent as _set_and_start_rpc_agent
from remora.rpc.internal import PythonUDF as PythonUDF
from remora.rpc.internal import RPCExecMode as RPCExecMode
from remora.rpc.internal import _build_rpc_profiling_key as _build_rpc_profiling_key
from remora.rpc.internal import _internal_rpc_pickler
from remora.rpc.profiler import spans
from remora.rpc.profiler.spans import Target
from remora.rref.create import create
from remora.rref.proxy import call_method, method_called
from remora.rref.reference_snapshot import Snapshot
from remora.rref.references import Calls
from remora.rref.rref import RRef
from remora.vocabulary.ids import WorkerInfo
from remora.worker import Worker

log = logging.getLogger("remora")

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# The types of calls. A tuple of arguments is checked against the parameters of the function; a list cannot be, and with
# `kwargs` nothing is. A function that answers later (`async def`, or marked with `async_execution`) yields its answer.
To: TypeAlias = "str | int | WorkerInfo"
Later: TypeAlias = "Coroutine[Any, Any, R] | torch.futures.Future[R]"
Args: TypeAlias = "tuple[*Ts] | list[Any]"
AnyArgs: TypeAlias = "tuple[Any, ...] | list[Any] | None"

# Programs and tests replace these; they are looked up when needed.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()

_profiler_enabled = torch._C._autograd._profiler_enabled

PyRRef = RRef


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The WorkerInfo of the worker of that name, or of this one."""
    worker = _get_current_rpc_agent()
    return worker.get_worker_info() if worker_name is None else worker.get_worker_info(worker_name)


def _to_worker_info(to: str | int | WorkerInfo) -> WorkerInfo:
    return _get_current_rpc_agent().peer(to).info


def get_rpc_timeout() -> float:
    """Seconds that calls may take which do not say otherwise; 0 is for ever."""
    return _get_current_rpc_agent().agent.caller.timeout


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:
    """Change the default timeout of later calls."""
    _get_current_rpc_agent().agent.caller.timeout = check_timeout(rpcTimeoutSeconds, "the default timeout")


# Calls.


@overload
def rpc_sync(
    to: To, func: Callable[[*Ts], Later[R]], args: Args[*Ts], kwargs: None = None, timeout: float = ...
) -> R: ...
@overload
def rpc_sync(
    to: To, func: Callable[[], Later[R]], args: None = None, kwargs: None = None, timeout: float = ...
) -> R: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., Later[R]], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> R: ...
@overload
def rpc_sync(to: To, func: Callable[[*Ts], R], args: Args[*Ts], kwargs: None = None, timeout: float = ...) -> R: ...
@overload
def rpc_sync(to: To, func: Callable[[], R], args: None = None, kwargs: None = None, timeout: float = ...) -> R: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., R], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> R: ...
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: AnyArgs = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to` and return what it returns.

    `to` is a name, an id or a WorkerInfo. `timeout` is in seconds; 0 waits for ever. What the function raises is raised
    here, with its own type and the remote traceback as its cause.
    """
    worker = thread_state.worker or process_state.worker or acting_worker()
    peer = worker.peer(to)
    worker.calls_made += 1
    if _profiler_enabled():
        return spans.rpc_sync(worker, peer, Target(func, args, kwargs), timeout, _default_pickler)
    kind, packed, flags = request_builder.pack_call(peer, func, args, kwargs, _default_pickler, True)
    name = func if func is not call_method else method_called(args)  # type: ignore[arg-type]
    return worker.agent.caller.call(peer, kind, packed, flags, timeout, name)


@overload
def rpc_async(
    to: To, func: Callable[[*Ts], Later[R]], args: Args[*Ts], kwargs: None = None, timeout: float = ...
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[[], Later[R]], args: None = None, kwargs: None = None, timeout: float = ...
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., Later[R]], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[[*Ts], R], args: Args[*Ts], kwargs: None = None, timeout: float = ...
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[[], R], args: None = None, kwargs: None = None, timeout: float = ...
) -> Future[R]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., R], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> Future[R]: ...
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: AnyArgs = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Like `rpc_sync`, but return at once with a future of the result, which can be waited for, awaited and cancelled."""
    worker = thread_state.worker or process_state.worker or acting_worker()
    peer = worker.peer(to)
    worker.calls_made += 1
    caller = sys._getframe(1)
    origin = (caller.f_code, caller.f_lasti)
    if _profiler_enabled():
        future = spans.rpc_async(worker, peer, Target(func, args, kwargs), timeout, _default_pickler, origin)
    else:
        kind, packed, flags = request_builder.pack_call(peer, func, args, kwargs, _default_pickler)
        name = func if func is not call_method else method_called(args)  # type: ignore[arg-type]
        future = worker.agent.caller.call_async(peer, kind, packed, flags, timeout, name, origin)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@overload
def remote(
    to: To, func: Callable[[*Ts], Later[R]], args: Args[*Ts], kwargs: None = None, timeout: float = ...
) -> RRef[R]: ...
@overload
def remote(
    to: To, func: Callable[[], Later[R]], args: None = None, kwargs: None = None, timeout: float = ...
) -> RRef[R]: ...
@overload
def remote(
    to: To, func: Callable[..., Later[R]], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> RRef[R]: ...
@overload
def remote(to: To, func: Callable[[*Ts], R], args: Args[*Ts], kwargs: None = None, timeout: float = ...) -> RRef[R]: ...
@overload
def remote(to: To, func: Callable[[], R], args: None = None, kwargs: None = None, timeout: float = ...) -> RRef[R]: ...
@overload
def remote(
    to: To, func: Callable[..., R], args: AnyArgs = None, *, kwargs: dict[str, Any], timeout: float = ...
) -> RRef[R]: ...
def remote(
    to: To,
    func: Callable[..., Any],
    args: AnyArgs = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run `func(*args, **kwargs)` on worker `to`, leave the result there and return a reference to it, at once.

    The reference may be used and shared before the function has run. `timeout` is for the function's run.
    """
    worker = thread_state.worker or process_state.worker or acting_worker()
    peer = worker.peer(to)
    worker.calls_made += 1
    if _profiler_enabled():
        return spans.remote(worker, peer, Target(func, args, kwargs), timeout)
    kind, target, flags = request_builder.remote_target(peer, func, args, kwargs)
    name = func if func is not call_method else method_called(args)  # type: ignore[arg-type]
    return create(worker.references, peer, kind, target, name, flags, timeout)


@contextmanager
def _wait_all() -> Iterator[None]:
    """On exit, wait for every `rpc_async` call made inside, on this thread, and raise the first error."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Serialize requests with another pickler inside."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# All workers together. The two targets of calls live here because programs and tests look for them here.


def _gather_to_leader(sequence_id: str, worker_name: str, obj: object, worker_names: set[str] | None = None) -> None:
    all_gather.gatherings_of(current_worker()).report(sequence_id, worker_name, obj)


def _broadcast_to_followers(sequence_id: str, objects_map: object) -> None:
    all_gather.gatherings_of(current_worker()).conclude(sequence_id, objects_map)


@_require_initialized
def _all_gather(
    obj: object, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Give every worker the objects of all of them, by name. Blocks until all have called it.

    `worker_names` are those that take part; None, or none at all, is all of them. `timeout` is in seconds; unset or 0, it
    waits for ever.
    """
    if timeout != UNSET_RPC_TIMEOUT:
        timeout = check_timeout(timeout, "the timeout of _all_gather")
    return all_gather.all_gather(sys.modules[__name__], _get_current_rpc_agent(), obj, worker_names, timeout)


@_require_initialized
def _barrier(worker_names: set[str] | list[str]) -> None:
    """Block until all the named workers are here; without a name, all of them."""
    try:
        worker = _get_current_rpc_agent()
        all_gather.all_gather(sys.modules[__name__], worker, None, set(worker_names), UNSET_RPC_TIMEOUT, "_barrier")
    except RuntimeError as error:
        log.error("failed to complete the barrier: %s", error)


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Block until all workers are here, serving calls meanwhile."""
    timeout = check_timeout(timeout, "the timeout of _wait_all_workers")
    all_gather.all_gather(sys.modules[__name__], _get_current_rpc_agent(), None, None, timeout, "shutdown")


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Release every reference held here, and wait until the others have released theirs to our values."""
    timeout = check_timeout(timeout, "the timeout of _delete_all_user_and_unforked_owner_rrefs")
    _get_current_rpc_agent().references.table.delete_all(timeout)


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return the number of values and references that this worker keeps track of."""
    return {key: str(value) for key, value in _get_current_rpc_agent().references.table.counts().items()}


def _check_leaks(worker: Worker) -> None:
    """Report values that a worker still holds; an error if the program wants to know."""
    leaks = worker.leaks
    if leaks and not _ignore_rref_leak:
        raise RuntimeError("; ".join(leaks))
    if leaks:
        log.debug("%s: %s", worker, "; ".join(leaks))


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this process's worker.

    Graceful: wait until all workers are here and no call is under way anywhere, serving calls meanwhile; if a worker dies
    instead, raise an error that names it. Not graceful: end at once. `timeout` is in seconds; 0 waits for ever.
    """
    timeout = check_timeout(timeout, "the timeout of shutdown")
    worker = _get_current_rpc_agent()
    if sys.is_finalizing():
        return  # a destructor calls it while the interpreter goes down: there is nothing left to end, nor to wait for
    try:
        if graceful and worker.is_static_group:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs(*([timeout] if timeout else []))
            all_gather.settle(sys.modules[__name__], worker, timeout)
            worker.agent.peers.connector.begin_parting()  # all have agreed to end: that one is gone is no reason to wonder
        elif graceful:
            worker.leave(timeout)
    finally:
        _finalize_shutdown(worker, graceful)


def _finalize_shutdown(worker: Worker, graceful: bool) -> None:
    """The worker that was to end, not the one that is there by now: another thread may have been quicker."""
    try:
        _check_leaks(worker)
    finally:
        try:
            worker.stop(graceful)
        finally:
            if worker is process_state.worker:
                _reset_current_rpc_agent()


# Looking inside.


def _get_debug_info() -> dict[str, str]:
    """Counters of every layer, by name."""
    agent = _get_current_rpc_agent().get_debug_info()
    return {**_rref_context_get_debug_info(), **agent, **autograd._get_debug_info()}


def references() -> Snapshot:
    """The values of this worker that others hold, and the references it holds to values of others. Print it."""
    return _get_current_rpc_agent().references.table.snapshot()


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long requests wait for the interpreter lock (`agent.gil_average_wait_time_us` in the debug info)."""
    _get_current_rpc_agent().enable_gil_profiling(flag)


CALLS = Calls(rpc_sync, rpc_async, remote)  # of proxies

__all__ = ["AllGatherStates", "RRef", "get_rpc_timeout", "get_worker_info", "rpc_async", "rpc_sync", "shutdown", "torch"]
