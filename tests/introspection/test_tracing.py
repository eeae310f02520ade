"""Traces of one worker: bounded in number, in length and in time."""

from __future__ import annotations

import _thread
import threading
from typing import Any

import pytest

from remora.introspection import tracing
from remora.introspection.tracing import Traces
from remora.introspection.visitors import Later
from remora.recorder import MADE, Recorder
from tests.eventually import eventually

FAILED = 1


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(1000, FAILED)


def ended(recorder: Recorder, number: int = 1) -> None:
    recorder.remember((MADE, "worker1", number, "m", "f", 0.0, 1.0, 2.0, 7, 0, 0, None))


def end(traces: Traces, id: str) -> Any:
    """End a trace, and wait for the answer."""
    answer = traces.end(id)
    while isinstance(answer, Later):
        answer = answer.then()
    return answer


def rows(answer: Any) -> list[list[int]]:
    found: list[list[int]] = answer["rows"]["rows"]
    return found


def make(recorder: Recorder) -> Traces:
    return Traces("worker0", recorder, FAILED, lambda: 0.0)


def test_a_trace_has_what_ends_from_its_beginning_to_its_end(recorder: Recorder) -> None:
    traces = make(recorder)
    ended(recorder, 1)
    traces.begin("a", 60.0)
    ended(recorder, 2)
    recorder.fold()
    ended(recorder, 3)
    answer = end(traces, "a")
    ended(recorder, 4)
    assert [row[2] for row in rows(answer)] == [2, 3]
    assert end(traces, "a") is None
    assert "MainThread" in answer["threads"].values()


def test_traces_do_not_disturb_each_other(recorder: Recorder) -> None:
    traces = make(recorder)
    traces.begin("a", 60.0)
    ended(recorder, 1)
    traces.begin("b", 60.0)
    ended(recorder, 2)
    assert [row[2] for row in rows(end(traces, "a"))] == [1, 2]
    ended(recorder, 3)
    assert [row[2] for row in rows(end(traces, "b"))] == [2, 3]


def test_a_name_is_given_once(recorder: Recorder) -> None:
    """Else an observer could have the recorder hand over what it folds any number of times."""
    traces = make(recorder)
    for _ in range(3):
        traces.begin("a", 60.0)
        with pytest.raises(ValueError, match="'a' is being made already"):
            traces.begin("a", 60.0)
        assert len(recorder._on_fold) == 1
        assert end(traces, "a") is not None
        assert not recorder._on_fold


class SlowProfile:
    """A profile of torch's operators that begins when it is told to end."""

    problem = ""

    def __init__(self, name: str, seconds: float) -> None:
        self.begun, self.ended = False, False
        self.operators: list[object] = []

    def end(self) -> None:
        self.begun = self.ended = True


def test_a_trace_that_is_ended_before_it_has_begun_leaves_nothing_behind(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "OperatorProfile", SlowProfile)
    traces = make(recorder)
    begun = traces.begin("a", 60.0, torch=True)
    assert isinstance(begun, Later)
    assert end(traces, "a") is not None
    with pytest.raises(ValueError, match="ended before it had begun"):
        begun.then()
    assert not recorder._on_fold


def test_a_trace_that_is_too_long_counts_what_it_lost(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_ENDS", 3)
    traces = make(recorder)
    traces.begin("a", 60.0)
    for number in range(10):
        ended(recorder, number)
    answer = end(traces, "a")
    assert [row[2] for row in rows(answer)] == [0, 1, 2]
    assert answer["rows"]["lost"] == 7


def test_an_observer_that_goes_away_leaves_nothing_behind(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(tracing.time, "monotonic", lambda: now)
    traces = make(recorder)
    traces.begin("a", 5.0)
    (trace,) = traces._traces.values()
    ended(recorder)
    recorder.fold()
    now = 106.0
    ended(recorder)
    recorder.fold()
    assert len(trace.ends) == 1, "it went on after its end"
    now = 100.0 + 5.0 + tracing.KEPT + 1.0
    ended(recorder)
    recorder.fold()
    assert trace.ends == []
    traces.begin("b", 1.0)
    assert list(traces._traces) == ["b"]
    traces.close()
    assert recorder._on_fold == ()


def test_a_trace_that_no_observer_takes_is_dropped_in_time(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no other one is begun, and no call ends."""
    now = 100.0
    monkeypatch.setattr(tracing.time, "monotonic", lambda: now)
    traces = make(recorder)
    assert traces.drop_expired() == float("inf")
    traces.begin("a", 5.0)
    assert traces.drop_expired() == 105.0 + tracing.KEPT
    now = 105.1 + tracing.KEPT
    assert traces.drop_expired() == float("inf")
    assert recorder._on_fold == ()


def test_a_trace_takes_no_lock_of_the_threading_module(recorder: Recorder) -> None:
    """A thread that is stuck may hold it, and the thread that answers observers must not be stuck behind that."""
    traces = make(recorder)
    answers: list[Any] = []

    def make_one() -> None:
        traces.begin("a", 60.0)
        answers.append(end(traces, "a"))

    with threading._active_limbo_lock:  # type: ignore[attr-defined]
        _thread.start_new_thread(make_one, ())
        eventually(lambda: answers)
    assert "MainThread" in answers[0]["threads"].values()


def test_nothing_is_recorded_for_a_worker_that_has_ended(recorder: Recorder) -> None:
    traces = make(recorder)
    traces.begin("a", 60.0)
    traces.close()
    ended(recorder)
    recorder.fold()
    assert recorder._on_fold == ()
    assert end(traces, "a") is None
