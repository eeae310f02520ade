"""The account of the chaos can fail: everything that must not be is seen in the books."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.fate import Account
from tests.chaos.ledger import Ledger


def complaints(folder: Path, book: str, ended: set[str] | None = None, left: int = 0) -> list[str]:
    (folder / "book-0-0").write_text(book)
    account = Account(1, 1.0, Counter(), Ledger().read(folder), ended or set(), {"worker0": {"calls": left}})
    assert "calls made" in str(account)
    return account.complaints()


def test_what_is_well_is_not_complained_about(tmp_path: Path) -> None:
    book = "asked 0.0.1.1 worker1\nran 0.0.1.1\ngot 0.0.1.1 right\n"
    book += "asked 0.0.1.2 worker1\ngot 0.0.1.2 unsent CallNotSent\n"
    book += "asked 0.0.1.3 worker1\nran 0.0.1.3\ngot 0.0.1.3 lost WorkerLost\n"
    assert complaints(tmp_path, book) == []


def test_a_call_that_ran_twice(tmp_path: Path) -> None:
    assert complaints(tmp_path, "asked 0.0.1.1 w\nran 0.0.1.1\nran 0.0.1.1\ngot 0.0.1.1 right\n") == [
        "ran twice: 0.0.1.1"
    ]


def test_a_call_without_an_outcome_unless_its_caller_was_killed(tmp_path: Path) -> None:
    book = "asked 0.0.1.1 w\nran 0.0.1.1\n"
    assert complaints(tmp_path, book) == ["no outcome: 0.0.1.1"]
    assert complaints(tmp_path, book, ended={"0.0"}) == []
    assert complaints(tmp_path, book, ended={"0.1"}) != []


def test_a_lie_a_wrong_answer_and_a_leak(tmp_path: Path) -> None:
    assert "unsent, and ran" in complaints(tmp_path, "asked 1 w\nran 1\ngot 1 unsent CallNotSent\n")[0]
    assert "did not run" in complaints(tmp_path, "asked 1 w\ngot 1 right\n")[0]
    assert "3 instead of 4" in complaints(tmp_path, "asked 1 w\nran 1\ngot 1 wrong 3 instead of 4\n")[0]
    assert "left over" in complaints(tmp_path, "", left=1)[0]
