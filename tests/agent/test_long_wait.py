"""What still waits says so: after 10 s, and then after twice the time, by whatever clock it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from remora.clock import NEVER
from remora.long_wait import LongWait, listed

T = TypeVar("T")


class FakeClock:
    """Time passes when a thread waits for it, and only then."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.ready_at = NEVER  # when what is waited for comes

    def now(self) -> float:
        return self.time

    def soon(self, seconds: float) -> float:
        return self.time + seconds

    def block(self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None) -> T:
        self.time = min(deadline, self.ready_at)
        return wait(0.0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_reports_come_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    wait = LongWait(lambda: "init_rpc: still waiting for rank 2 of 3", clock)
    for second in range(1, 100):
        clock.time = 1000.0 + second
        wait.look()
    assert said(caplog) == [f"init_rpc: still waiting for rank 2 of 3, {n} s" for n in (10, 20, 40, 80)]


def test_a_look_that_comes_late_reports_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    wait = LongWait(lambda: "it", clock)
    clock.time += 50
    wait.look()
    wait.look()
    assert said(caplog) == ["it, 50 s"]
    clock.time += 29
    wait.look()
    assert len(said(caplog)) == 1
    clock.time += 1
    wait.look()
    assert said(caplog)[1:] == ["it, 80 s"]


def test_nothing_is_described_that_does_not_take_long(caplog: pytest.LogCaptureFixture) -> None:
    def describe() -> str:
        raise AssertionError("described too early")

    clock = FakeClock()
    clock.ready_at = 1009.0
    assert LongWait(describe, clock).block(lambda _: clock.time >= 1009.0, NEVER)
    assert said(caplog) == []


def test_a_thread_that_blocks_reports_meanwhile_and_is_back_when_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    clock.ready_at = 1045.0
    assert LongWait(lambda: "it", clock).block(lambda _: clock.time >= 1045.0, NEVER)
    assert clock.time == 1045.0
    assert said(caplog) == ["it, 10 s", "it, 20 s", "it, 40 s"]


def test_a_deadline_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    assert not LongWait(lambda: "it", clock).block(lambda _: False, 1025.0)
    assert clock.time == 1025.0
    assert said(caplog) == ["it, 10 s", "it, 20 s"]


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(n) for n in range(10)], 3) == "0, 1, 2 and 7 more"
