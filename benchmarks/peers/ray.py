"""The calls of the benchmarks in Ray: methods of actors, each of which has a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from benchmarks.calls import rate_of

T = TypeVar("T")

STORE_BYTES = 4 * 10**9  # of Ray's object store: enough for the largest tensors


class Callee:
    """The actor that is called."""

    def nothing(self) -> None: ...

    def same(self, value: T) -> T:
        return value


class Caller:
    """One of a crowd."""

    def __init__(self, callee: Any) -> None:
        self._callee = callee

    def call_for(self, seconds: float) -> float:
        import ray

        return rate_of(lambda: ray.get(self._callee.nothing.remote()), seconds)


class RayCalls:
    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._callee = ray.remote(Callee).options(num_cpus=0).remote()
        self._callers: list[Any] = []
        self.noop()

    def noop(self) -> object:
        return self._ray.get(self._callee.nothing.remote())

    def start(self) -> Any:
        return self._callee.nothing.remote()

    def finish(self, started: Sequence[Any]) -> object:
        return self._ray.get(list(started))

    def echo(self, value: T) -> T:
        returned: T = self._ray.get(self._callee.same.remote(value))
        return returned

    def crowd(self, callers: int, seconds: float) -> float:
        while len(self._callers) < callers:
            self._callers.append(self._ray.remote(Caller).options(num_cpus=0).remote(self._callee))
        self._ray.get([each.call_for.remote(0.0) for each in self._callers])  # until all processes are up
        return float(sum(self._ray.get([each.call_for.remote(seconds) for each in self._callers[:callers]])))


@contextmanager
def opened(workers: int) -> Iterator[RayCalls]:
    """A cluster of this machine alone, without dashboard; tensors take the way without copies, which is off by default."""
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), RAY_ENABLE_ZERO_COPY_TORCH_TENSORS="1")
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=STORE_BYTES)
    try:
        yield RayCalls(ray)
    finally:
        ray.shutdown()
