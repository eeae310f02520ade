"""Programs written for torch.distributed.rpc find the names they know in remora.rpc, and can call them the same way."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch.distributed.rpc as theirs

ours: Any = pytest.importorskip("remora.rpc")

SAME_SIGNATURE = ["init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info"]

# Listed in torch's __all__ (which lists some that are not there), or used by programs all the same.
NAMES = {
    *(name for name in theirs.__all__ if hasattr(theirs, name)),
    *("WorkerInfo", "RpcBackendOptions", "PyRRef", "RpcAgent", "TensorPipeAgent"),
    *("get_rpc_timeout", "enable_gil_profiling", "functions.async_execution"),
    *("backend_registry.register_backend", "backend_registry.backend_registered", "backend_registry.BackendType"),
    *("backend_registry.construct_rpc_backend_options", "backend_registry.init_backend"),
    *("api._all_gather", "api._barrier", "api._wait_all", "api._wait_all_workers", "api._require_initialized"),
    *("api._use_rpc_pickler", "api._get_current_rpc_agent", "api.AllGatherStates", "_is_current_rpc_agent_set"),
    *("constants.DEFAULT_RPC_TIMEOUT_SEC", "constants.DEFAULT_SHUTDOWN_TIMEOUT", "constants.UNSET_RPC_TIMEOUT"),
    *("internal.RPCExecMode", "internal.PythonUDF", "_set_rpc_timeout", "_get_debug_info"),
}

# What is not there yet, and what it comes with.
LATER = {
    "method_factory": "left over from how PyTorch builds its proxies; no program uses it",
    "new_method": "left over from how PyTorch builds its proxies; no program uses it",
}


def find(module: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("name", sorted(NAMES - LATER.keys()))
def test_the_name_is_there(name: str) -> None:
    find(theirs, name)  # or the list above is wrong
    assert find(ours, name) is not None


@pytest.mark.parametrize("name", [name for name in SAME_SIGNATURE if name not in LATER])
def test_the_signature_is_the_same(name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_comes_later_has_not_come(name: str) -> None:
    with pytest.raises(AttributeError):
        find(ours, name)


def test_what_is_announced_is_there() -> None:
    missing = [name for name in ours.__all__ if not hasattr(ours, name)]
    assert not missing


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_a_different_default_would_be_seen() -> None:
    def shutdown(graceful: bool = True, timeout: int = 1) -> None: ...

    assert parameters(shutdown) != parameters(theirs.shutdown)


def test_importing_remora_rpc_touches_no_agent_of_torch() -> None:
    importlib.import_module("remora.rpc")
    assert not theirs.api._is_current_rpc_agent_set()  # type: ignore[attr-defined]
