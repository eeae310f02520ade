"""The calls of the benchmarks in Monarch: endpoints of actors in processes of this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from monarch.actor import Actor, endpoint, shutdown_context, this_host

from benchmarks.calls import WARM_UP_CALLS

T = TypeVar("T")


class Callee(Actor):  # type: ignore[misc]  # Any, where Monarch is not installed
    """The actor that is called."""

    @endpoint  # type: ignore[untyped-decorator]
    def nothing(self) -> None: ...

    @endpoint  # type: ignore[untyped-decorator]
    def same(self, value: T) -> T:
        return value


class Caller(Actor):  # type: ignore[misc]
    """One of a crowd."""

    @endpoint  # type: ignore[untyped-decorator]
    async def call_for(self, callee: Any, seconds: float) -> float:
        for _ in range(WARM_UP_CALLS):
            await callee.nothing.call_one()
        calls, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            await callee.nothing.call_one()
            calls += 1
        return calls / elapsed


class MonarchCalls:
    def __init__(self) -> None:
        self._callee: Any = this_host().spawn_procs(per_host={"processes": 1}).spawn("callee", Callee)
        self._callers: list[Any] = []
        self.noop()

    def noop(self) -> object:
        return self._callee.nothing.call_one().get()

    def start(self) -> Any:
        return self._callee.nothing.call_one()

    def finish(self, started: Sequence[Any]) -> object:
        return [each.get() for each in started]

    def echo(self, value: T) -> T:
        returned: T = self._callee.same.call_one(value).get()
        return returned

    def crowd(self, callers: int, seconds: float) -> float:
        while len(self._callers) < callers:
            process: Any = this_host().spawn_procs(per_host={"processes": 1})
            self._callers.append(process.spawn(f"caller{len(self._callers)}", Caller))
        self._all_call(self._callers, 0.0)  # until all processes are up
        return sum(self._all_call(self._callers[:callers], seconds))

    def _all_call(self, callers: Sequence[Any], seconds: float) -> list[float]:
        rates = [each.call_for.call_one(self._callee, seconds) for each in callers]
        return [rate.get() for rate in rates]


@contextmanager
def opened(workers: int) -> Iterator[MonarchCalls]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    yield MonarchCalls()
    shutdown_context().get()
