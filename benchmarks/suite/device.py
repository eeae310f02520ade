"""Tensors of a CUDA device, sent to another process on the same device; and a call without any, for comparison.

Two times for each size: until the call has returned, and until the callee's stream has the tensor as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import time_each

MB = 10**6
TIMES = {1: 200, 256: 60, 1000: 30}  # MB, and how often
NOOPS = 2000
OVER_HOST = {1: 100, 64: 20, 256: 10}  # the same, when nothing is lent


def nothing() -> None:
    """Runs on the callee."""


def take(tensor: Any) -> None:
    """Runs on the callee, which does not wait for its device."""


def have(tensor: Any) -> None:
    """Runs on the callee, which does."""
    import torch

    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def total(tensor: Any) -> int:
    """Runs on the callee: what it was sent, in one number."""
    return int(tensor.sum(dtype=tensor.new_zeros(0).long().dtype))


def measure(rpc: Any, peer: str) -> Iterator[tuple[str, float]]:
    """Medians, in seconds."""
    import torch

    time_each(lambda: rpc.rpc_sync(peer, nothing), NOOPS // 10)
    yield "no-op", statistics.median(time_each(lambda: rpc.rpc_sync(peer, nothing), NOOPS))
    for size, times in TIMES.items():
        tensor = torch.full((size * MB,), 3, dtype=torch.uint8, device="cuda")
        for _ in range(3):
            if rpc.rpc_sync(peer, total, args=(tensor,)) != 3 * size * MB:
                raise AssertionError(f"{size} MB arrived changed")
        for function, words in ((take, "call returned"), (have, "tensor there")):
            yield f"{size} MB, {words}", _median(rpc, peer, function, tensor, times)


def over_host(rpc: Any, peer: str, road: str) -> Iterator[tuple[str, float]]:
    """Medians, in seconds, by one road; of the same from host to host; and of the two copies alone, which no road can do
    without. The last two together are what it takes if nothing is done at the same time."""
    import torch

    for size, times in OVER_HOST.items():
        tensor = torch.full((size * MB,), 3, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            if rpc.rpc_sync(peer, total, args=(tensor,)) != 3 * size * MB:
                raise AssertionError(f"{size} MB arrived changed")
        yield f"{size} MB, {road}", _median(rpc, peer, have, tensor, times)
        yield f"{size} MB, {road}, on the host", _median(rpc, peer, have, tensor.cpu().pin_memory(), times)
        yield f"{size} MB, two copies", _copies(tensor, times)


def _copies(tensor: Any, times: int) -> float:
    import torch

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    back = torch.empty_like(tensor)

    def copy() -> None:
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        back.copy_(host, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    time_each(copy, 3)
    return statistics.median(time_each(copy, times))


def _median(rpc: Any, peer: str, function: Any, tensor: Any, times: int) -> float:
    import torch

    def send() -> None:
        rpc.rpc_sync(peer, function, args=(tensor,))

    time_each(send, max(5, times // 10))
    rpc.rpc_sync(peer, have, args=(tensor,))
    torch.cuda.synchronize()
    return statistics.median(time_each(send, times))
