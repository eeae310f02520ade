"""A timeline is valid whatever the workers say, and right if they say what is true."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.observer.clocks import Pair, corrections
from remora.observer.model import CallKey, CallStatus, Event, EventKind, Stage
from remora.observer.timeline import Operator, Recording
from remora.observer.trace import chrome_trace, write_trace
from tests.observer.chrome_checker import faults_of, outside_of_their_calls, slices

BEGIN = 1_700_000_000.0


def called(
    caller: str, number: int, callee: str, start: float, end: float, thread: int = 1, parent: CallKey | None = None
) -> Event:
    return Event(
        time=BEGIN + end, kind=EventKind.CALL_ENDED, peer=callee, call=CallKey(caller=caller, id=number), function="f",
        seconds=end - start, thread=thread, parent=parent,
    )  # fmt: skip


def ran(caller: str, number: int, start: float, end: float, thread: int = 7) -> Event:
    return Event(
        time=BEGIN + end, kind=EventKind.RUN_ENDED, peer=caller, call=CallKey(caller=caller, id=number), function="f",
        seconds=end - start, thread=thread,
    )  # fmt: skip


def shifted(recording: Recording, seconds: float) -> Recording:
    """What the worker would have said with its clock ahead by so much."""
    return replace(
        recording, time=recording.time + seconds,
        events=[replace(event, time=event.time + seconds) for event in recording.events],
    )  # fmt: skip


def nested() -> list[Recording]:
    """worker0 calls worker1, which calls worker2 twice."""
    outer = CallKey(caller="worker0", id=1)
    return [
        Recording(name="worker0", rank=0, events=[called("worker0", 1, "worker1", 0.0, 1.0)]),
        Recording(name="worker1", rank=1, events=[
            called("worker1", 1, "worker2", 0.2, 0.4, 7, outer),
            called("worker1", 2, "worker2", 0.5, 0.8, 7, outer),
            ran("worker0", 1, 0.1, 0.9),
        ]),
        Recording(name="worker2", rank=2, events=[ran("worker1", 1, 0.25, 0.35), ran("worker1", 2, 0.55, 0.75)]),
    ]  # fmt: skip


@pytest.mark.parametrize("skew", [(0.0, 0.0), (1.0, 0.0), (0.0, -1.0), (-3600.0, 86400.0), (0.07, -0.07)])
def test_nested_calls_lie_within_each_other_whatever_the_clocks_say(skew: tuple[float, float]) -> None:
    first, second, third = nested()
    trace = chrome_trace([first, shifted(second, skew[0]), shifted(third, skew[1])])
    assert faults_of(trace) == []
    assert outside_of_their_calls(trace) == []
    assert not any("moved" in each["args"] for each in slices(trace, "run").values()), "the clocks were not corrected"
    calls, runs = slices(trace, "call"), slices(trace, "run")
    assert set(calls) == set(runs) == {"worker0#1", "worker1#1", "worker1#2"}
    for key, length in {"worker0#1": 0.8, "worker1#1": 0.1, "worker1#2": 0.2}.items():
        assert (runs[key]["end"] - runs[key]["begin"]) / 1e9 == pytest.approx(length, abs=1e-5)
    assert sum(entry["ph"] == "s" for entry in trace["traceEvents"]) == 6  # there and back, for each call


def test_a_known_offset_is_used_where_no_call_says_better() -> None:
    recordings = [
        Recording(name="worker0", rank=0, events=[called("worker0", 1, "worker9", 0.0, 1.0)]),
        Recording(name="worker1", rank=1, offset=100.0, events=[called("worker1", 1, "worker9", 100.0, 101.0)]),
    ]
    calls = slices(chrome_trace(recordings), "call")
    assert calls["worker0#1"]["begin"] == pytest.approx(calls["worker1#1"]["begin"], abs=1000)


def test_calls_that_overlap_are_asynchronous_and_those_that_a_thread_waits_for_are_not() -> None:
    recording = Recording(name="worker0", rank=0, events=[
        called("worker0", 1, "worker1", 0.0, 0.5), called("worker0", 2, "worker1", 0.1, 0.2),
        called("worker0", 3, "worker1", 0.6, 0.7), called("worker0", 4, "worker1", 0.65, 0.69, thread=2),
    ])  # fmt: skip
    callee = Recording(name="worker1", rank=1, events=[ran("worker0", n, 0.12 + n / 100, 0.13 + n / 100) for n in (1, 2)])
    trace = chrome_trace([recording, callee])
    assert faults_of(trace) == []
    kinds = {key: each["ph"] for key, each in slices(trace, "call").items()}
    assert kinds == {"worker0#1": "b", "worker0#2": "b", "worker0#3": "X", "worker0#4": "X"}


def test_functions_of_one_thread_that_overlap_are_asynchronous() -> None:
    """Coroutines do. The first is a slice of the track, with another one inside; the second reaches beyond it."""
    runs = [ran("worker0", 1, 0.0, 0.5), ran("worker0", 2, 0.1, 0.2), ran("worker0", 3, 0.4, 0.9)]
    calls = [called("worker0", n, "worker1", 0.0, 1.0) for n in (1, 2, 3)]
    caller, callee = Recording(name="worker0", rank=0, events=calls), Recording(name="worker1", rank=1, events=runs)
    trace = chrome_trace([caller, callee])
    assert faults_of(trace) == []
    assert {key: each["ph"] for key, each in slices(trace, "run").items()} == {
        "worker0#1": "X", "worker0#2": "X", "worker0#3": "b",
    }  # fmt: skip


def test_what_is_open_at_the_end_is_closed_and_marked() -> None:
    key = CallKey(caller="worker0", id=1)
    caller = Recording(name="worker0", rank=0, time=BEGIN + 2, calls=[
        CallStatus(key=key, callee="worker1", function="f", kind="PYTHON_CALL", stage=Stage.BEGUN, age=5.0, thread=1)
    ])  # fmt: skip
    callee = Recording(name="worker1", rank=1, events=[
        Event(time=BEGIN + 1, kind=EventKind.RUN_STARTED, peer="worker0", call=key, function="f", thread=7)
    ])  # fmt: skip
    trace = chrome_trace([caller, callee], BEGIN, BEGIN + 3)
    assert faults_of(trace) == []
    call, run = slices(trace, "call")["worker0#1"], slices(trace, "run")["worker0#1"]
    assert call["args"]["end"] == run["args"]["end"] == "still running"
    assert call["args"]["began"] == "before this timeline"
    assert (call["begin"], call["end"], run["end"]) == (0, 3_000_000_000, 3_000_000_000)


def test_a_function_whose_caller_gave_up_may_run_on() -> None:
    key = CallKey(caller="worker0", id=1)
    failed = Event(time=BEGIN + 1, kind=EventKind.CALL_FAILED, peer="worker1", call=key, function="f", seconds=1.0)
    trace = chrome_trace([
        Recording(name="worker0", rank=0, events=[failed]),
        Recording(name="worker1", rank=1, events=[ran("worker0", 1, 0.5, 3.0)]),
    ])  # fmt: skip
    assert faults_of(trace) == []
    assert slices(trace, "run")["worker0#1"]["end"] == 3_000_000_000
    assert slices(trace, "call")["worker0#1"]["args"]["end"] == "failed"
    assert sum(entry["ph"] == "s" for entry in trace["traceEvents"]) == 1  # no answer came back


def test_names_have_no_control_characters_and_an_end() -> None:
    bad = replace(called("worker0", 1, "w\x1b[2J", 0.0, 1.0), function="f\n\x00" + "x" * 10_000)
    trace = chrome_trace([Recording(name="worker0", rank=0, events=[bad], threads={1: "\x07"})])
    assert faults_of(trace) == []
    assert len(json.dumps(trace)) < 5000


def test_operators_of_torch_lie_within_each_other_beside_the_functions() -> None:
    operators = [
        Operator(name="aten::linear", category="cpu_op", track="MainThread (12)", start=BEGIN + 0.1, seconds=0.5),
        Operator(name="aten::mm", category="cpu_op", track="MainThread (12)", start=BEGIN + 0.2, seconds=0.4 + 1e-6),
        Operator(name="gemm", category="kernel", track="GPU 0 stream 7", start=BEGIN + 0.3, seconds=0.9),
    ]
    recording = Recording(name="worker0", rank=0, events=[called("worker0", 1, "x", 0.0, 1.0)], operators=operators)
    trace = chrome_trace([recording])
    assert faults_of(trace) == []
    assert {"aten::linear", "aten::mm", "gemm"} < {entry["name"] for entry in trace["traceEvents"]}


def test_events_that_were_lost_are_counted(tmp_path: Path) -> None:
    trace = chrome_trace([Recording(name="worker0", rank=0, lost=7)])
    assert trace["otherData"]["events lost"] == {"worker0": 7}
    path = tmp_path / "t.json"
    write_trace(str(path), trace)
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]
    assert json.loads(path.read_text()) == trace
    with pytest.raises(TypeError):
        write_trace(str(path), {"traceEvents": object()})
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"], "a draft was left"
    assert json.loads(path.read_text()) == trace


def test_clocks_that_contradict_themselves_are_corrected_as_well_as_can_be() -> None:
    drifting = [Pair("a", "b", -1.0, -0.999), Pair("a", "b", -1.0021, -1.001)]
    corrected = corrections({"a": 0.0, "b": 0.0}, drifting)
    assert corrected["b"] - corrected["a"] == pytest.approx(1.0, abs=0.005)
    ahead = corrections(dict.fromkeys("abcd", 0.0), [Pair("a", "b", -1.1, -0.9), Pair("a", "c", -0.1, 0.1)])
    assert ahead == pytest.approx({"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0}, abs=0.11), "most clocks are believed"
    around = [Pair("a", "b", 1.0, 2.0), Pair("b", "c", 1.0, 2.0), Pair("c", "a", 1.0, 2.0)]
    assert set(corrections(dict.fromkeys("abc", 0.0), around)) == set("abc")


# Any events.

NAMES = ("worker0", "worker1", "worker2")
keys = st.builds(CallKey, caller=st.sampled_from(NAMES), id=st.integers(0, 4))
times = st.one_of(
    st.integers(0, 8).map(lambda n: BEGIN + n / 2), st.floats(BEGIN, BEGIN + 10), st.floats()
)  # fmt: skip
lengths = st.one_of(st.none(), st.floats(0, 5), st.integers(0, 8).map(lambda n: n / 2), st.floats())
events = st.builds(
    Event, time=times, kind=st.sampled_from(EventKind), peer=st.sampled_from(NAMES), call=st.one_of(st.none(), keys),
    function=st.sampled_from(["f", "g", "\x1b", ""]), seconds=lengths, thread=st.one_of(st.none(), st.integers(0, 2)),
    parent=st.one_of(st.none(), keys),
)  # fmt: skip
statuses = st.builds(
    CallStatus, key=keys, callee=st.sampled_from(NAMES), function=st.just("f"), kind=st.just(""),
    stage=st.sampled_from(Stage), age=st.floats(), thread=st.one_of(st.none(), st.integers(0, 2)),
)  # fmt: skip
operators = st.builds(
    Operator, name=st.text(max_size=3), category=st.just("cpu_op"), track=st.sampled_from(["cpu 1", "cpu 2"]), start=times,
    seconds=st.floats(),
)  # fmt: skip
skews = st.one_of(st.just(0.0), st.floats(-10, 10), st.floats(-1e9, 1e9))


@st.composite
def groups(draw: Any) -> list[Recording]:
    return [
        Recording(
            name=name, rank=rank, events=draw(st.lists(events, max_size=12)), calls=draw(st.lists(statuses, max_size=3)),
            time=draw(times), offset=draw(skews), operators=draw(st.lists(operators, max_size=4)),
        )
        for rank, name in enumerate(NAMES)
    ]  # fmt: skip


@given(groups(), st.one_of(st.none(), st.floats(BEGIN, BEGIN + 5)), st.one_of(st.none(), st.floats(BEGIN + 5, BEGIN + 9)))
@settings(max_examples=120)
def test_whatever_the_events_the_timeline_is_valid(
    recordings: list[Recording], begin: float | None, end: float | None
) -> None:
    trace = chrome_trace(recordings, begin, end)
    assert faults_of(trace) == []
    assert outside_of_their_calls(trace) == []
    json.dumps(trace, allow_nan=False)


@given(st.integers(0, 2**32), st.lists(st.floats(-100, 100), min_size=3, max_size=3))
@settings(max_examples=60)
def test_whatever_the_skew_true_events_are_put_right_by_the_clocks_alone(seed: int, offsets: list[float]) -> None:
    """Calls as they really are, seen by clocks that are wrong, and no round trip measured: no slice has to be moved."""
    import random

    chance = random.Random(seed)
    told: dict[str, list[Event]] = {name: [] for name in NAMES}
    at = 0.0
    for number in range(12):
        caller, callee = chance.sample(NAMES, 2)
        start = at + chance.random() * 1e-3
        run = start + 1e-4 + chance.random() * 1e-3
        done = run + chance.random() * 1e-3
        at = done + 1e-4
        told[caller].append(called(caller, number, callee, start, at))
        told[callee].append(ran(caller, number, run, done))
    recordings = [Recording(name=name, rank=rank, events=told[name]) for rank, name in enumerate(NAMES)]
    trace = chrome_trace([shifted(each, offset) for each, offset in zip(recordings, offsets, strict=True)])
    assert faults_of(trace) == []
    assert outside_of_their_calls(trace) == []
    assert not [each["args"] for each in slices(trace, "run").values() if "moved" in each["args"]]
