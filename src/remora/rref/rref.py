"""RRef: the reference that a program holds, with the names of `torch.distributed.rpc.RRef`.

The state is in its handle (`remora.rref.handle`). At the end of this file: the form in which pickle writes a reference.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Generator
from struct import Struct
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.profiler import record_function

from remora.agent.calls.call import UNSET_TIMEOUT
from remora.agent.calls.error_copies import fresh
from remora.agent.calls.future import Future
from remora.agent.peers.manager import Peer
from remora.agent.runtime.current import acting_worker
from remora.errors import RemoraError
from remora.names import calling_line
from remora.options import check_timeout
from remora.rref.codec import deserialize, serialize
from remora.rref.handle import Handle
from remora.rref.proxy import Proxy, type_of
from remora.rref.references import Calls, References
from remora.rref.value import Value
from remora.vocabulary.ids import WorkerInfo
from remora.wire.fast_pickle import REFERENCE_CODE, by_number, register_writer
from remora.wire.pack_scope import ForkData, PackScope, current_unpack_scope
from remora.wire.pickler import register_reducer

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)
# PyTorch's words for it, which programs and its tests look for.
NOT_SET = "Current RPC agent is not set! Did you initialize the RPC framework (with rpc.init_rpc)?"

_profiler_enabled = torch._C._autograd._profiler_enabled


class Methods(Protocol[Result]):
    """Has any method at all, and each of them returns that type."""

    def __getattr__(self, name: str, /) -> Callable[..., Result]: ...


class RRef(Generic[T]):
    """A reference to a value on some worker. `RRef(value)` makes one to a value of this worker."""

    __slots__ = ("__weakref__", "_handle", "_profiling_future", "_type")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        references: References = acting_worker(NOT_SET).references
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:  # as PyTorch does
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        rref_id = references.table.state.new_id()
        made = Value(rref_id, value)
        if references.sites:
            made.site = calling_line()
        self._handle = Handle(references, references.me, rref_id, None, made, False)
        self._type: Future[Any] | None = None  # a future of the type of the value, asked for once
        self._profiling_future: Any = None

    @classmethod
    def _of(cls, handle: Handle) -> RRef[T]:
        """The reference that has a handle. A handle has one reference."""
        self = cls.__new__(cls)
        self._handle = handle
        self._type = self._profiling_future = None
        return self

    @property
    def _calls(self) -> Calls:
        return self._handle.references.calls

    # Ownership.

    def is_owner(self) -> bool:
        """True if the value lives on this worker."""
        return self._handle.fork is None

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return self._handle.owner.info

    def owner_name(self) -> str:
        """The name of the worker that owns the value."""
        return self._handle.owner.name

    def confirmed_by_owner(self) -> bool:
        """True if the owner knows of this reference."""
        handle = self._handle
        return handle.fork is None or handle.references.table.state.is_confirmed(handle.fork)

    # The value.

    def local_value(self) -> T:
        """The value itself, not a copy. On its owner only; waits until it is there."""
        handle = self._handle
        if handle.value is None:
            raise RuntimeError(
                f"For {handle.stream_form()}, can't call localValue() on user {handle.references.me.info}. "
                f"Call it on owner {handle.owner.info}"
            )
        value: T = handle.wait_for_own(handle.value)
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A copy of the value (on the owner, the value itself); waits until it is there."""
        handle = self._handle
        value: T
        if handle.value is not None:
            if handle.creation_error is not None:
                raise fresh(handle.creation_error)
            if timeout != UNSET_TIMEOUT:  # the value is here, and the call that makes it has a timeout of its own
                check_timeout(timeout, "the timeout of to_here()")
            value = handle.wait_for_own(handle.value)
            return value
        handle.check_usable("to_here() on it")
        if _profiler_enabled():
            with record_function(f"to_here#({handle.references.me.name})->({handle.owner.name})"):
                value = handle.fetch(timeout)
                return value
        value = handle.fetch(timeout)
        return value

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> Future[T]:
        """A future of what `to_here` returns."""
        return self._handle.fetch_async(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.to_here_async().__await__()

    # Calls on the value.

    # These return a proxy, not the value. But a method of the proxy is called like that of the value, so the type of the
    # value is the right one for `rpc_sync`, with one exception: an `async def` method seems to return a coroutine. There is
    # no type for "the same methods with futures of their results"; the other two say as much as can be said.

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A proxy: `rref.rpc_sync().f(x)` calls the value's method f on its owner and returns its result."""
        found: Any = Proxy(self, self._calls.rpc_sync, timeout)
        return found  # type: ignore[no-any-return]

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Methods[Future[Any]]:
        """Like `rpc_sync`, with a future of the result."""
        return Proxy(self, self._calls.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Methods[RRef[Any]]:
        """Like `rpc_sync`, with a reference to the result."""
        return Proxy(self, self._calls.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Backpropagate from the value."""
        self._handle.references.backward(self._handle, dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it; asked for once."""
        return type_of(self, timeout, blocking)

    # Names that PyTorch's tests and some programs use.

    def _get_future(self) -> Future[None]:
        """A future that is done when the owner has made the value."""
        return self._handle.created()

    def _get_profiling_future(self) -> Any:
        return self._profiling_future or self._get_future()

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling_future = future

    def _serialize(self) -> ForkData:
        """The reference as plain numbers, for a receiver that is not known yet. The fork stays until it is accepted."""
        return serialize(self._handle, None)

    @staticmethod
    def _deserialize(data: ForkData) -> RRef[Any]:
        """A reference from the numbers of `_serialize`, on the worker that received them."""
        return RRef._of(deserialize(acting_worker().references, data))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass it as an argument of a "
            "call, or send what to_here() returns"
        )

    def __str__(self) -> str:
        return str(self._handle)

    def __repr__(self) -> str:
        return repr(self._handle)


# Pickling: a reference is written as its number among the references of the message (`remora.rref.codec`).


def _attach(rref: RRef[Any], scope: PackScope) -> int:
    """Hand a reference to the peer of the scope. Returns its number among the references of the message."""
    handle = rref._handle
    if not isinstance(scope.peer, Peer):
        if handle.fork is not None:
            handle.check_usable("fork an UserRRef")
        rref.__reduce_ex__(5)
    serialize(handle, scope)
    return len(scope.attachments) - 1


def _reduce(rref: RRef[Any], scope: PackScope) -> tuple[Any, ...]:
    return _rebuild, (_attach(rref, scope),)


def _write(rref: RRef[Any], scope: PackScope) -> bytes:
    """The bytes that pickle makes of `_reduce`."""
    return _BY_NUMBER + _NUMBER.pack(_attach(rref, scope)) + _REBUILT


def _rebuild(number: int) -> RRef[Any]:
    scope = current_unpack_scope()
    arrival = getattr(scope, "arrival", None)
    if arrival is None:
        raise RemoraError("a reference can only be rebuilt from a call")
    handle: Handle = arrival.handles[number]
    arrival.handles[number] = None
    return RRef._of(handle)


_BY_NUMBER, _NUMBER, _REBUILT = by_number(REFERENCE_CODE) + pickle.BININT, Struct("<i"), pickle.TUPLE1 + pickle.REDUCE

register_reducer(RRef, _reduce)
register_writer(RRef, _write)
copyreg.add_extension(_rebuild.__module__, _rebuild.__qualname__, REFERENCE_CODE)
