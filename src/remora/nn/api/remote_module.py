"""RemoteModule: an nn.Module on another worker, called as if it were here.

    linear = RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
    output = linear(torch.rand(128, 20))
    optimizer = DistributedOptimizer(torch.optim.SGD, linear.remote_parameters(), lr=0.05)

It holds no parameters, only a reference. What `nn.Module` offers beyond that is refused, and not done to an empty module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from remora import rpc
from remora.nn import destination, scripting
from remora.rpc import RRef
from remora.rpc.current_worker import _get_current_rpc_agent
from remora.rpc.internal import _internal_rpc_pickler

# What of a RemoteModule travels, and in which order its attributes are set where it arrives.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on", "device", "is_device_map_set", "is_scriptable", "generated_methods", "module_rref",
)  # fmt: skip
NO_HOOKS: Any = MappingProxyType({})
_GENERATED_METHODS = ("forward_async", "forward")  # of these, arrived modules have copies among their attributes

_ON_ITS_WORKER = {"forward", "train", "eval", "parameters"}  # (the last only says what is there in its place)
_UNSUPPORTED = [
    name
    for name, method in vars(torch.nn.Module).items()
    if isinstance(method, FunctionType) and not name.startswith("_") and name not in _ON_ITS_WORKER
]


class _RemoteModule(torch.nn.Module):
    """The implementation of RemoteModule. Also takes a TorchScript interface; see `remora.nn.scripting`."""

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[Any]

    # It is called by `nn.Module.__call__`: torch.fx replaces that one while it traces, and it runs the hooks of all modules.
    # It looks at these attributes. A module that was made here has its own; a received module has only what travels.
    _backward_hooks = _backward_pre_hooks = _forward_hooks = _forward_pre_hooks = NO_HOOKS
    _forward_hooks_with_kwargs = _forward_hooks_always_called = _forward_pre_hooks_with_kwargs = NO_HOOKS
    _is_full_backward_hook = None

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        on, device = destination.parse(remote_device)
        made = rpc.remote(on, _create_module, args=(module_cls, tuple(args or ()), dict(kwargs or {}), device))
        self._init(on, device, made, _module_interface_cls)

    def _init(self, on: str | int, device: str, module_rref: RRef[Any], interface: Any) -> None:
        super().__init__()
        self.on = on
        self.device = device
        self.is_device_map_set = bool(_get_current_rpc_agent()._get_device_map(module_rref.owner()))
        self.is_scriptable = interface is not None
        self.generated_methods = _GENERATED_METHODS
        self.module_rref = module_rref
        self._interface = interface

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[Any], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a RemoteModule for a module that exists already. Calls go to its owner, whatever `remote_device` says."""
        module = RemoteModule.__new__(RemoteModule)
        module._init(*destination.parse(remote_device), module_rref, _module_interface_cls)
        return module

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Call the module on its worker. Return a future of its result."""
        return _forward_async(self.module_rref, self._moved_to(), *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on its worker."""
        return _forward(self.module_rref, self._moved_to(), *args, **kwargs)

    def _moved_to(self) -> tuple[str, bool] | None:
        return _moved_to(self.device, self.is_device_map_set)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the parameters, as a DistributedOptimizer takes them."""
        return rpc.rpc_sync(self.module_rref.owner(), _param_rrefs, args=(self.module_rref, recurse))

    def get_module_rref(self) -> RRef[Any]:
        """Return the reference to the module."""
        return self.module_rref

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Raise: the parameters are not here."""
        raise ValueError("Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead.")

    def train(self, mode: bool = True) -> _RemoteModule:
        """Set the mode of the module, on its worker."""
        rpc.rpc_sync(self.module_rref.owner(), _train, args=(self.module_rref, mode))
        return self

    def eval(self) -> _RemoteModule:
        """Do the same as `train(False)`."""
        return self.train(False)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError("Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC")

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """Return the module that `torch.jit.script` compiles in place of this."""
        if self._interface is None:
            raise RuntimeError("only a RemoteModule with a module interface can be scripted")
        return scripting.scriptable(self._interface, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r}, {self.module_rref})"


class RemoteModule(_RemoteModule):
    """An nn.Module on another worker.

    `remote_device` is `worker` or `worker/device`, the worker given by its name or as `rank:N`; there `module_cls(*args,
    **kwargs)` makes the module, while the program goes on. If it could not be made, its first use says why. Tensors that
    are given to a module on another device than the CPU are moved there, and its results come back to the CPU.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _raise_not_supported(name: str) -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: _RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        _raise_not_supported(name)

    method.__name__ = method.__qualname__ = name
    return method


for _name in _UNSUPPORTED:
    setattr(_RemoteModule, _name, _refuse(_name))


# Calling the module. Functions, so that a module that arrives can carry them without holding itself.


def _moved_to(device: str, is_device_map_set: bool) -> tuple[str, bool] | None:
    """Return the device that tensors are moved to, and True if results stay there; None on the CPU, where nothing moves."""
    return None if device == "cpu" else (device, is_device_map_set)


def _forward(rref: RRef[Any], moved_to: tuple[str, bool] | None, /, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(rref.owner(), _call, args=(rref, moved_to, args, kwargs))


def _forward_async(
    rref: RRef[Any], moved_to: tuple[str, bool] | None, /, *args: Any, **kwargs: Any
) -> torch.futures.Future[Any]:
    return rpc.rpc_async(rref.owner(), _call, args=(rref, moved_to, args, kwargs))


# On the owner.


def _create_module(module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _call(rref: RRef[Any], moved_to: tuple[str, bool] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module = rref.local_value()
    if moved_to is None:
        return module(*args, **kwargs)
    device, stays = moved_to
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    result = module(*args, **kwargs)
    return result if stays else tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def _param_rrefs(rref: RRef[Any], recurse: bool) -> list[RRef[torch.nn.Parameter]]:
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def _train(rref: RRef[Any], mode: bool) -> None:
    rref.local_value().train(mode)


# Travelling.


def _reduce(module: RemoteModule) -> tuple[Any, ...]:
    if module.is_scriptable:
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Send its `module_rref`, and make a RemoteModule "
            "from it with `init_from_module_rref` where it arrives."
        )
    return _rebuild, tuple(getattr(module, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)


def _rebuild(*values: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    attributes = module.__dict__
    attributes.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    target = (module.module_rref, _moved_to(module.device, module.is_device_map_set))
    attributes.update(forward_async=partial(_forward_async, *target), forward=partial(_forward, *target))
    return module


_internal_rpc_pickler._register_reducer(RemoteModule, _reduce)
