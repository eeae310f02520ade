"""A builtin operator on small tensors: what is added to a call by two tensors going and one coming back."""

from __future__ import annotations

from benchmarks.measure import Reading, Setting, latencies, time_each


def measure(setting: Setting) -> list[Reading]:
    import torch

    rpc, (peer, *_) = setting.rpc, setting.peers
    args = (torch.ones(4), torch.ones(4))

    def call() -> None:
        rpc.rpc_sync(peer, torch.add, args=args)

    time_each(call, setting.effort(300, 100))
    return latencies(time_each(call, setting.effort(1200, 700)))
