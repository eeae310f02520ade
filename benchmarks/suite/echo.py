"""SharedMemory data: a tensor goes to the callee and comes back; the bytes of both directions by the time of the call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.contestants import ActorSystem
from benchmarks.measure import Reading, Setting, Unit, latencies, time_each

KB, MB, GB = 10**3, 10**6, 10**9
NAMES = {"GB": GB, "MB": MB, "KB": KB, "B": 1}
SIZES = {  # bytes, and how often in a full run
    64: 150, KB: 150, 4 * KB: 150, 16 * KB: 100, 64 * KB: 100, 256 * KB: 60, MB: 60,
    4 * MB: 24, 16 * MB: 12, 64 * MB: 5, 128 * MB: 4, 256 * MB: 3, GB: 2,
}  # fmt: skip
QUICK = {64: 150, 4 * KB: 150, 64 * KB: 50, MB: 15, 16 * MB: 5, 128 * MB: 3}
TCP = {MB: 40, 16 * MB: 8, 128 * MB: 4}
TABLED = (4 * KB, 64 * KB, MB, 16 * MB, 128 * MB, GB)
MOST_OF_A_PEER = 300 * MB  # a gigabyte is more than others are made for


def measure(setting: Setting) -> Iterator[Reading]:
    sizes = setting.effort(SIZES, QUICK)
    for size, times in sizes.items():
        if not isinstance(setting.contestant, ActorSystem) or size <= MOST_OF_A_PEER:
            yield from _of_size(setting, size, times)


def over_tcp(setting: Setting) -> Iterator[Reading]:
    for size, times in TCP.items():
        yield from _of_size(setting, size, setting.effort(times, max(2, times // 4)))


def one_megabyte(setting: Setting) -> Iterator[Reading]:
    return _of_size(setting, MB, setting.effort(SIZES[MB], QUICK[MB]))


def _of_size(setting: Setting, size: int, times: int) -> Iterator[Reading]:
    import torch

    calls, tensor = setting.calls, torch.arange(size, dtype=torch.uint8)
    if not torch.equal(calls.echo(tensor), tensor):
        raise AssertionError(f"{words(size)} came back changed")

    def echo() -> None:
        calls.echo(tensor)

    time_each(echo, 2 if size >= MB else 20)
    seconds = time_each(echo, times)
    rate = 2 * size / statistics.median(seconds)
    yield Reading(words(size), rate, Unit.BYTES_PER_SECOND, tabled=size in TABLED)
    yield from latencies(seconds, f"{words(size)} ", tabled=False)


def words(size: int) -> str:
    """`16 MB`"""
    name, scale = next((name, scale) for name, scale in NAMES.items() if size >= scale)
    return f"{size // scale} {name}"


def size_of(text: str) -> int:
    """16,000,000 of `16 MB`."""
    number, name = text.split()[:2]
    return int(number) * NAMES[name]
