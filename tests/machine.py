"""How much slower this machine runs a thread just now than it would alone: the baseline for bounds in seconds.

    assert seconds < 4.0 * slowdown()

On a quiet machine that is 1.0. Beside other busy processes a thread waits for a processor, and so does each step of what a
test measures: a bound in seconds then says more of the machine than of the code.
"""

from __future__ import annotations

import time

SAMPLE = 0.02  # seconds of processor time: several time slices of the scheduler


def slowdown() -> float:
    """Seconds on the clock for each second that this thread computes; 1.0 at least."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < SAMPLE:
        pass
    return max(1.0, (time.perf_counter() - began) / SAMPLE)
