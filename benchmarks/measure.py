"""What a benchmark is, what it is given and what it gives back, and the few lines that time things."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from benchmarks.calls import Calls
from benchmarks.contestants import REMORA, TORCH, Contestant, RpcModule, Transport

T = TypeVar("T")

MOST_SAMPLES = 200  # kept of one distribution: enough to draw it


class Unit(Enum):
    """How a number is to be read."""

    SECONDS = "s"
    CALLS_PER_SECOND = "calls/s"
    BYTES_PER_SECOND = "B/s"
    BYTES = "B"
    SHARE_OF_CORE = "cores"
    INSTRUCTIONS = "instructions"  # of the interpreter
    C_CALLS = "C calls"
    COUNT = "count"

    @property
    def less_is_better(self) -> bool:
        return self not in (Unit.CALLS_PER_SECOND, Unit.BYTES_PER_SECOND, Unit.COUNT)


@dataclass(frozen=True)
class Reading:
    """One number of one turn; where the distribution behind it matters, samples of that, in order of size.

    Some numbers are for the plots and would make the table too long: `tabled=False`.
    """

    metric: str
    value: float
    unit: Unit
    samples: tuple[float, ...] = ()
    tabled: bool = True


class Skipped(Exception):
    """The benchmark does not apply to this contestant, for the reason given."""


@dataclass(frozen=True)
class Setting:
    """What a benchmark measures, and how hard it should try."""

    contestant: Contestant
    transport: Transport
    workers: int
    quick: bool
    joined: Calls | None = None

    @property
    def calls(self) -> Calls:
        """What every contestant can do."""
        if self.joined is None:
            raise RuntimeError("this benchmark asked for no workers")
        return self.joined

    @property
    def module(self) -> str:
        """The name of the module with the names of torch.distributed.rpc."""
        if not isinstance(self.contestant, RpcModule):
            raise Skipped(f"{self.contestant.name} has no such thing")
        return self.contestant.module

    @property
    def rpc(self) -> Any:
        return importlib.import_module(self.module)

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
    warm up what it measures. Where actor systems are among the contestants it makes do with `Setting.calls`. In each
    round every contestant has so many turns (`bouts`); at most `rounds` rounds are made of what takes long and varies
    little. A quick run does without the `slow` ones. `fresh` ones leave something behind in their group, or have a large
    one: when two trees are compared, they get a group for each turn.
    """

    name: str
    title: str
    measure: Measure
    workers: int = 2
    transport: Transport = "default"
    contestants: tuple[Contestant, ...] = (REMORA, TORCH)
    bouts: int = 1
    rounds: int | None = None
    slow: bool = False
    fresh: bool = False


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


def latencies(seconds: list[float], prefix: str = "", tabled: bool = True) -> list[Reading]:
    """Median and tail of single calls."""
    median, tail = (percentile(seconds, percent) for percent in (50, 99))
    return [
        Reading(f"{prefix}p50", median, Unit.SECONDS, thinned(seconds), tabled),
        Reading(f"{prefix}p99", tail, Unit.SECONDS, tabled=tabled),
    ]


def thinned(values: list[float]) -> tuple[float, ...]:
    """Evenly spread among them in order of size, the extremes included."""
    ordered, wanted = sorted(values), min(MOST_SAMPLES, len(values))
    if wanted < 2:
        return tuple(ordered)
    return tuple(ordered[index * (len(ordered) - 1) // (wanted - 1)] for index in range(wanted))
