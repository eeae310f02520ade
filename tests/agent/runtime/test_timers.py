"""Timers call at their time, in order, whatever happens to others; and cost nothing when there are none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from remora.agent.runtime.timers import Timers
from tests.eventually import eventually


@pytest.fixture
def timers() -> Iterator[Timers]:
    found = Timers("test")
    found.start()
    yield found
    found.stop()


def test_actions_run_at_their_time_and_in_order(timers: Timers) -> None:
    start = time.monotonic()
    ran: list[tuple[str, float]] = []
    for name, after in (("late", 0.06), ("early", 0.02), ("later", 0.09), ("now", 0.0), ("past", -5.0)):
        timers.at(start + after, lambda name=name: ran.append((name, time.monotonic() - start)))  # type: ignore[misc]
    eventually(lambda: len(ran) == 5)
    assert [name for name, _ in ran[-3:]] == ["early", "late", "later"]
    assert {name for name, _ in ran[:2]} == {"now", "past"}
    assert all(at >= after for (_, at), after in zip(ran[-3:], (0.02, 0.06, 0.09), strict=True)), "never too early"


def test_an_earlier_timer_is_noticed_while_the_thread_sleeps(timers: Timers) -> None:
    called = threading.Event()
    timers.at(time.monotonic() + 60.0, lambda: None)
    time.sleep(0.05)
    timers.at(time.monotonic() + 0.01, called.set)
    assert called.wait(2.0)


def test_timers_of_one_moment_all_run_in_the_order_they_were_set(timers: Timers) -> None:
    when = time.monotonic() + 0.02
    ran: list[int] = []
    for i in range(100):
        timers.at(when, lambda i=i: ran.append(i))  # type: ignore[misc]
    eventually(lambda: len(ran) == 100)
    assert ran == list(range(100))


def test_a_cancelled_timer_does_not_run(timers: Timers) -> None:
    ran: list[str] = []
    when = time.monotonic() + 0.03
    timer = timers.at(when, lambda: ran.append("cancelled"))
    timers.at(when, lambda: ran.append("kept"))
    timer.cancel()
    timer.cancel()
    eventually(lambda: ran)
    assert ran == ["kept"]


def test_an_action_that_fails_harms_no_other(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def fail() -> None:
        raise SystemExit("words")

    timers.at(time.monotonic(), fail)
    timers.at(time.monotonic() + 0.01, called.set)
    assert called.wait(2.0)
    assert "words" in caplog.text


def test_an_action_may_set_and_cancel_timers(timers: Timers) -> None:
    ran: list[int] = []

    def again() -> None:
        ran.append(len(ran))
        if len(ran) < 5:
            timers.at(time.monotonic(), again)

    timers.at(time.monotonic(), again)
    eventually(lambda: ran == [0, 1, 2, 3, 4])


def test_cancelled_timers_do_not_pile_up(timers: Timers) -> None:
    for _ in range(10_000):
        timers.at(time.monotonic() + 3600.0, lambda: None).cancel()
    assert len(timers._heap) < 5_000


def test_nothing_runs_after_the_stop() -> None:
    timers = Timers("test")
    timers.start()
    ran: list[int] = []
    timers.at(time.monotonic() + 0.05, lambda: ran.append(1))
    timers.stop()
    time.sleep(0.1)
    assert ran == []


def test_an_action_may_stop_the_timers() -> None:
    timers = Timers("test")
    timers.start()
    timers.at(time.monotonic(), timers.stop)
    eventually(lambda: not timers._thread.is_alive())
