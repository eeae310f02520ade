"""The rule that tells a busy worker from a lost one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocol.member_rules import Limits, Verdict, judge

LIMITS = Limits(heartbeat=1.0, suspect_after=3.0, silence=30.0, unreachable=4.0)


@pytest.mark.parametrize(
    ("quiet", "unanswered", "verdict"),
    [
        (0.0, 0.0, Verdict.WELL),
        (1.0, 0.0, Verdict.WELL),
        (1.1, 0.0, Verdict.ASK),
        (3.0, 0.0, Verdict.ASK),
        (3.1, 0.0, Verdict.SUSPECT),  # frozen: its host answers
        (29.0, 0.0, Verdict.SUSPECT),
        (30.1, 0.0, Verdict.DEAD),
        (2.1, 2.1, Verdict.REDIAL),  # neither it nor its host answers
        (2.1, 1.9, Verdict.ASK),
        (0.5, 3.0, Verdict.WELL),  # it speaks: one direction is blocked, and it will notice itself
        (31.0, 31.0, Verdict.DEAD),
    ],
)
def test_what_follows_from_silence(quiet: float, unanswered: float, verdict: Verdict) -> None:
    assert judge(LIMITS, quiet, unanswered) is verdict


@given(quiet=st.floats(0.0, 30.0), unanswered=st.floats(0.0, 100.0))
def test_a_worker_whose_host_answers_is_not_given_up_before_its_limit(quiet: float, unanswered: float) -> None:
    assert judge(LIMITS, quiet, 0.0) in (Verdict.WELL, Verdict.ASK, Verdict.SUSPECT)
    assert judge(LIMITS, quiet, unanswered) is not Verdict.DEAD
