"""When a process is started again, and when no more."""

from __future__ import annotations

import pytest

from remora.supervision.policy import RestartPolicy, Restarts


def delays(policy: RestartPolicy, *ends: tuple[int, float]) -> list[float | None]:
    restarts = Restarts(policy)
    return [restarts.after(code, ran_for) for code, ran_for in ends]


def test_never_is_never() -> None:
    assert delays(RestartPolicy("never"), (0, 1.0), (1, 1.0), (-9, 1.0)) == [None] * 3


def test_on_failure_is_not_on_success() -> None:
    assert delays(RestartPolicy("on-failure"), (1, 0.0), (0, 0.0), (-9, 0.0)) == [0.5, None, 1.0]


def test_always_is_also_on_success() -> None:
    assert delays(RestartPolicy("always", delay=1.0), (0, 0.0), (1, 0.0)) == [1.0, 2.0]


def test_delays_grow_up_to_a_limit() -> None:
    policy = RestartPolicy(limit=None, delay=1.0, factor=3.0, longest_delay=20.0)
    assert delays(policy, *[(1, 0.0)] * 5) == [1.0, 3.0, 9.0, 20.0, 20.0]
    assert delays(policy, *[(1, 0.0)] * 3000)[-1] == 20.0


def test_a_crash_loop_ends() -> None:
    assert delays(RestartPolicy(limit=2, delay=1.0), *[(1, 0.0)] * 4) == [1.0, 2.0, None, None]
    assert delays(RestartPolicy(limit=0), (1, 0.0)) == [None]


def test_one_that_ran_for_long_starts_afresh() -> None:
    policy = RestartPolicy(limit=2, delay=1.0, steady_after=60.0)
    assert delays(policy, (1, 0.0), (1, 59.0), (1, 60.0), (1, 0.0), (1, 0.0)) == [1.0, 2.0, 1.0, 2.0, None]


def test_restarts_are_counted() -> None:
    restarts = Restarts(RestartPolicy(limit=2))
    for _ in range(4):
        restarts.after(1, 0.0)
    assert restarts.made == 2
    assert "2 in a row" in repr(restarts)


@pytest.mark.parametrize(
    "wrong",
    [{"when": "sometimes"}, {"limit": -1}, {"delay": -1.0}, {"factor": 0.5}, {"longest_delay": float("inf")}],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RestartPolicy(**wrong)  # type: ignore[arg-type]
