"""The few calls that every contestant can make, in the words of torch.distributed.rpc; and what runs on the callee."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

WARM_UP_CALLS = 20


class Calls(Protocol):
    """What worker0 can do when its group is up."""

    def noop(self) -> object:
        """Call a function that does nothing, and wait for it."""

    def start(self) -> Any:
        """The same without waiting."""

    def finish(self, started: Sequence[Any]) -> object:
        """Wait for what was started."""

    def echo(self, value: T) -> T:
        """Send it, and return what comes back."""

    def crowd(self, callers: int, seconds: float) -> float:
        """Have so many processes call one callee without a pause; the calls a second of all of them."""


def nothing() -> None:
    """Runs on the callee."""


def same(value: T) -> T:
    """Runs on the callee."""
    return value


def rate_of(call: Callable[[], object], seconds: float) -> float:
    """Runs on a caller: calls without a pause, and says how many a second went through."""
    for _ in range(WARM_UP_CALLS):
        call()
    calls, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        call()
        calls += 1
    return calls / elapsed


def call_worker0(module: str, seconds: float) -> float:
    """Runs on a caller of the crowd."""
    rpc_sync = importlib.import_module(module).rpc_sync
    return rate_of(lambda: rpc_sync("worker0", nothing), seconds)


class RpcCalls:
    """The calls of a module with the names of torch.distributed.rpc, from worker0 to worker1."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._rpc: Any = importlib.import_module(module)

    def noop(self) -> None:
        self._rpc.rpc_sync("worker1", nothing)

    def start(self) -> Any:
        return self._rpc.rpc_async("worker1", nothing)

    def finish(self, started: Sequence[Any]) -> object:
        import torch

        return torch.futures.wait_all(list(started))

    def echo(self, value: T) -> T:
        returned: T = self._rpc.rpc_sync("worker1", same, args=(value,))
        return returned

    def crowd(self, callers: int, seconds: float) -> float:
        names = [f"worker{rank}" for rank in range(1, callers + 1)]
        rates = [self._rpc.rpc_async(name, call_worker0, args=(self._module, seconds)) for name in names]
        return float(sum(rate.wait() for rate in rates))
