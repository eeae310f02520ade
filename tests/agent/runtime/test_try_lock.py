"""Locks that no thread waits for unless it says so: what a strike leaves behind."""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import FrameType
from typing import Any

import pytest

from remora.agent.runtime.try_lock import TryLock, Waiters
from tests.systematic.tracing import SIGNALS, AtMoment, moments_of, raising


class Struck(BaseException):
    """What the signal handler of a program raises."""


class StruckAfterAppend(deque[Any]):
    def append(self, item: Any) -> None:
        super().append(item)
        raise Struck


def test_a_thread_that_is_struck_before_it_sleeps_is_not_told_for_ever() -> None:
    waiters = Waiters()
    waiters.asleep = StruckAfterAppend()
    with pytest.raises(Struck):
        waiters.wait(lambda: False, 20.0)
    assert not waiters.asleep


def test_a_thread_that_is_struck_on_its_way_to_a_turn_does_not_keep_it() -> None:
    def section(turn: TryLock) -> None:
        if turn.take():
            try:
                assert turn.mine()
            finally:
                turn.free[0] = True

    free = TryLock()
    moments = moments_of(lambda: section(free), SIGNALS)
    assert len(moments) >= 2  # at the start of `take`, and after it learnt the thread's id
    for number in range(len(moments)):
        turn = TryLock()
        with pytest.raises(Struck), AtMoment(number, raising(Struck), SIGNALS):
            section(turn)
        assert turn.take(), moments[number]


def test_one_of_many_threads_gets_a_turn() -> None:
    """Though each of them is traced, and the interpreter may switch threads between any two of its instructions."""
    turn, inside, most, entries = TryLock(), 0, 0, 0

    def tracer(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace = tracer  # first: see `tests.systematic.tracing`
        frame.f_trace_opcodes = True
        return tracer

    def work() -> None:
        nonlocal inside, most, entries
        sys._getframe().f_trace_opcodes = True
        sys.settrace(tracer)
        for _ in range(300):
            if turn.take():
                try:
                    inside += 1
                    most = max(most, inside)
                    entries += 1
                    inside -= 1
                finally:
                    turn.free[0] = True
        sys.settrace(None)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (inside, most, turn.locked()) == (0, 1, False)
    assert entries > 0
