"""Kinds of RPC backend by name. A new kind may be registered at any time; members handed out before stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from remora.rpc import constants

OptionsHandler = Callable[..., Any]
InitHandler = Callable[..., Any]


class BackendValue(NamedTuple):
    """A backend: the functions that make its options and its agent."""

    construct_rpc_backend_options_handler: OptionsHandler
    init_backend_handler: InitHandler


class _Registry(type):
    """Lets BackendType be used like an enum that can grow: BackendType.X, BackendType["X"], iteration, `in`."""

    _members: dict[str, BackendType] = {}

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return cls._members[name]
        except KeyError:
            raise AttributeError(
                f"no RPC backend {name!r} is registered: there are {', '.join(cls._members)}"
            ) from None

    def __getitem__(cls, name: str) -> BackendType:
        return cls._members[name]

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(cls._members.values())

    def __contains__(cls, member: object) -> bool:
        return isinstance(member, BackendType)

    @property
    def __members__(cls) -> dict[str, BackendType]:
        return dict(cls._members)


class BackendType(metaclass=_Registry):
    """A registered backend."""

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], BackendType], tuple[str]]:
        return _member, (self.name,)


def _member(name: str) -> BackendType:
    return BackendType[name]


def backend_registered(backend_name: str) -> bool:
    """Return True if a backend of that name is known."""
    return backend_name in _Registry._members


def register_backend(
    backend_name: str, construct_rpc_backend_options_handler: OptionsHandler, init_backend_handler: InitHandler
) -> BackendType:
    """Make a new kind of backend known, and return its member of BackendType."""
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    member = BackendType(backend_name, BackendValue(construct_rpc_backend_options_handler, init_backend_handler))
    _Registry._members[backend_name] = member
    return member


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """The options object of a backend."""
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout=rpc_timeout, init_method=init_method, **kwargs
    )


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Start a backend and return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)
