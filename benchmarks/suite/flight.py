"""Many calls under way at once: 5,000 no-ops are started and then waited for; and a window of 1 to 256 is kept full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from benchmarks.calls import Calls
from benchmarks.measure import Reading, Setting, Unit, time_all

CALLS = 5000
WINDOWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def measure(setting: Setting) -> list[Reading]:
    calls = setting.calls

    def fly(number: int) -> None:
        calls.finish([calls.start() for _ in range(number)])

    fly(1000)
    return [Reading("rate", CALLS / time_all(lambda: fly(CALLS)), Unit.CALLS_PER_SECOND)]


def concurrency(setting: Setting) -> Iterator[Reading]:
    for window in setting.effort(WINDOWS, WINDOWS[::4]):
        _rate(setting.calls, window, 0.1)
        rate = _rate(setting.calls, window, setting.effort(0.5, 0.4))
        yield Reading(f"{window}", rate, Unit.CALLS_PER_SECOND, tabled=window in WINDOWS[::4])


def sixteen(setting: Setting) -> list[Reading]:
    """One window of `concurrency`, alone."""
    _rate(setting.calls, 16, 0.05)
    return [Reading("rate", _rate(setting.calls, 16, setting.effort(0.2, 0.1)), Unit.CALLS_PER_SECOND)]


def _rate(calls: Calls, window: int, seconds: float) -> float:
    """A new call is started whenever the oldest has been answered."""
    under_way = deque(calls.start() for _ in range(window))
    answered, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        calls.finish([under_way.popleft()])
        under_way.append(calls.start())
        answered += 1
    calls.finish(under_way)
    return answered / elapsed
