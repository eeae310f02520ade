"""The tool by which something happens at a chosen moment."""

from __future__ import annotations

import threading
from types import FunctionType
from typing import Any

import pytest

from tests.systematic.tracing import (
    LINES,
    SIGNALS,
    SOURCE,
    AtEachPlace,
    AtMoment,
    AtPlace,
    Place,
    moments_of,
    places_of,
    raising,
)

TEXT = """
def work(lock, done):
    with lock:
        done.append(1)
    for i in range(2):
        done.append(i)
    return done
"""


@pytest.fixture
def work() -> FunctionType:
    """A function that passes for one of Remora's."""
    made: dict[str, Any] = {}
    exec(compile(TEXT, SOURCE + "made_up.py", "exec"), made)
    found: FunctionType = made["work"]
    return found


def test_every_line_is_a_moment(work: FunctionType) -> None:
    lines = [place.line for place in moments_of(lambda: work(threading.Lock(), []))]
    assert lines == [3, 4, 3, 5, 6, 5, 6, 5, 7]
    assert places_of(lambda: work(threading.Lock(), []))[0] == Place("made_up.py", 3, "work")


def test_what_is_not_ours_has_no_moments() -> None:
    assert moments_of(lambda: sorted([2, 1], key=lambda x: -x)) == []


@pytest.mark.parametrize("kind", [LINES, SIGNALS])
def test_an_exception_strikes_at_each_moment_once(work: FunctionType, kind: str) -> None:
    n = len(moments_of(lambda: work(threading.Lock(), []), kind))
    assert n > 3
    struck = []
    for i in range(n):
        strike = AtMoment(i, raising(KeyboardInterrupt), kind)
        with pytest.raises(KeyboardInterrupt, match="made_up"), strike:
            work(threading.Lock(), [])
        struck.append(strike.place)
    assert struck == moments_of(lambda: work(threading.Lock(), []), kind)
    with AtMoment(n, raising(KeyboardInterrupt), kind) as strike:
        work(threading.Lock(), [])
    assert strike.place is None


def test_a_signal_never_leaves_a_with_block_without_its_exit(work: FunctionType) -> None:
    for place in places_of(lambda: work(threading.Lock(), []), SIGNALS):
        lock = threading.Lock()
        with pytest.raises(KeyboardInterrupt), AtPlace(place, raising(KeyboardInterrupt), SIGNALS):
            work(lock, [])
        assert not lock.locked()


def test_a_signal_strikes_between_a_call_and_what_follows(work: FunctionType) -> None:
    def outcome(place: Place, turn: int) -> list[int]:
        done: list[int] = []
        with pytest.raises(KeyboardInterrupt), AtPlace(place, raising(KeyboardInterrupt), SIGNALS, turn):
            work(threading.Lock(), done)
        return done

    after_append = [place for place in places_of(lambda: work(threading.Lock(), []), SIGNALS) if place.line == 6]
    assert [outcome(place, 1) for place in after_append] == [[1, 0]]
    assert [outcome(place, 2) for place in after_append] == [[1, 0, 1]]


def test_something_happens_at_each_place_on_every_thread(work: FunctionType) -> None:
    seen: list[tuple[str, int]] = []
    with AtEachPlace(lambda place: seen.append((threading.current_thread().name, place.line)), threads=True):
        thread = threading.Thread(target=work, args=(threading.Lock(), []), name="other")
        thread.start()
        thread.join()
        work(threading.Lock(), [])
    assert seen == [("other", line) for line in (3, 4, 5, 6, 7)]
