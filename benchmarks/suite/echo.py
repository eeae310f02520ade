"""Bulk data: a tensor goes to the callee and comes back; the bytes of both directions by the time of the call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TypeVar

from benchmarks.measure import Reading, Setting, Unit, time_each

MB = 10**6
SIZES = {1: 60, 16: 12, 128: 4}  # MB, and how often in a full run

T = TypeVar("T")


def same(value: T) -> T:
    """Runs on the callee."""
    return value


def measure(setting: Setting) -> Iterator[Reading]:
    import torch

    rpc, (peer, *_) = setting.rpc, setting.peers
    for size, times in SIZES.items():
        tensor = torch.arange(size * MB, dtype=torch.uint8)
        if not torch.equal(rpc.rpc_sync(peer, same, args=(tensor,)), tensor):
            raise AssertionError(f"{size} MB came back changed")

        def echo(tensor: torch.Tensor = tensor) -> None:
            rpc.rpc_sync(peer, same, args=(tensor,))

        time_each(echo, 2)
        seconds = statistics.median(time_each(echo, setting.effort(times, max(2, times // 4))))
        yield Reading(f"{size} MB", 2 * size * MB / seconds, Unit.BYTES_PER_SECOND)
