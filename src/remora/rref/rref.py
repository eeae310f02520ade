"""RRef: what a program holds. A handle knows either the value itself (on its owner) or one fork of it (elsewhere)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.profiler import record_function

from remora.agent.calls.call import UNSET_TIMEOUT
from remora.agent.calls.call_context import current_recording, pack_recorded
from remora.agent.calls.future import Future, fresh, going_down
from remora.agent.peers.manager import Peer
from remora.errors import CallNotSent, CallOutcomeUnknown, NotInitialized, OwnerDied, WorkerLost
from remora.options import check_timeout
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.ids import WorkerInfo
from remora.vocabulary.messages import MessageType
from remora.wire.id_codec import pack_id
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed

if TYPE_CHECKING:
    from remora.rref.codec import References

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)
FETCH_CALL, SCRIPT_FETCH_CALL = int(MessageType.PYTHON_RREF_FETCH_CALL), int(MessageType.SCRIPT_RREF_FETCH_CALL)


class Methods(Protocol[Result]):
    """Has any method at all, and each of them returns that type."""

    def __getattr__(self, name: str, /) -> Callable[..., Result]: ...


current_references: Callable[[], References] | None = None  # set by the layer above: whose RRef(value) is made here


class RRef(Generic[T]):
    """A reference to a value on some worker. `RRef(value)` makes one to a value of this worker."""

    __slots__ = (
        "__weakref__", "_created", "_creation_error", "_fork", "_owner", "_profiling_future", "_references", "_rref_id",
        "_script", "_type", "_value",
    )  # fmt: skip

    _value: Value | None  # on the owner
    _fork: ForkId | None  # elsewhere

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if current_references is None:
            raise NotInitialized("Current RPC agent is not set! Did you initialize the RPC framework?")
        references = current_references()
        references.check_value(value, type_hint)
        self._init(references, references.me, references.table.new_id())
        self._value = Value(self._rref_id, value)

    def _init(self, references: References, owner: Peer, rref_id: RRefId) -> None:
        self._references = references
        self._owner = owner
        self._rref_id = rref_id
        self._fork = None
        self._value = None
        self._created: Future[None] | None = None
        self._creation_error: BaseException | None = None
        self._script = False
        self._type: Any = None
        self._profiling_future: Any = None

    @classmethod
    def _to_value(cls, references: References, value: Value) -> RRef[T]:
        """A handle on the owner."""
        self = cls.__new__(cls)
        self._init(references, references.me, value.id)
        self._value = value
        self._script = value.script
        return self

    @classmethod
    def _to_fork(cls, references: References, owner: Peer, rref_id: RRefId, fork: ForkId, script: bool) -> RRef[T]:
        """A handle elsewhere."""
        self = cls.__new__(cls)
        self._init(references, owner, rref_id)
        self._fork = fork
        self._script = script
        return self

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter goes down there may be no globals any more, and no thread to say goodbye. An error here would
        # be printed, which imports modules, and a thread that is gone may have the lock for that.
        fork = getattr(self, "_fork", None)
        if fork is not None and not is_finalizing() and not self._references.table.closed:
            self._references.table.drop_soon(fork)

    # Who and where.

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._fork is None

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return self._owner.info

    def owner_name(self) -> str:
        """Its name."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference."""
        if self._fork is None:
            return True
        return self._references.table.state.is_confirmed(self._fork)

    # The value.

    def local_value(self) -> T:
        """The value itself, not a copy. On its owner only; waits until it is there."""
        if self._value is None:
            raise RuntimeError(
                f"For {self._stream_form()}, can't call localValue() on user {self._references.me.info}. "
                f"Call it on owner {self._owner.info}"
            )
        value: T = self._own(self._value)
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A copy of the value (on the owner, the value itself); waits until it is there."""
        if self._creation_error is not None:
            raise fresh(self._creation_error)
        if self._value is not None:
            if timeout != UNSET_TIMEOUT:  # the value is here, and what makes it has a timeout of its own
                check_timeout(timeout, "the timeout of to_here()")
            value: T = self._own(self._value)
            return value
        self._check_usable("to_here() on it")
        if torch._C._autograd._profiler_enabled():
            with record_function(f"to_here#({self._references.me.name})->({self._owner.name})"):
                return self._call_to_here(timeout)
        return self._call_to_here(timeout)

    def _own(self, value: Value) -> T:
        """The value, on its owner. A destructor that the collector runs in the midst of a message of this worker to
        itself, or of a step of a reference, cannot wait for it: that may be the very one that has it made."""
        if not value.ready:
            me = self._references.me
            is_reading = me.incoming is not None and me.incoming.takes_in()
            if is_reading or me.outgoing.in_midst() or self._references.table.in_midst():
                raise CallOutcomeUnknown(
                    f"the value of {self._rref_id} is being made: a signal handler or destructor asked for it while Remora "
                    f"was in the midst of a message or a reference of this worker on the same thread, so it cannot be "
                    f"waited for there."
                )
            me.outgoing.flush()  # the call that makes it may wait for company
        found: T = value.get()
        return found

    def _call_to_here(self, timeout: float) -> T:
        agent = self._references.agent
        try:
            packed, flags = self._fetch()
            value: T = agent.call(self._owner, self._fetch_kind(), packed, flags, timeout, "to_here()")
            return value
        except (WorkerLost, CallNotSent) as error:
            raise self._translated(error) from None

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> Future[T]:
        """A future of what `to_here` returns."""
        if (
            timeout != UNSET_TIMEOUT
        ):  # before there is a future, which would keep this reference if the call were refused
            check_timeout(timeout, "the timeout of to_here_async()")
        if self._value is not None:
            return self._local_future(self._value)
        self._check_usable("to_here() on it")
        agent = self._references.agent
        packed, flags = self._fetch()
        future: Future[T] = agent.call_async(
            self._owner, self._fetch_kind(), packed, flags, timeout, "to_here()", translate=self._translated
        )
        future._when_settled(partial(_keep, self))  # else its goodbye could free the value before it is fetched
        return future

    def __await__(self) -> Generator[Any, None, T]:
        return self.to_here_async().__await__()

    def _local_future(self, value: Value) -> Future[T]:
        future: Future[T] = Future(f"the value of {self._rref_id}")

        def ready() -> None:
            if value.error is not None:
                future._fail(value.error)
            else:
                future._succeed(value.get())

        value.when_ready(ready)
        return future

    def _fetch(self) -> tuple[Packed, int]:
        recording = current_recording.get()
        if recording is None:
            return Packed(pack_id(self._rref_id), [], [], []), 0
        return pack_recorded(self._rref_id, PackScope(self._owner, ordered=True), recording)

    def _fetch_kind(self) -> int:
        return SCRIPT_FETCH_CALL if self._script else FETCH_CALL

    def _check_usable(self, doing: str) -> None:
        """Raise the reason for which this reference does not work."""
        if sys.is_finalizing():
            raise going_down(f"{doing} of {self._stream_form()}")
        assert self._fork is not None
        failure = self._references.table.state.failures.get(self._fork)
        if failure is None and not self._references.table.closed:
            return
        if failure is None or getattr(failure, "deleted", False):
            raise RuntimeError(f"{self._stream_form()} was deleted by shutdown. Cannot call {doing} after deletion.")
        raise fresh(failure)

    def _translated(self, error: BaseException) -> BaseException:
        """The owner is gone: say so in terms of the reference."""
        if isinstance(error, WorkerLost | CallNotSent) and self._owner.state != "alive":
            return OwnerDied(f"{self!r}: its owner {self._owner.info} is gone: {self._owner.reason}")
        return error

    # Calls on the value.

    # What these return is a proxy, not the value. But a method of the one is called as that of the other, so the type of
    # the value is the right one for `rpc_sync`, with one exception: an `async def` method seems to return a coroutine. There
    # is no type for "the same methods with futures of their results"; the other two say as much as can be said.

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A proxy: `rref.rpc_sync().f(x)` calls the value's method f on its owner and returns what it returns."""
        found: T = self._references.proxy(self, "rpc_sync", timeout)
        return found

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Methods[Future[Any]]:
        """Like `rpc_sync`, with a future of the result."""
        found: Methods[Future[Any]] = self._references.proxy(self, "rpc_async", timeout)
        return found

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Methods[RRef[Any]]:
        """Like `rpc_sync`, with a reference to the result."""
        found: Methods[RRef[Any]] = self._references.proxy(self, "remote", timeout)
        return found

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Backpropagate from the value."""
        self._references.backward(self, dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it; asked for once."""
        return self._references.type_of(self, timeout, blocking)

    # What PyTorch's tests and some programs look at.

    def _get_future(self) -> Future[None]:
        """A future that is done when the owner has made the value."""
        if self._created is None:
            done: Future[None] = Future(f"the creation of {self._rref_id}")
            self._created = done
            if self._creation_error is not None:
                self._settle_created(done)
            elif self._value is not None:
                self._value.when_ready(partial(self._settle_created, done))
            else:
                assert self._fork is not None
                self._references.table.held.when_confirmed(self._fork, partial(self._settle_created, done))
        return self._created

    def _creation_failed(self, error: BaseException) -> None:
        """On the owner: nobody knows whether the value will be made."""
        self._creation_error = error
        if self._created is not None:
            self._settle_created(self._created)

    def _settle_created(self, done: Future[None]) -> None:
        failure = self._creation_error
        if done.done():
            return
        if failure is None and self._fork is not None:
            failure = self._references.table.state.failures.get(self._fork)
        if failure is None:
            done._succeed(None)
        else:
            done._fail(failure.__cause__ or failure)

    def _get_profiling_future(self) -> Any:
        return self._profiling_future or self._get_future()

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling_future = future

    def _serialize(self) -> tuple[int, int, int, int, int, int, str]:
        """The reference as plain numbers, for a receiver that is not known yet. It stays alive until it is accepted."""
        return self._references.serialize(self, None)

    @staticmethod
    def _deserialize(data: tuple[int, int, int, int, int, int, str]) -> RRef[Any]:
        """What `_serialize` made, on the worker that received it."""
        assert current_references is not None
        return current_references().deserialize(data)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass it as an argument of a "
            "call, or send what to_here() returns"
        )

    def _stream_form(self) -> str:
        if self._fork is None:
            return f"OwnerRRef(rref_id={self._rref_id})"
        return f"UserRRef(rref_id={self._rref_id}, fork_id={self._fork})"

    def __str__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork})"

    def __repr__(self) -> str:
        return f"<{self} {self._references.describe(self)}>" if self._references else str(self)


def _keep(rref: RRef[Any], _: object) -> None:
    """Does nothing: whoever may call it keeps the reference."""
