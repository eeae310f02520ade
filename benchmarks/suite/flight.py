"""Many calls under way at once: 5,000 `rpc_async` no-ops are started, then all are waited for."""

from __future__ import annotations

from benchmarks.measure import Reading, Setting, Unit, time_all
from benchmarks.suite.noop import nothing

CALLS = 5000


def measure(setting: Setting) -> list[Reading]:
    import torch

    rpc, (peer, *_) = setting.rpc, setting.peers

    def fly(calls: int) -> None:
        torch.futures.wait_all([rpc.rpc_async(peer, nothing) for _ in range(calls)])

    fly(1000)
    seconds = min(time_all(lambda: fly(CALLS)) for _ in range(setting.effort(3, 1)))
    return [Reading("rate", CALLS / seconds, Unit.CALLS_PER_SECOND)]
