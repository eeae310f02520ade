"""What a run found: every number of every turn, the arithmetic on them, and the form in which they are kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Reading, Skipped, Unit


@dataclass
class Row:
    """All numbers of one metric of one benchmark: by contestant, one a turn."""

    benchmark: str
    metric: str
    unit: Unit
    tabled: bool = True
    values: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, who: str) -> float | None:
        values = self.values.get(who)
        return statistics.median(values) if values else None

    def ratio(self, ours: str, theirs: str) -> float | None:
        """How many times better ours is, by the medians; below 1 it is worse."""
        return self._times_better(self.median(ours), self.median(theirs))

    def ratios(self, ours: str, theirs: str) -> list[float]:
        """The same for each pair of turns: both were taken one right after the other."""
        pairs = zip(self.values.get(ours, []), self.values.get(theirs, []), strict=False)
        return [ratio for pair in pairs if (ratio := self._times_better(*pair)) is not None]

    def _times_better(self, ours: float | None, theirs: float | None) -> float | None:
        if self.unit is Unit.COUNT or ours is None or theirs is None or ours <= 0 or theirs <= 0:
            return None
        return theirs / ours if self.unit.less_is_better else ours / theirs


def spread(values: Sequence[float]) -> float | None:
    """Half the distance between the quartiles, as a share of the median; None where that says nothing."""
    median = statistics.median(values)
    if len(values) < 2 or median <= 0:
        return None
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / 2 / median


@dataclass
class Results:
    """The rows, and what there is to say about what is missing."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # who was not able to do what it should

    def add(self, benchmark: str, who: str, readings: Sequence[Reading]) -> None:
        for reading in readings:
            new = Row(benchmark, reading.metric, reading.unit, reading.tabled)
            row = self.rows.setdefault((benchmark, reading.metric), new)
            row.values.setdefault(who, []).append(reading.value)
            if reading.samples:
                row.samples.setdefault(who, []).extend(reading.samples)

    def excuse(self, benchmark: str, who: str, error: Exception) -> None:
        self.notes[benchmark, who] = str(error).strip() or type(error).__name__
        if not isinstance(error, Skipped):
            self.failed.add(who)

    def of(self, benchmark: str) -> list[Row]:
        return [row for row in self.rows.values() if row.benchmark == benchmark]

    def median(self, benchmark: str, metric: str, who: str) -> float | None:
        row = self.rows.get((benchmark, metric))
        return row.median(who) if row else None

    def contestants(self) -> set[str]:
        return {who for row in self.rows.values() for who in row.values}


def as_data(results: Results, ours: str, theirs: str) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "benchmark": row.benchmark,
            "metric": row.metric,
            "unit": row.unit.value,
            "less_is_better": row.unit.less_is_better,
            "tabled": row.tabled,
            "medians": {who: row.median(who) for who in row.values},
            "ratio": row.ratio(ours, theirs),
            "values": row.values,
            "samples": {who: [float(f"{value:.4g}") for value in values] for who, values in row.samples.items()},
        }
        for row in results.rows.values()
    ]


def from_data(data: list[dict[str, Any]]) -> Results:
    """Back from JSON."""
    results = Results()
    for each in data:
        row = Row(each["benchmark"], each["metric"], Unit(each["unit"]), each["tabled"], each["values"], each["samples"])
        results.rows[row.benchmark, row.metric] = row
    return results
