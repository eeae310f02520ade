"""The price of a call: a function that does nothing is called, and waited for."""

from __future__ import annotations

from benchmarks.measure import Reading, Setting, latencies, time_each


def measure(setting: Setting) -> list[Reading]:
    call = setting.calls.noop
    time_each(call, setting.effort(300, 100))
    return latencies(time_each(call, setting.effort(1500, 1000)))
