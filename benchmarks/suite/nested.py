"""Calls within calls: worker1 calls back worker0, which waits for it; and worker1 calls on to worker2."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from benchmarks.calls import nothing
from benchmarks.measure import Reading, Setting, latencies, time_each


def pass_on(module: str, to: str) -> None:
    """Runs on worker1."""
    importlib.import_module(module).rpc_sync(to, nothing)


def measure(setting: Setting) -> Iterator[Reading]:
    yield from _through_worker1(setting, "worker0", "a → b → a ")
    yield from _through_worker1(setting, "worker2", "a → b → c ")


def _through_worker1(setting: Setting, to: str, prefix: str) -> list[Reading]:
    rpc, args = setting.rpc, (setting.module, to)

    def call() -> None:
        rpc.rpc_sync("worker1", pass_on, args=args)

    time_each(call, setting.effort(200, 50))
    return latencies(time_each(call, setting.effort(800, 300)), prefix)
