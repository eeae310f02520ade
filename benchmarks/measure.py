"""What a benchmark is, what it is given and what it gives back, and the few lines that time things."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from benchmarks.contestants import Contestant, Transport

T = TypeVar("T")


class Unit(Enum):
    """How a number is to be read."""

    SECONDS = "s"
    CALLS_PER_SECOND = "calls/s"
    BYTES_PER_SECOND = "B/s"

    @property
    def less_is_better(self) -> bool:
        return self is Unit.SECONDS


@dataclass(frozen=True)
class Reading:
    """One number of one round."""

    metric: str
    value: float
    unit: Unit


class Skipped(Exception):
    """The benchmark does not apply to this contestant, for the reason given."""


@dataclass(frozen=True)
class Setting:
    """What a benchmark measures, and how hard it should try."""

    contestant: Contestant
    transport: Transport
    workers: int
    quick: bool

    @property
    def rpc(self) -> Any:
        return importlib.import_module(self.contestant.module)

    @property
    def peers(self) -> list[str]:
        """Everyone but worker0, which runs the benchmark."""
        return [f"worker{rank}" for rank in range(1, self.workers)]

    def effort(self, full: T, quick: T) -> T:
        return quick if self.quick else full


Measure = Callable[[Setting], Iterable[Reading]]


@dataclass(frozen=True)
class Benchmark:
    """A name to choose it by, words for the table, and a function.

    The function runs on worker0 of a fresh group of `workers`; with no workers, in the process of the runner. It must
    warm up what it measures. With `contestants=False` it measures the machine, once per round.
    """

    name: str
    title: str
    measure: Measure
    workers: int = 2
    transport: Transport = "default"
    contestants: bool = True


def time_each(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of so many repetitions."""
    clock = time.perf_counter
    seconds: list[float] = []
    for _ in range(times):
        begun = clock()
        action()
        seconds.append(clock() - begun)
    return seconds


def time_all(action: Callable[[], object]) -> float:
    """Seconds of one run."""
    return time_each(action, 1)[0]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latencies(seconds: list[float], prefix: str = "") -> list[Reading]:
    """Median and tail of single calls."""
    return [Reading(f"{prefix}p{percent}", percentile(seconds, percent), Unit.SECONDS) for percent in (50, 99)]
