"""The price of a call: `rpc_sync` of a function that does nothing."""

from __future__ import annotations

from benchmarks.measure import Reading, Setting, latencies, time_each


def nothing() -> None:
    """Runs on the callee."""


def measure(setting: Setting) -> list[Reading]:
    rpc, (peer, *_) = setting.rpc, setting.peers
    time_each(lambda: rpc.rpc_sync(peer, nothing), setting.effort(500, 100))
    return latencies(time_each(lambda: rpc.rpc_sync(peer, nothing), setting.effort(4000, 1000)))
