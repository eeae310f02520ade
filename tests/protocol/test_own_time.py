"""Silence counts only while we ourselves were running."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remora.protocol.member_rules import LATE_TICK, MAX_GAPS, REGULAR_TICK, OwnTime

DELAYS = st.lists(st.floats(0.0, 20.0), max_size=30)


def ticked(*times: float) -> OwnTime:
    own_time = OwnTime()
    for time in times:
        own_time.tick(time)
    return own_time


def test_without_a_tick_all_time_counts() -> None:
    assert OwnTime().since(3.0, 50.0) == 47.0


def test_what_comes_in_time_counts() -> None:
    assert ticked(0.0, 0.5, 1.2, 2.1).since(0.1, 2.9) == pytest.approx(2.8)


def test_a_stop_of_forty_seconds_does_not() -> None:
    own_time = ticked(0.0, 0.5, 40.5, 41.0)
    assert own_time.since(0.0, 41.0) == pytest.approx(1.5)
    assert own_time.since(0.0, 41.4) == pytest.approx(1.9)


def test_nor_does_it_while_the_tick_is_still_missing() -> None:
    """A thread may run before the one that ticks does."""
    assert ticked(0.0, 0.5).since(0.0, 40.5) == pytest.approx(1.0)


def test_a_time_in_the_midst_of_a_stop() -> None:
    own_time = ticked(0.0, 10.0, 10.5)
    assert own_time.since(9.9, 10.9) == pytest.approx(0.9)


def test_a_host_that_is_always_late_is_slow_and_not_blind() -> None:
    own_time = ticked(*(1.5 * k for k in range(40)))
    assert own_time.since(0.0, 58.5) == pytest.approx(39 * REGULAR_TICK)


def test_gaps_are_forgotten_in_the_end() -> None:
    own_time = ticked(*(2.0 * k for k in range(2 * MAX_GAPS)))
    assert len(own_time._gaps) == MAX_GAPS


def counts(passed: float) -> float:
    """How much of the time between two ticks counts. (A sum of floats may pass a limit that its parts do not.)"""
    return passed if passed <= LATE_TICK else REGULAR_TICK


@example(delays=[1.4622963775302535, 1.7175620724872744], then=0.0, later=1.0)
@given(delays=DELAYS, then=st.floats(0.0, 100.0), later=st.floats(0.0, 5.0))
def test_the_time_that_counts(delays: list[float], then: float, later: float) -> None:
    own_time, now = OwnTime(), 0.0
    own_time.tick(now)
    counted = 0.0  # since the beginning
    for delay in delays:
        before, now = now, now + delay
        own_time.tick(now)
        counted += counts(now - before)
    before, now = now, now + later
    counted += counts(now - before)
    assert own_time.since(0.0, now) == pytest.approx(counted)
    if then <= now:
        found = own_time.since(then, now)
        assert 0.0 <= found <= now - then + 1e-9
        assert found + own_time.since(0.0, now) - own_time.since(then, now) == pytest.approx(counted)
        assert found <= counted + 1e-9
