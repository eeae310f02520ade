"""Traces of real groups: three processes whose calls nest, one with a clock that is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.command.main import main
from remora.errors import ObserverError
from remora.observer.group_observer import GroupObserver, groups
from remora.observer.group_trace import GroupTrace
from remora.testing.processes import Processes
from tests.eventually import eventually
from tests.observe import programs
from tests.observer.chrome_checker import faults_of, outside_of_their_calls, slices


@pytest.fixture(scope="module")
def workers(fork_server: None) -> Iterator[Processes]:
    with Processes(3) as found:
        found.run(1, programs.set_clock_ahead, programs.SKEW)
        yield found


@pytest.fixture
def group(workers: Processes) -> Iterator[GroupObserver]:
    with observer_of(workers) as found:
        yield found


def observer_of(workers: Processes) -> GroupObserver:
    """An observer of these workers, whatever others run on this host."""
    (mine,) = [each for each in groups() if workers.pid(0) in [entry.pid for entry in each.workers]]
    return GroupObserver.find(group=mine.group)


def is_right(trace: dict[str, Any], times: int) -> None:
    """It has so many calls of worker0 to worker1, each with four more to worker2 inside."""
    assert faults_of(trace) == []
    assert outside_of_their_calls(trace) == []
    calls, runs = slices(trace, "call"), slices(trace, "run")
    outer = [key for key in calls if key.startswith("worker0#") and calls[key]["name"].endswith("outer")]
    assert len(outer) == times
    assert set(outer) <= set(runs)
    for key in outer:
        children = [each for each in calls.values() if each["args"].get("parent") == key]
        assert len(children) == 4
        assert all(runs[key]["begin"] <= child["begin"] <= child["end"] <= runs[key]["end"] for child in children)
        assert sorted(child["ph"] for child in children).count("b") >= 3  # those that overlap
        assert all(child["args"]["call"] in runs for child in children)
    assert not [run["args"] for run in runs.values() if "moved" in run["args"]], "the clocks were not corrected"
    arrows = [entry for entry in trace["traceEvents"] if entry["ph"] in "sf"]
    assert len(arrows) >= 2 * 2 * 5 * times  # of each call two, with two ends


def test_a_trace_of_nested_calls_is_right_though_a_clock_is_wrong_by_a_second(
    workers: Processes, group: GroupObserver
) -> None:
    trace = GroupTrace(group, 60.0)
    workers.run(0, programs.call_nested, 5, 0.001)
    timeline = trace.end()
    assert trace.problems == {}
    is_right(timeline, 5)
    clocks = timeline["otherData"]["clock corrections"]
    assert clocks["worker1"] - clocks["worker0"] == pytest.approx(programs.SKEW, abs=0.1)


def test_calls_alone_correct_the_clocks_where_no_round_trip_does(
    workers: Processes, group: GroupObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupObserver, "_measure_clock", lambda self, link: self._clocks.clear())
    trace = GroupTrace(group, 60.0)
    workers.run(0, programs.call_nested, 3, 0.001)
    is_right(trace.end(), 3)


def test_a_call_that_has_not_ended_is_in_the_trace(workers: Processes, group: GroupObserver) -> None:
    trace = GroupTrace(group, 60.0)
    pending = workers.start(0, programs.call_nested, 1, 0.7)
    eventually(lambda: any(call.function.endswith("inner") for call in group.snapshot().workers[2].calls))
    timeline = trace.end()
    pending.result()
    assert faults_of(timeline) == []
    assert outside_of_their_calls(timeline) == []
    still = [each for each in slices(timeline, "call").values() if each["args"].get("end") == "still running"]
    assert {each["name"].rpartition(".")[2] for each in still} == {"outer", "inner"}
    assert {each["args"].get("end") for each in slices(timeline, "run").values()} == {"still running"}


def test_the_verb_writes_the_file(workers: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with observer_of(workers) as found:
        group = found.group
    path = tmp_path / "t.json"
    workers.run(0, programs.keep_calling)
    code = main(["trace", "--group", group, "--seconds", "300ms", "-o", str(path)])
    workers.run(0, programs.stop_calling)
    assert code == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    timeline = json.loads(path.read_text())
    assert faults_of(timeline) == []
    assert outside_of_their_calls(timeline) == []
    assert slices(timeline, "run")


def test_a_short_trace_of_a_slow_group_is_not_empty(
    workers: Processes, group: GroupObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers begin long before the last has answered; they must not have ended by then."""
    ask_all = GroupObserver.ask_all

    def slowly(self: GroupObserver, question: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        answers = ask_all(self, question, timeout, **arguments)
        time.sleep(0.2)
        return answers

    monkeypatch.setattr(GroupObserver, "ask_all", slowly)
    trace = GroupTrace(group, 0.1)
    workers.run(0, programs.call_nested, 1, 0.001)
    assert slices(trace.end(), "run")


def test_a_program_traces_its_group(workers: Processes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    workers.run(0, programs.trace_of_nested_calls, str(path))
    is_right(json.loads(path.read_text()), 5)


def test_a_profile_of_the_group_has_the_operators_of_all_workers(workers: Processes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    workers.run(0, programs.profile_of_nested_calls, str(path))
    timeline = json.loads(path.read_text())
    assert faults_of(timeline) == []
    assert not timeline["otherData"].get("note")
    runs = [each for each in slices(timeline, "run").values() if each["name"].endswith("inner")]
    operators = [entry for entry in timeline["traceEvents"] if entry.get("name") == "aten::mm"]
    assert len(runs) == len(operators) == 2 * 4
    for each in operators:  # on the same clock: each within the function that ran it
        begin = each["ts"] * 1000
        assert any(run["pid"] == each["pid"] and run["begin"] - 2e6 <= begin <= run["end"] + 2e6 for run in runs)


def test_a_trace_is_handed_over_once(group: GroupObserver) -> None:
    assert all(isinstance(each, dict) for each in group.ask_all("trace", 5.0, id="x", seconds=0.0).values())
    assert all(each is not None for each in group.ask_all("traced", 5.0, id="x").values())
    assert all(each is None for each in group.ask_all("traced", 5.0, id="x").values())


@pytest.mark.parametrize("arguments", [{"seconds": "1"}, {"seconds": -1}, {}, {"seconds": True}, {"seconds": None}])
def test_a_trace_of_no_time_is_refused(group: GroupObserver, arguments: dict[str, Any]) -> None:
    assert all(isinstance(each, ObserverError) for each in group.ask_all("trace", 5.0, id="y", **arguments).values())


def test_only_so_many_traces_are_made_at_a_time(group: GroupObserver) -> None:
    begun = [group.ask_all("trace", 5.0, id=f"n{n}", seconds=5.0) for n in range(5)]
    assert [any(isinstance(each, ObserverError) for each in answers.values()) for answers in begun] == [False] * 4 + [True]
    assert "end one" in str(begun[-1]["worker0"])
    for n in range(4):
        assert all(each is not None for each in group.ask_all("traced", 5.0, id=f"n{n}").values())
