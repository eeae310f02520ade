"""Names that programs and PyTorch's tests take from `torch.distributed.rpc.internal`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from remora.wire.pickler import pack, register_reducer, unpack


class RPCExecMode(Enum):
    """The way a call was made, as profiles show it."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments on their way to another worker."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class _InternalRPCPickler:
    """The pickler of calls, for programs that use it directly: bytes, and the tensors' memory apart."""

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        packed = pack(obj)
        tensors = [torch.frombuffer(bytearray(buffer), dtype=torch.uint8) for buffer in packed.buffers]
        return packed.body, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        return unpack(binary_data, [tensor.clone().untyped_storage() for tensor in tensor_table])

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], tuple[Any, ...]]) -> None:
        """Have objects of exactly this class reduced by `reducer`; the first registration stays."""
        register_reducer(obj_class, lambda obj, _scope: reducer(obj))


_internal_rpc_pickler = _InternalRPCPickler()
serialize, deserialize = _internal_rpc_pickler.serialize, _internal_rpc_pickler.deserialize


def run_serialized(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """On the callee: run a call that a pickler of the program's own serialized."""
    udf = _internal_rpc_pickler.deserialize(binary_data, tensor_table)
    return udf.func(*(udf.args or ()), **(udf.kwargs or {}))


def check_arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what calling a scripted function with too many, unknown or too few arguments would raise on its worker: the
    caller of `remote` does not wait for that. The types of arguments are left to the worker."""
    schema = function.schema
    if len(args) > len(schema.arguments):
        raise RuntimeError(
            f"{schema.name}() expected at most {len(schema.arguments)} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {schema}"
        )
    unknown = kwargs.keys() - {argument.name for argument in schema.arguments}
    if unknown:
        raise RuntimeError(f"Unknown keyword argument '{min(unknown)}' for operator '{schema.name}'. Schema: {schema}")
    for argument in schema.arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise RuntimeError(f"{schema.name}() is missing value for argument '{argument.name}'. Declaration: {schema}")


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


__all__ = ["PythonUDF", "RPCExecMode", "deserialize", "serialize"]
