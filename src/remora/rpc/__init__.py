"""The names of `torch.distributed.rpc`: start a worker, call functions on others, end it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec

from torch.distributed import Store  # type: ignore[attr-defined]

from remora import autograd as dist_autograd
from remora.agent.calls.future import Future
from remora.rendezvous.store import NAME_TIMEOUT, open_store, rank_and_size
from remora.rpc import api, backend_registry, constants, functions, internal, membership, options, rref_proxy
from remora.rpc.all_gather import AllGatherStates
from remora.rpc.api import (
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_debug_info,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    references,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from remora.rpc.backend_registry import BackendType, BackendValue
from remora.rpc.backends import REMORA, TENSORPIPE
from remora.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from remora.rpc.current_worker import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
)
from remora.rpc.membership import get_worker_infos, members, on_membership
from remora.rpc.options import (
    RemoraRpcBackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _is_tensorpipe_available,
    _TensorPipeRpcBackendOptionsBase,
)
from remora.rpc.server_process_global_profiler import _server_process_global_profile
from remora.rref.rref import RRef
from remora.vocabulary.ids import WorkerInfo, check_worker_name
from remora.worker import Worker

log = logging.getLogger("remora")

P = ParamSpec("P")

TensorPipeAgent = RpcAgent = Worker
PyRRef = RRef


def is_available() -> bool:
    """Always: nothing of torch's own RPC is needed."""
    return True


def _with_known_arguments(function: Callable[P, None]) -> Callable[P, None]:
    """Refuse `init_method`, which torch's `init_process_group` takes, with the place where it belongs. (It is no parameter:
    the signature of `init_rpc` is PyTorch's.)"""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if "init_method" in kwargs:
            raise TypeError(
                f"init_rpc takes no init_method: pass rpc_backend_options="
                f"TensorPipeRpcBackendOptions(init_method={kwargs['init_method']!r})."
            )
        function(*args, **kwargs)

    return checked


@_with_known_arguments
def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start this process's worker and wait until all `world_size` workers are there, and one of them has answered.

    Without `world_size` the group is dynamic: workers join and leave at any time. `name` must be unique in the group, and
    `rank` too. Where neither is given, RANK and WORLD_SIZE say them. Workers find each other at
    `rpc_backend_options.init_method` (`env://`, `tcp://host:port`, `file:///path`).
    """
    backend, settings = _backend_and_options(backend, rpc_backend_options)
    check_worker_name(name)
    if _is_current_rpc_agent_set():
        raise RuntimeError(f"RPC is already initialized in this process, as {_get_current_rpc_agent()}")
    rank, world_size = rank_and_size(rank, world_size, init_method=settings.init_method)
    store = open_store(settings.init_method, rank, world_size, settings.bringup_timeout, _name_timeout(settings))
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, settings)


def _name_timeout(options: RpcBackendOptions) -> float:
    """Return the seconds for which the name of the host where the group meets may be unknown; the program may set them."""
    given = options.settings.bringup_timeout if isinstance(options, TensorPipeRpcBackendOptions) else None
    return NAME_TIMEOUT if given is None else given


def _backend_and_options(
    backend: BackendType | None, given: RpcBackendOptions | None
) -> tuple[BackendType, RpcBackendOptions]:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(
            f"Argument backend must be a member of BackendType, got {backend!r}. Leave it out, and give rank and world_size "
            "by name: init_rpc(name, rank=0, world_size=2)."
        )
    if given is not None and not isinstance(given, RpcBackendOptions):
        raise TypeError(f"Argument rpc_backend_options must be an instance of RpcBackendOptions, got {type(given)!r}")
    if backend is None and given is not None:
        for candidate in (TENSORPIPE, *BackendType):
            if type(given) is type(backend_registry.construct_rpc_backend_options(candidate)):
                return candidate, given
        raise TypeError(f"Could not infer backend for options {given!r}")
    backend = TENSORPIPE if backend is None else backend
    return backend, given or backend_registry.construct_rpc_backend_options(backend)


def _init_rpc_backend(
    backend: BackendType = TENSORPIPE,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized in this process")
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._set_and_start_rpc_agent(agent)  # (programs with a backend of their own replace it there)


def __dir__() -> list[str]:
    """Return the public names, for a user who looks around in a notebook. The names with an underscore are there, too:
    programs written for PyTorch use some of them."""
    return [name for name in __all__ if not name.startswith("_")]


__all__ = [
    "REMORA",
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "Future",
    "PyRRef",
    "RRef",
    "RemoraRpcBackendOptions",
    "RpcBackendOptions",
    "Store",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_all_gather",
    "_barrier",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_is_tensorpipe_available",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "internal",
    "is_available",
    "members",
    "membership",
    "on_membership",
    "options",
    "references",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "shutdown",
]
