"""What this machine can do at best: no RPC, only what any RPC in Python must do at least."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.measure import Reading, Setting, Unit, latencies, time_each
from benchmarks.sockets import PAIRS, WAYS, partner
from benchmarks.suite.echo import MB, QUICK, SIZES, TABLED, TCP, words

PING = 64  # bytes


def ping_pong(setting: Setting) -> Iterator[Reading]:
    """64 bytes to another Python process and back, without pickling: waiting in the kernel, and asking all the time."""
    for kind in PAIRS:
        for way in WAYS:
            with partner(kind, way, PING) as exchange:
                time_each(exchange, 500)
                yield from latencies(time_each(exchange, setting.effort(3000, 2000)), f"{kind}, {way} ")


def socket_copy(setting: Setting) -> Iterator[Reading]:
    """As much as the echo of a tensor moves, from and into memory that has been touched before."""
    for kind in PAIRS:
        for size, times in TCP.items():
            with partner(kind, "blocking", size) as exchange:
                time_each(exchange, 2)
                seconds = time_each(exchange, setting.effort(times, max(2, times // 4)))
            yield Reading(f"{kind} {words(size)}", 2 * size / statistics.median(seconds), Unit.BYTES_PER_SECOND)


def memcpy(setting: Setting) -> Iterator[Reading]:
    """From and to memory that has been touched before, by one thread: what an echo copies, if each way is one copy."""
    for size, times in setting.effort(SIZES, QUICK).items():
        seconds = statistics.median(_copies(size, times))
        yield Reading(words(size), size / seconds, Unit.BYTES_PER_SECOND, tabled=size in TABLED and size >= MB)


def _copies(size: int, times: int) -> list[float]:
    source, target = bytearray(size), memoryview(bytearray(size))

    def copy() -> None:
        target[:] = source

    time_each(copy, 3)
    return time_each(copy, times)
