"""Turns a function and its arguments into a request: which type of message, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.jit import ScriptFunction

from remora.agent.peers import Peer
from remora.agent.recording import current_recording, pack_for
from remora.rpc.functions import MARK
from remora.rpc.internal import PythonUDF, _internal_rpc_pickler, run_serialized
from remora.vocabulary.messages import MessageType
from remora.wire.callables import TORCH_NAMES
from remora.wire.frames import ASYNC
from remora.wire.packed import Packed

PYTHON_CALL = int(MessageType.PYTHON_CALL)
SCRIPT_CALL = int(MessageType.SCRIPT_CALL)


def pack_call(
    peer: Peer, func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None, pickler: Any, awaited: bool = False
) -> tuple[int, Packed, int]:
    """(message type, packed request, flags) of a call. `awaited`: nothing else happens here until it is answered."""
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__} for a call to {peer.name}")
    args = () if args is None else tuple(args)
    kwargs = {} if kwargs is None else kwargs
    flags = ASYNC if hasattr(func, MARK) else 0
    recording = current_recording.get()
    script = script_name(func)
    value: tuple[Any, ...]
    if script is not None:
        kind, value = SCRIPT_CALL, (*script, args, kwargs)
    else:
        if pickler is not _internal_rpc_pickler:
            binary, tensors = pickler.serialize(PythonUDF(func, args, kwargs))
            func, args, kwargs = run_serialized, (binary, tensors), {}
        announced = peer.outgoing.announced
        target = announced.target(func, peer.shares_main)
        if not args and kwargs == {} and recording is None and type(target) is int:
            return PYTHON_CALL, announced.bare[target], flags
        kind, value = PYTHON_CALL, (target, args, kwargs)
    way = peer.ways.awaited if awaited else peer.ways.requests
    packed, more = pack_for(peer, way, value, recording, ordered=True)
    return kind, packed, flags | more


def remote_target(
    peer: Peer, func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None
) -> tuple[MessageType, tuple[Any, ...], int]:
    """(message type, what the owner runs, flags) of a call that makes a value."""
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__} for a call to {peer.name}")
    args = () if args is None else tuple(args)
    kwargs = {} if kwargs is None else kwargs
    flags = ASYNC if hasattr(func, MARK) else 0
    script = script_name(func)
    if script is None:
        return MessageType.PYTHON_REMOTE_CALL, (peer.outgoing.announced.target(func, peer.shares_main), args, kwargs), flags
    return MessageType.SCRIPT_REMOTE_CALL, (*script, args, kwargs), flags


def script_name(func: Callable[..., Any]) -> tuple[str, str] | None:
    """How the callee finds a function that torch compiled, or that the program compiled with torch; None for Python's."""
    if type(func) is BuiltinFunctionType:
        operator = TORCH_NAMES.get(func)
        return None if operator is None else ("operator", operator)
    function = getattr(func, MARK, func)
    if isinstance(function, ScriptFunction):
        return "function", torch._jit_internal._qualified_name(function)
    return None
