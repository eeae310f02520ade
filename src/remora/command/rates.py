"""Figures that need several snapshots: calls a second of each worker, over the last minutes."""

from __future__ import annotations

from collections import deque

from remora.observer.model import GroupSnapshot, WorkerSnapshot

KEPT = 120  # rates of each worker
BARS = "▁▂▃▄▅▆▇█"


class History:
    """Rates by worker, from one snapshot to the next. A worker that was started again begins anew."""

    def __init__(self) -> None:
        self._last: dict[str, WorkerSnapshot] = {}
        self._rates: dict[str, deque[float]] = {}
        self.total: deque[float] = deque(maxlen=KEPT)  # of the group

    def add(self, group: GroupSnapshot) -> None:
        """Compare a snapshot with the one before it."""
        total, known = 0.0, False
        for worker in group.workers:
            before = self._last.get(worker.name)
            self._last[worker.name] = worker
            if before is None or before.incarnation != worker.incarnation or worker.time <= before.time:
                continue
            calls = worker.calls_served - before.calls_served
            rate = max(calls, 0) / (worker.time - before.time)
            self._rates.setdefault(worker.name, deque(maxlen=KEPT)).append(rate)
            total, known = total + rate, True
        if known:
            self.total.append(total)

    def rate(self, name: str) -> float | None:
        """Calls that a worker served a second, of late; None if it is not known yet."""
        rates = self._rates.get(name)
        return rates[-1] if rates else None

    def bars(self, name: str, width: int = 16) -> str:
        """The last rates of a worker as bars, the tallest its highest."""
        return sparkline(list(self._rates.get(name, ()))[-width:])


def sparkline(values: list[float]) -> str:
    """One bar for each value."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return BARS[0] * len(values)
    return "".join(BARS[min(int(value / highest * len(BARS)), len(BARS) - 1)] for value in values)
