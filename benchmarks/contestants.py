"""Who is measured: modules with the names of torch.distributed.rpc, and actor systems that can do some of the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from benchmarks.calls import Calls, RpcCalls

Transport = Literal["default", "tcp"]


@dataclass(frozen=True)
class Place:
    """What a process that takes part is told."""

    rank: int
    workers: int
    transport: Transport
    init_method: str


class Contestant(Protocol):
    """One way to call a function in another process."""

    @property
    def name(self) -> str: ...

    @property
    def slow_to_start(self) -> bool:
        """Whether it takes seconds to form a group."""

    def why_absent(self) -> str | None:
        """None when it can be measured here."""

    def processes(self, workers: int) -> int:
        """How many we have to start for a group of so many; actor systems start the others themselves."""

    def joined(self, place: Place) -> AbstractContextManager[Calls]:
        """Be a member of a group."""


@dataclass(frozen=True)
class RpcModule:
    """A module with the names of torch.distributed.rpc, and the options with which it uses TCP for everything."""

    name: str
    module: str
    options_class: str
    tcp: tuple[tuple[str, Any], ...] = field(hash=False)
    slow_to_start: bool = False

    def why_absent(self) -> str | None:
        try:
            rpc = importlib.import_module(self.module)
        except ImportError as error:
            return str(error)
        return None if hasattr(rpc, "init_rpc") else f"{self.module} has no init_rpc"

    def processes(self, workers: int) -> int:
        return workers

    @contextmanager
    def joined(self, place: Place) -> Iterator[Calls]:
        rpc = importlib.import_module(self.module)
        options = self.options(place.init_method, place.transport)
        rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.workers, rpc_backend_options=options)
        yield RpcCalls(self.module)
        rpc.shutdown()

    def options(self, init_method: str, transport: Transport) -> Any:
        """Options with which it uses this transport; the default is whatever it chooses by itself."""
        options_class = getattr(importlib.import_module(self.module), self.options_class)
        chosen = dict(self.tcp) if transport == "tcp" else {}
        return options_class(init_method=init_method, **chosen)


@dataclass(frozen=True)
class ActorSystem:
    """A package with actors of its own kind; `adapter` is the module here that makes its calls."""

    name: str
    package: str
    adapter: str
    slow_to_start: bool = True

    def why_absent(self) -> str | None:
        try:
            importlib.import_module(self.package)
        except ImportError:
            return "not installed (pip install 'remora[bench-peers]')"
        return None

    def processes(self, workers: int) -> int:
        return 1

    def joined(self, place: Place) -> AbstractContextManager[Calls]:
        opened: AbstractContextManager[Calls] = importlib.import_module(self.adapter).opened(place.workers)
        return opened


@dataclass(frozen=True)
class Machine:
    """Nobody: what the machine does without any RPC."""

    name: str = "machine"
    slow_to_start: bool = False

    def why_absent(self) -> str | None:
        return None

    def processes(self, workers: int) -> int:
        return 0

    def joined(self, place: Place) -> AbstractContextManager[Calls]:
        raise TypeError("the machine makes no calls")


REMORA_TCP = (("transports", ("tcp",)), ("shared_memory", 0))
REMORA = RpcModule("remora", "remora.rpc", "RemoraRpcBackendOptions", REMORA_TCP)
TORCH = RpcModule("torch", "torch.distributed.rpc", "TensorPipeRpcBackendOptions", (("_transports", ["uv"]),))
RAY = ActorSystem("ray", "ray", "benchmarks.peers.ray")
MONARCH = ActorSystem("monarch", "monarch.actor", "benchmarks.peers.monarch")
MACHINE = Machine()
CONTESTANTS: tuple[Contestant, ...] = (REMORA, TORCH, RAY, MONARCH)
