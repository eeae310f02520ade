"""How numbers are written for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measure import Unit
from benchmarks.results import spread

SCALES: dict[Unit, list[tuple[float, str]]] = {
    Unit.SECONDS: [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")],
    Unit.CALLS_PER_SECOND: [(1.0, "/s")],
    Unit.BYTES_PER_SECOND: [(1e9, "GB/s"), (1e6, "MB/s")],
    Unit.BYTES: [(1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B")],
    Unit.SHARE_OF_CORE: [(1e-2, "%")],
    Unit.INSTRUCTIONS: [(1.0, "")],
    Unit.C_CALLS: [(1.0, "")],
    Unit.COUNT: [(1.0, "")],
}

MOST = 1000  # more than so many times better is no number to tell


def of_values(values: Sequence[float], unit: Unit) -> str:
    """`41.2 µs ± 3%`: the median, and half the distance between the quartiles."""
    if not values:
        return "—"
    beside = spread(values)
    return of_value(statistics.median(values), unit) + (f" ±{beside:3.0%}" if beside is not None else "")


def of_value(value: float, unit: Unit) -> str:
    """`41.2 µs`"""
    scale, name = next((each for each in SCALES[unit] if abs(value) >= each[0]), SCALES[unit][-1])
    number = value / scale
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    return f"{digits} {name}".strip()


def of_ratio(ratio: float) -> str:
    """`8.25x`"""
    if ratio >= MOST:
        return f">{MOST}x"
    return f"{ratio:.{2 if ratio < 10 else 1}f}x"
