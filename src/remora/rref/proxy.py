"""Proxies of a remote value: `rref.rpc_sync().f(x)` calls its method f.

The call is sent at once and waits at the owner until the value is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from remora.agent.calls.future import Future
from remora.agent.serving.execution import Deferred
from remora.names import Word, word
from remora.rref.references import Calls
from remora.vocabulary.ids import WorkerInfo

ASYNC_MARK = "_wrapped_async_rpc_function"


class Reference(Protocol):
    """An `RRef`, as far as proxies need it."""

    _type: Future[Any] | None

    @property
    def _calls(self) -> Calls: ...
    def is_owner(self) -> bool: ...
    def owner(self) -> WorkerInfo: ...
    def local_value(self) -> Any: ...
    def to_here_async(self) -> Future[Any]: ...


class Proxy:
    """Stands for the value: each attribute is a function that calls the value's method of that name on its owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: Reference, call: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._call = call  # `rpc_sync`, `rpc_async` or `remote`
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._rref, self._call, self._timeout, name)

    def __repr__(self) -> str:
        return f"<{self._call.__name__} proxy of {self._rref}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._rref, self._call, self._timeout)


def _invoke(
    rref: Reference, call: Callable[..., Any], timeout: float, name: str, /, *args: Any, **kwargs: Any
) -> Any:
    if call.__name__ == "remote":
        # The caller sees no result that could carry the error of a missing method, so this looks for the method first.
        kind = type_of(rref, timeout, True)
        getattr(kind, name) if not hasattr(kind, "__getattr__") else None
    return call(rref.owner(), call_method, args=(rref, name, args, kwargs), timeout=timeout)


def call_method(rref: Reference, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the value, on its owner."""
    method = getattr(rref.local_value(), name)
    result = method(*args, **kwargs)
    return Deferred(method, result) if hasattr(method, ASYNC_MARK) else result


def method_called(args: tuple[Any, ...]) -> Word:
    """Return what a call of `call_method` is named by, for messages to people: the method."""
    return word(f"{args[1]}()")


def as_called(func: object, args: Any, kwargs: Any) -> tuple[object, Any, Any]:
    """Return function and arguments as the program gave them: those of the method, if `func` calls one."""
    return (method_called(args), *args[2:]) if func is call_method else (func, args, kwargs)


def _rref_typeof_on_owner(rref: Reference) -> type:
    """The type of the value, on its owner."""
    return type(rref.local_value())


def type_of(rref: Reference, timeout: float, blocking: bool) -> Any:
    """The type of the value, asked for once; a future of it unless `blocking`."""
    known: Future[Any] | None = rref._type
    if known is None or (known.done() and known.exception() is not None):
        if rref.is_owner():
            known = Future("the type of a value")
            rref.to_here_async()._when_settled(partial(_settle_type, rref, known))
        else:
            known = rref._calls.rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
        rref._type = known
    return known.wait() if blocking else known


def _settle_type(rref: Reference, known: Future[Any], _: object) -> None:
    try:
        known._succeed(type(rref.local_value()))
    except BaseException as error:
        known._fail(error)
