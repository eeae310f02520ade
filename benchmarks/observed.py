"""What an observer costs that asks the workers twice a second for all that is new: `make bench ARGS="--paths observer"`.

A turn of a usual benchmark may pass between two questions. So these take a second and a half, and tell how many calls a
second went through in all of it. The observer is a process of its own, as the command and the dashboard are, and ends with
the turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.contestants import REMORA
from benchmarks.measure import Benchmark, Reading, Setting, Unit, percentile, time_each

VARIABLE = "REMORA_BENCH_OBSERVER"  # 0: there is no observer
PAUSE = 0.5  # seconds from one question to the next
FULL, QUICK = 1.5, 1.0  # seconds of a turn
BURST = 5000  # calls at once


def noop(setting: Setting) -> list[Reading]:
    """No-op calls, one after the other: how long one takes, and how many go through with the stalls of a few."""
    times: list[float] = []
    readings = _rate(setting, 100, lambda: times.extend(time_each(setting.calls.noop, 100)))
    return [Reading("p50", percentile(times, 50), Unit.SECONDS), *readings]


def burst(setting: Setting) -> list[Reading]:
    """No-op calls, 5,000 at once."""
    calls = setting.calls
    return _rate(setting, BURST, lambda: calls.finish([calls.start() for _ in range(BURST)]))


SUITE = [
    Benchmark("noop", "rpc_sync no-op", noop, contestants=(REMORA,)),
    Benchmark("burst", "5,000 rpc_async at once", burst, contestants=(REMORA,)),
]


def _rate(setting: Setting, calls: int, block: Callable[[], object]) -> list[Reading]:
    block()
    with observer():
        blocks, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < setting.effort(FULL, QUICK):
            block()
            blocks += 1
    return [Reading("rate", blocks * calls / elapsed, Unit.CALLS_PER_SECOND)]


@contextmanager
def observer() -> Iterator[int]:
    """Have the group of this process observed, if it is to be. Yields how many workers answered the first question."""
    if os.environ.get(VARIABLE) == "0":
        yield 0
        return
    from remora.observer import directory

    (mine,) = [entry for entry in directory.entries() if entry.pid == os.getpid()]
    command = [sys.executable, "-m", "benchmarks.observed", mine.group]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not (answered := process.stdout.readline()):
                raise RuntimeError("the observer ended")
            yield int(answered)
        finally:
            process.kill()


def main(group: str) -> None:
    """Observe a group until killed. A line of output says that the first answer is here."""
    from remora.observer.group_observer import GroupObserver
    from remora.observer.model import Query

    last = 0.0
    with GroupObserver.find(group=group) as observer:
        while True:
            begun = time.monotonic()
            found = observer.snapshot(Query(since=last))
            last = found.time
            if found.missing:
                raise SystemExit(f"no answer: {found.missing}")
            print(len(found.workers), flush=True)
            time.sleep(max(0.0, begun + PAUSE - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1])
