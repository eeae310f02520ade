"""One callee, and up to sixteen callers in as many processes, each calling without a pause: the calls a second of all."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import Reading, Setting, Unit

MOST = 16


def measure(setting: Setting) -> Iterator[Reading]:
    for callers in setting.effort([1, 2, 4, 8, MOST], [1, 8, MOST]):
        rate = setting.calls.crowd(callers, setting.effort(1.0, 0.7))
        yield Reading(f"{callers}", rate, Unit.CALLS_PER_SECOND)
