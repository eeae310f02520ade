"""The list of expected failures can neither hide a failure nor outlive its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import expectations, report
from tests.conformance.expectations import Expectations, gist
from tests.conformance.trial import Outcome, Status

LISTED = Expectations(failing={"S.test_hard": "too hard"}, absent={"T": "no T yet"}, needs={"T": "os.no_such_name"})


def outcome(test: str, status: Status, why: str = "") -> Outcome:
    return Outcome(test, status, 1.0, why)


@pytest.mark.parametrize(
    ("test", "status", "met"),
    [
        ("S.test_easy", "passed", True),
        ("S.test_easy", "failed", False),
        ("S.test_easy", "skipped", False),
        ("S.test_hard", "passed", False),
        ("S.test_hard", "failed", True),
        ("S.test_hard", "skipped", True),
    ],
)
def test_what_is_listed_must_fail_and_all_else_must_pass(test: str, status: Status, met: bool) -> None:
    assert LISTED.is_met(outcome(test, status)) is met


def test_a_complaint_says_what_to_do() -> None:
    assert "has to go (too hard)" in LISTED.complaint(outcome("S.test_hard", "passed"))
    assert LISTED.complaint(outcome("S.test_easy", "skipped", "no GPU")) == "S.test_easy was skipped: no GPU"


def test_a_list_that_is_true_has_nothing_stale() -> None:
    assert LISTED.stale(["S", "T"], ["S.test_easy", "S.test_hard"]) == []


def test_names_that_do_not_exist_are_stale() -> None:
    assert LISTED.stale(["S"], ["S.test_easy"]) == ["S.test_hard: no such test", "T: no such suite"]


@pytest.mark.parametrize("name", ["os.path", "os.path.join"])
def test_a_suite_is_absent_only_while_what_it_needs_is(name: str) -> None:
    listed = Expectations({}, {"T": "no T yet"}, {"T": name})
    assert listed.stale(["T"], []) == [f"T: listed as absent, but {name} is there"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[[failing]]\ntests = ["S.test"]', "reason"),
        ('[[failing]]\ntests = ["S.test"]\nreason = " "', "reason"),
        ('[[failing]]\nreason = "hard"', "tests"),
        ('[[failing]]\nreason = "hard"\ntests = ["S.test", "S.test"]', "twice"),
        ('[[absent]]\nreason = "missing"\nsuites = ["S"]', "needs"),
        ('[[gpus]]\ntests = ["S.test"]', "needed"),
    ],
)
def test_entries_that_make_no_sense_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        expectations.load(path)


def test_what_needs_more_gpus_than_there_are_is_as_if_listed(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text('[[gpus]]\nneeded = 2\ntests = ["S.test_two"]\n[[gpus]]\nneeded = 4\ntests = ["S.test_four"]')
    assert expectations.load(path, gpus=2).failing == {"S.test_four": "needs 4 GPUs, and there are 2"}
    assert expectations.load(path, gpus=4).failing == {}
    assert expectations.load(path).failing.keys() == {"S.test_two", "S.test_four"}


def test_the_list_itself_can_be_read() -> None:
    assert expectations.load().failing


def test_the_gist_is_the_first_error_of_a_rank() -> None:
    why = (
        "Traceback (most recent call last):\nRuntimeError: Process 1 exited with error code 10 and exception:\n"
        "  File x, line 3\nremora.errors.OwnerDied: worker3 is gone\n\nValueError: later\n"
    )
    assert gist(why) == "remora.errors.OwnerDied: worker3 is gone"
    assert gist("still running after 60 s") == "still running after 60 s"
    assert gist("") == "no reason given"


def test_the_table_counts_by_suite() -> None:
    outcomes = [outcome("S.test_easy", "passed"), outcome("S.test_hard", "failed"), outcome("S.test_odd", "failed")]
    suite, everything, absent = report.table(outcomes, LISTED, wall=2.0).splitlines()[1:]
    assert suite.split() == ["S", "3", "1", "1", "1", "3.0"]
    assert everything.split()[:6] == ["all", "3", "1", "1", "1", "3.0"]
    assert absent.split() == ["T", "not", "run:", "no", "T", "yet"]
