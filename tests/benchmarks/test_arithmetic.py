"""What the benchmarks make of their numbers: medians, spread, ratios, bars, words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bars, report, wording
from benchmarks.bars import Beats, Reaches, StaysBelow, Verdict
from benchmarks.measure import Reading, Skipped, Unit, latencies, percentile, thinned
from benchmarks.results import Results, Row, spread


def results_of(unit: Unit, **values: list[float]) -> Results:
    results = Results()
    for who, numbers in values.items():
        for number in numbers:
            results.add("work", who, [Reading("metric", number, unit)])
    return results


def row_of(unit: Unit, **values: list[float]) -> Row:
    return results_of(unit, **values).rows["work", "metric"]


class TestNumbers:
    def test_percentiles_of_single_calls(self) -> None:
        seconds = [float(number) for number in range(100, 0, -1)]
        assert percentile(seconds, 50) == 51
        assert percentile(seconds, 99) == 100
        assert [reading.value for reading in latencies(seconds)] == [51, 100]

    def test_samples_are_spread_from_the_smallest_to_the_largest(self) -> None:
        kept = thinned([float(number) for number in range(10_000)])
        assert (kept[0], kept[-1], len(kept)) == (0, 9999, 200)
        assert list(kept) == sorted(kept)
        assert thinned([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)

    def test_spread_is_half_the_distance_between_the_quartiles(self) -> None:
        assert spread([8.0, 9.0, 10.0, 11.0, 100.0]) == pytest.approx(0.1)
        assert spread([10.0]) is None
        assert spread([0.0, 0.0]) is None

    def test_less_is_better_for_time_and_more_for_rates(self) -> None:
        assert row_of(Unit.SECONDS, remora=[1.0, 2.0, 9.0], torch=[8.0, 8.0, 8.0]).ratio("remora", "torch") == 4
        assert row_of(Unit.CALLS_PER_SECOND, remora=[30.0], torch=[10.0]).ratio("remora", "torch") == 3

    def test_turns_are_compared_in_pairs(self) -> None:
        row = row_of(Unit.SECONDS, remora=[1.0, 2.0, 3.0], torch=[4.0, 4.0])
        assert row.ratios("remora", "torch") == [4, 2]

    def test_what_cannot_be_compared_has_no_ratio(self) -> None:
        assert row_of(Unit.BYTES, remora=[0.0], torch=[5.0]).ratio("remora", "torch") is None
        assert row_of(Unit.SECONDS, remora=[1.0]).ratio("remora", "torch") is None
        assert row_of(Unit.COUNT, remora=[1.0], torch=[2.0]).ratio("remora", "torch") is None


class TestWords:
    def test_a_value_is_told_in_the_largest_unit_that_fits(self) -> None:
        assert wording.of_value(41.23e-6, Unit.SECONDS) == "41.2 µs"
        assert wording.of_value(2.5e9, Unit.BYTES_PER_SECOND) == "2.5 GB/s"
        assert wording.of_value(12345.6, Unit.CALLS_PER_SECOND) == "12,346 /s"
        assert wording.of_value(-2000, Unit.BYTES) == "-2 KB"
        assert wording.of_value(0.004, Unit.SHARE_OF_CORE) == "0.4 %"

    def test_many_values_are_told_by_median_and_spread(self) -> None:
        assert wording.of_values([8e-3, 9e-3, 10e-3, 11e-3, 12e-3], Unit.SECONDS) == "10 ms ±10%"
        assert wording.of_values([], Unit.SECONDS) == "—"

    def test_sizes_are_told_and_read_back(self) -> None:
        from benchmarks.suite.echo import SIZES, size_of, words

        assert [words(size) for size in (64, 4000, 16 * 10**6, 10**9)] == ["64 B", "4 KB", "16 MB", "1 GB"]
        assert [size_of(words(size)) for size in SIZES] == list(SIZES)


class TestBars:
    def test_times_better(self) -> None:
        results = results_of(Unit.SECONDS, remora=[1.0, 1.0], torch=[8.0, 8.0])
        measured = "8.00x (8.00x to 8.00x)"
        assert Beats("bar", "work", "metric", 8).judge(results) == Verdict("bar", "≥ 8x", measured, True)
        assert Beats("bar", "work", "metric", 8.1).judge(results) == Verdict("bar", "≥ 8.1x", measured, False)

    @pytest.mark.parametrize(("share", "met"), [(0.7, True), (0.8, False)])
    def test_share_of_what_the_machine_can_do(self, share: float, met: bool) -> None:
        results = results_of(Unit.BYTES_PER_SECOND, remora=[7.5], machine=[10.0])
        verdict = Reaches("bar", "work", "metric", ("work", "metric"), share).judge(results)
        assert verdict == Verdict("bar", f"≥ {share:.0%}", "75%", met)

    @pytest.mark.parametrize(("limit", "met"), [(5e6, True), (4e6, False)])
    def test_a_limit(self, limit: float, met: bool) -> None:
        verdict = StaysBelow("bar", "work", "metric", limit).judge(results_of(Unit.BYTES, remora=[4.5e6]))
        assert verdict is not None
        assert (verdict.measured, verdict.met) == ("4.5 MB", met)

    def test_what_was_not_measured_is_not_judged(self) -> None:
        assert bars.judge(results_of(Unit.SECONDS, remora=[1.0])) == []

    def test_every_bar_asks_for_a_benchmark_that_there_is(self) -> None:
        from benchmarks.suite import SUITE

        asked = {getattr(bar, "benchmark") for bar in bars.BARS}  # noqa: B009
        assert asked <= {benchmark.name for benchmark in SUITE}


class TestKeeping:
    def test_results_come_back_from_json(self, tmp_path: Path) -> None:
        results = results_of(Unit.SECONDS, remora=[1.0, 2.0], torch=[3.0])
        results.add("work", "remora", latencies([0.25, 0.5, 0.75]))
        report.write(results, tmp_path / "run.json")
        assert report.read(tmp_path / "run.json").rows == results.rows
        assert json.loads((tmp_path / "run.json").read_text())["results"][0]["ratio"] == 2

    def test_what_is_skipped_did_not_fail(self) -> None:
        results = Results()
        results.excuse("work", "torch", Skipped("has no such thing"))
        assert (results.notes, results.failed) == ({("work", "torch"): "has no such thing"}, set())
        results.excuse("work", "remora", RuntimeError("broken"))
        assert results.failed == {"remora"}
