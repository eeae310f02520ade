"""The bars that Remora sets itself, and whether a run has cleared them; a look at the results, never a failure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks import wording
from benchmarks.contestants import MACHINE, REMORA, TORCH
from benchmarks.results import Results


@dataclass(frozen=True)
class Verdict:
    """One bar, after a run."""

    name: str
    wanted: str
    measured: str
    met: bool


class Bar(Protocol):
    def judge(self, results: Results) -> Verdict | None:
        """None when it was not measured."""


@dataclass(frozen=True)
class Beats:
    """So many times better than torch.distributed.rpc."""

    name: str
    benchmark: str
    metric: str
    times: float

    def judge(self, results: Results) -> Verdict | None:
        row = results.rows.get((self.benchmark, self.metric))
        ratio = row.ratio(REMORA.name, TORCH.name) if row else None
        if row is None or ratio is None:
            return None
        measured = wording.of_ratio(ratio) + _range_of(row.ratios(REMORA.name, TORCH.name))
        return Verdict(self.name, f"≥ {self.times:g}x", measured, ratio >= self.times)


def _range_of(ratios: Sequence[float]) -> str:
    """` (7.9x to 8.4x)`: between the quartiles of the single turns."""
    if len(ratios) < 2:
        return ""
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return f" ({wording.of_ratio(lower)} to {wording.of_ratio(upper)})"


@dataclass(frozen=True)
class Reaches:
    """Such a share of what the machine can do."""

    name: str
    benchmark: str
    metric: str
    floor: tuple[str, str]
    share: float

    def judge(self, results: Results) -> Verdict | None:
        ours = results.median(self.benchmark, self.metric, REMORA.name)
        floor = results.median(*self.floor, MACHINE.name)
        if ours is None or floor is None:
            return None
        return Verdict(self.name, f"≥ {self.share:.0%}", f"{ours / floor:.0%}", ours / floor >= self.share)


@dataclass(frozen=True)
class StaysBelow:
    """No more than this."""

    name: str
    benchmark: str
    metric: str
    limit: float

    def judge(self, results: Results) -> Verdict | None:
        row = results.rows.get((self.benchmark, self.metric))
        ours = row.median(REMORA.name) if row else None
        if row is None or ours is None:
            return None
        limit, measured = (wording.of_value(value, row.unit) for value in (self.limit, ours))
        return Verdict(self.name, f"≤ {limit}", measured, ours <= self.limit)


BARS: list[Bar] = [
    Beats("no-op", "noop", "p50", 8),
    Beats("no-op, TCP", "noop-tcp", "p50", 6),
    Beats("add of two small tensors", "add", "p50", 6),
    Beats("5,000 calls at once", "flight", "rate", 6),
    Beats("remote() + to_here()", "reference", "p50", 5),
    Beats("echo of 1 MB", "echo", "1 MB", 3),
    Beats("echo of 16 MB", "echo", "16 MB", 2),
    Beats("echo of 128 MB", "echo", "128 MB", 2),
    Reaches("echo of 1 MB, by a copy each way in memory", "echo", "1 MB", ("memcpy", "128 MB"), 0.7),
    Reaches("echo of 1 MB, by a copy each way in cache", "echo", "1 MB", ("memcpy", "1 MB"), 0.7),
    Reaches("echo of 16 MB, by a copy each way in memory", "echo", "16 MB", ("memcpy", "128 MB"), 0.7),
    Reaches("echo of 16 MB, by a copy each way in cache", "echo", "16 MB", ("memcpy", "16 MB"), 0.7),
    Reaches("echo of 128 MB, by a copy each way in memory", "echo", "128 MB", ("memcpy", "128 MB"), 0.7),
    Beats("echo of 128 MB, TCP", "echo-tcp", "128 MB", 1.5),
    Reaches("echo of 128 MB, TCP, by a raw socket", "echo-tcp", "128 MB", ("socket-copy", "TCP 128 MB"), 0.8),
    Beats("training step", "training", "p50", 3),
    Beats("backward through 16 calls", "micro-batches", "16 calls", 1),
    Beats("backward through 16 calls, memory", "micro-batches", "16 calls, callee's memory", 1),
    Beats("backward through 64 calls", "micro-batches", "64 calls", 1),
    Beats("backward through 64 calls, memory", "micro-batches", "64 calls, callee's memory", 1),
    Beats("backward through 16 calls and back", "micro-batches-back", "16 calls", 1),
    Beats("backward through 16 calls and back, memory", "micro-batches-back", "16 calls, callee's memory", 1),
    Beats("backward through 64 calls and back", "micro-batches-back", "64 calls", 1),
    Beats("backward through 64 calls and back, memory", "micro-batches-back", "64 calls, callee's memory", 1),
    Beats("8 callers on one callee", "callers", "8", 5),
    StaysBelow("memory by echoes after the first 50", "memory", "by the rest", 4e6),
    StaysBelow("idle, connected to 50", "idle-50", "CPU", 0.005),
]


def judge(results: Results, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Those that were measured."""
    return [verdict for bar in bars if (verdict := bar.judge(results)) is not None]
