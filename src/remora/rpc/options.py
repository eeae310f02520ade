"""The options of a worker that a program starts: PyTorch's, and ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch

from remora.devices.registry import DeviceType, as_device
from remora.options import Settings, SettingsByName, check_timeout
from remora.rpc import constants

_is_tensorpipe_available = True  # as far as programs ask: its options are accepted
_to_device = as_device


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> dict[torch.device, torch.device]:
    return {as_device(here): as_device(there) for here, there in device_map.items()}


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [as_device(device) for device in devices]


class RpcBackendOptions:
    """The options of every backend: the timeout of calls, and the place where the workers meet.

    rpc_timeout: seconds a call may take unless it says otherwise; 0 is for ever
    init_method: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or `file:///path`
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        if not isinstance(init_method, str):
            raise TypeError(f"incompatible constructor arguments: init_method={init_method!r} is not a str")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    @property
    def rpc_timeout(self) -> float:
        """Seconds a call may take unless it says otherwise; 0 is for ever."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = check_timeout(seconds, "incompatible constructor arguments: rpc_timeout")

    @property
    def bringup_timeout(self) -> float:
        """Seconds the workers of a group have to find each other; 0 is for ever. By default as long as a call."""
        return self.rpc_timeout

    def __repr__(self) -> str:
        shown = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in vars(self).items() if name != "settings")
        return f"{type(self).__name__}({shown})"


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """PyTorch's options. `_transports` and `_channels` name parts of TensorPipe and are accepted and ignored.

    num_worker_threads: how many functions the worker runs at once; no thread is started before it is needed
    rpc_timeout: seconds a call may take unless it says otherwise; 0 is for ever
    init_method: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or `file:///path`
    device_maps: for each worker, where tensors on a device here go there (see `set_device_map`)
    devices: the devices this worker uses
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if isinstance(num_worker_threads, bool) or not isinstance(num_worker_threads, int):
            raise TypeError(
                f"incompatible constructor arguments: num_worker_threads={num_worker_threads!r} is not an int"
            )
        if num_worker_threads <= 0:
            raise ValueError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.devices = _to_device_list(devices or ())
        self.settings = Settings()

    @property
    def bringup_timeout(self) -> float:
        """See `remora.options.Settings`."""
        return self.settings.time_to_meet(self.rpc_timeout)

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Map devices here to devices of worker `to`. This adds to what was set before; `init_rpc` finds out if it is
        possible."""
        new = _to_device_map(device_map)
        known = self.device_maps.get(to, {})
        for here, there in new.items():
            if known.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} and {known[here]}"
                )
        self.device_maps[to] = {**known, **new}

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """The devices this worker uses."""
        self.devices = _to_device_list(devices)

    _set_device_map = set_device_map


_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions


class RemoraRpcBackendOptions(TensorPipeRpcBackendOptions):
    """All of it: PyTorch's options (see `TensorPipeRpcBackendOptions`) and the settings of a worker, by name."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        **settings: Unpack[SettingsByName],
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
        )
        given: dict[str, Any] = {**settings}  # (a program without a type checker may give anything)
        known = {field.name for field in dataclasses.fields(Settings)}
        unknown = sorted(set(given) - known - {"_transports", "_channels"})
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}: choose from {', '.join(sorted(known))}")
        self.settings = Settings(**{name: value for name, value in given.items() if name in known})


if Settings.__doc__ is not None:  # (`python -OO`.) Programs look for the settings where they give them.
    RemoraRpcBackendOptions.__doc__ = f"{RemoraRpcBackendOptions.__doc__}\n\n    {Settings.__doc__}"

