"""The backends that come with Remora. PyTorch's default name, TENSORPIPE, means our agent too."""

from __future__ import annotations

from typing import Any

from remora.devices.maps import Wishes
from remora.rpc import api, backend_registry
from remora.rpc.options import RemoraRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
from remora.worker import Worker


def _init(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions) -> Worker:
    options = rpc_backend_options
    if not isinstance(options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` (or `RemoraRpcBackendOptions`), got {options!r}"
        )
    wishes = Wishes(options.device_maps, options.devices)
    return Worker(
        name, rank, world_size, store, options.rpc_timeout, options.num_worker_threads, options.settings, api.CALLS, wishes
    )


TENSORPIPE = backend_registry.register_backend("TENSORPIPE", TensorPipeRpcBackendOptions, _init)
REMORA = backend_registry.register_backend("REMORA", RemoraRpcBackendOptions, _init)
