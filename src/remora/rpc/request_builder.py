"""Turns a function and its arguments into a request: which type of message, and its bytes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.jit import ScriptFunction

from remora.agent.calls.call_context import current_call_context, pack_for
from remora.agent.calls.call_errors import name_of
from remora.agent.calls.call_trace import tracing
from remora.agent.calls.pack_errors import explain_arguments
from remora.agent.peers.manager import Peer
from remora.rpc.functions import MARK
from remora.rpc.internal import PythonUDF, _internal_rpc_pickler, check_arguments, run_serialized
from remora.rref.proxy import as_called
from remora.vocabulary.messages import MessageType
from remora.wire.callables import TORCH_NAMES
from remora.wire.frames import ASYNC, TRACED
from remora.wire.packed import Packed

PYTHON_CALL = int(MessageType.PYTHON_CALL)
SCRIPT_CALL = int(MessageType.SCRIPT_CALL)
PYTHON_REMOTE_CALL = int(MessageType.PYTHON_REMOTE_CALL)
SCRIPT_REMOTE_CALL = int(MessageType.SCRIPT_REMOTE_CALL)

_PLAIN = 0, None  # flags and name of a Python function, as most are

# One can take these apart, but to call a function with the parts of one is hardly what is meant.
_ONE_ARGUMENT = (str, bytes, bytearray, memoryview, dict, set, frozenset)  # nor an array


def pack_call(
    peer: Peer, func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None, pickler: Any, awaited: bool = False
) -> tuple[int, Packed, int]:
    """(message type, packed request, flags) of a call. `awaited`: nothing else happens here until it is answered."""
    flags, script = _PLAIN if type(func) is FunctionType and not hasattr(func, MARK) else _flags_and_name(peer, func)
    if args is None:
        args = ()
    elif type(args) is not tuple:
        args = positional(peer, func, args)
    if kwargs is None:
        kwargs = {}
    elif type(kwargs) is not dict:
        kwargs = named(peer, func, kwargs)
    context = current_call_context.get()
    tracer = tracing.tracer
    trace = None if tracer is None else tracer.outgoing()
    value: tuple[Any, ...]
    if script is not None:
        kind, value = SCRIPT_CALL, (*script, args, kwargs)
    else:
        if pickler is not _internal_rpc_pickler:
            binary, tensors = pickler.serialize(PythonUDF(func, args, kwargs))
            func, args, kwargs = run_serialized, (binary, tensors), {}
        announced = peer.outgoing.announced
        target = announced.target(func, peer.shares_main)
        if not args and not kwargs and context is None and trace is None and type(target) is int:
            return PYTHON_CALL, announced.bare[target], flags
        kind, value = PYTHON_CALL, (target, args, kwargs)
    if trace is not None:
        flags, value = flags | TRACED, (trace, *value)
    way = peer.routes.awaited if awaited else peer.routes.requests
    try:
        packed, more = pack_for(peer, way, value, context, ordered=True)
    except BaseException as error:
        explain_arguments(error, peer, *as_called(func, args, kwargs))
        raise
    return kind, packed, flags | more


def remote_target(
    peer: Peer, func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None
) -> tuple[int, tuple[Any, ...], int]:
    """(message type, what the owner runs, flags) of a call that makes a value."""
    flags, script = _PLAIN if type(func) is FunctionType and not hasattr(func, MARK) else _flags_and_name(peer, func)
    args = () if args is None else positional(peer, func, args)
    kwargs = {} if kwargs is None else named(peer, func, kwargs)
    tracer = tracing.tracer
    trace = None if tracer is None else tracer.outgoing()
    traced: tuple[str, ...] = ()
    if trace is not None:
        flags, traced = flags | TRACED, (trace,)
    if script is None:
        target = peer.outgoing.announced.target(func, peer.shares_main)
        return PYTHON_REMOTE_CALL, (*traced, target, args, kwargs), flags
    if script[0] == "function":
        check_arguments(getattr(func, MARK, func), args, kwargs)
    return SCRIPT_REMOTE_CALL, (*traced, *script, args, kwargs), flags


def _flags_and_name(peer: Peer, func: Callable[..., Any]) -> tuple[int, tuple[str, str] | None]:
    """Return the flags of a call of a function, and its name if the callee finds it by that."""
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__} for a call to {peer.name}")
    return ASYNC if hasattr(func, MARK) else 0, script_name(func)


def arguments(peer: Peer, func: object, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call as they are sent."""
    return (
        () if args is None else positional(peer, func, args),
        {} if kwargs is None else named(peer, func, kwargs),
    )


def positional(peer: Peer, func: object, args: Any) -> tuple[Any, ...]:
    """Arguments as a tuple. What can be taken apart, but was hardly meant to be, is refused."""
    if type(args) is tuple:
        return args
    if isinstance(args, _ONE_ARGUMENT) or hasattr(type(args), "__array__") or not isinstance(args, Iterable):
        raise TypeError(
            f"args of the call of {name_of(func)} on {peer.name} must be a tuple or a list of its arguments, "
            f"got {_shown(args)}: did you mean args=(x,)?"
        )
    return tuple(args)


def named(peer: Peer, func: object, kwargs: Any) -> dict[str, Any]:
    """Named arguments as a dict."""
    if type(kwargs) is dict:
        return kwargs
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs of the call of {name_of(func)} on {peer.name} must be a dict of its named arguments, "
            f"got {_shown(kwargs)}: did you mean kwargs={{'name': x}}?"
        )
    return dict(kwargs)


def _shown(value: object) -> str:
    return f"{type(value).__qualname__} {reprlib.repr(value)}"


def script_name(func: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the name by which the callee finds a function that torch compiled; None for one of Python."""
    if type(func) is BuiltinFunctionType:
        operator = TORCH_NAMES.get(func)
        return None if operator is None else ("operator", operator)
    function = getattr(func, MARK, func)
    if isinstance(function, ScriptFunction):
        return "function", torch._jit_internal._qualified_name(function)
    return None
