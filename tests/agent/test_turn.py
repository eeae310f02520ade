"""Locks that no thread waits for unless it says so: what a strike leaves behind."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from remora.agent.turn import Waiters


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
