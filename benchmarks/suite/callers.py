"""One callee, eight callers in eight processes, each calling as fast as `rpc_sync` lets it: the calls a second."""

from __future__ import annotations

import importlib
import time

from benchmarks.measure import Reading, Setting, Unit
from benchmarks.suite.noop import nothing


def call_for(module: str, callee: str, seconds: float) -> float:
    """Runs on a caller: calls without a pause, and says how many a second went through."""
    rpc_sync = importlib.import_module(module).rpc_sync
    for _ in range(20):
        rpc_sync(callee, nothing)
    calls, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        rpc_sync(callee, nothing)
        calls += 1
    return calls / elapsed


def measure(setting: Setting) -> list[Reading]:
    rpc, seconds = setting.rpc, setting.effort(2.0, 0.7)
    args = (setting.contestant.module, "worker0", seconds)
    rates = [rpc.rpc_async(peer, call_for, args=args) for peer in setting.peers]
    return [Reading("rate", sum(rate.wait() for rate in rates), Unit.CALLS_PER_SECOND)]
