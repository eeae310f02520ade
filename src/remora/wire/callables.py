"""Reducers for the callables of torch: functions, operators and scripted modules. Not for Python code."""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from remora.errors import SerializationError
from remora.wire.tensors.storages import Outgoing, Reduced

TORCH_NAMES = {function: name for name, function in vars(torch).items() if type(function) is BuiltinFunctionType}


def reduce_builtin(out: Outgoing, function: BuiltinFunctionType) -> Reduced | str:
    """Reduce a builtin function. Pickle names torch's by way of a hidden class, in three steps; one is enough."""
    name = TORCH_NAMES.get(function)
    return function.__reduce__() if name is None else (_torch_function, (name,))


def reduce_operator(out: Outgoing, operator: OpOverloadPacket) -> Reduced:
    """Reduce `torch.ops.<namespace>.<name>`."""
    namespace, _, name = operator._qualified_op_name.partition("::")
    return _operator, (namespace, name)


def reduce_overload(out: Outgoing, overload: OpOverload) -> Reduced:
    """Reduce `torch.ops.<namespace>.<name>.<overload>`."""
    return getattr, (overload.overloadpacket, overload._overloadname)


def reduce_script_module(out: Outgoing, module: torch.jit.ScriptModule) -> Reduced:
    """Reduce a scripted or traced module to the archive `torch.jit.save` makes of it."""
    archive = io.BytesIO()
    try:
        torch.jit.save(module, archive)
    except torch.jit.Error as error:
        raise SerializationError(f"a scripted module cannot be sent: {error}") from error
    return _script_module, (pickle.PickleBuffer(archive.getvalue()),)


# What follows runs on the receiver. Its names are on the wire.


def _torch_function(name: str) -> Any:
    return getattr(torch, name)


def _operator(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def _script_module(archive: bytes | memoryview) -> Any:
    return torch.jit.load(io.BytesIO(archive))  # type: ignore[no-untyped-call]
