"""A trial says what became of a test, whatever the test does, and leaves nothing of it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.trial import Case, Outcome, run_all

FOREVER = 600.0
DEADLINE = 10.0


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("remora-trial-*")) == []


class Sample(unittest.TestCase):
    """Test cases that misbehave in every way. Not collected: pytest looks for names that begin with test."""

    def passes(self) -> None:
        tell("all is well")

    def fails(self) -> None:
        tell("before the end")
        raise ValueError("no good")

    def skips(self) -> None:
        self.skipTest("not today")

    def crashes(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs_with_a_child(self) -> None:
        self.leaves_a_child()
        time.sleep(FOREVER)

    def leaves_a_child(self) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(FOREVER)
            os._exit(0)
        tell(child)

    def leaves_a_file(self) -> None:
        tempfile.NamedTemporaryFile(delete=False).close()


def tell(text: object) -> None:
    """Like print, past what pytest put in the place of stdout."""
    os.write(1, f"{text}\n".encode())


def case(name: str) -> tuple[str, Case]:
    return name, lambda: Sample(name)


def run(name: str, timeout: float = DEADLINE) -> Outcome:
    (outcome,) = run_all([case(name)], jobs=1, timeout=timeout)
    assert outcome.test == name
    return outcome


def test_one_that_passes() -> None:
    outcome = run("passes")
    assert (outcome.status, outcome.why, outcome.output) == ("passed", "", "all is well\n")


def test_one_that_fails() -> None:
    outcome = run("fails")
    assert outcome.status == "failed"
    assert "ValueError: no good" in outcome.why
    assert outcome.output == "before the end\n"


def test_one_that_is_skipped() -> None:
    outcome = run("skips")
    assert (outcome.status, outcome.why) == ("skipped", "not today")


def test_one_whose_process_dies() -> None:
    outcome = run("crashes")
    assert (outcome.status, outcome.why) == ("failed", "the process that ran the test ended with exit code -9")


def test_one_that_hangs_is_ended_with_its_children() -> None:
    outcome = run("hangs_with_a_child", timeout=0.5)
    assert (outcome.status, outcome.why) == ("failed", "still running after 0.5 s")
    assert_gone(int(outcome.output))


def test_a_child_does_not_outlive_the_trial() -> None:
    outcome = run("leaves_a_child")
    assert outcome.status == "passed"
    assert outcome.seconds < DEADLINE / 2, "nobody waited for the child"
    assert_gone(int(outcome.output))


def test_files_do_not_outlive_the_trial(tmp_path: Path) -> None:
    assert run("leaves_a_file").status == "passed"
    assert list(tmp_path.iterdir()) == []


def test_several_run_at_the_same_time(tmp_path: Path) -> None:
    outcomes = list(run_all([meeting(tmp_path, "a", "b"), meeting(tmp_path, "b", "a")], jobs=2, timeout=DEADLINE))
    assert [outcome.status for outcome in outcomes] == ["passed", "passed"], outcomes


def test_no_more_than_so_many_run_at_the_same_time() -> None:
    hanging = [case("hangs_with_a_child")] * 2
    begin = time.monotonic()
    assert [outcome.status for outcome in run_all(hanging, jobs=1, timeout=0.3)] == ["failed", "failed"]
    assert time.monotonic() - begin >= 0.6


def test_whoever_stops_listening_leaves_nothing_running(tmp_path: Path) -> None:
    outcomes = run_all([case("passes"), waiting_forever(tmp_path)], jobs=2, timeout=FOREVER)
    assert next(outcomes).test == "passes"
    pid = int(wait_for_text(tmp_path / "pid"))
    outcomes.close()  # type: ignore[attr-defined]
    assert_gone(pid)


def meeting(folder: Path, me: str, other: str) -> tuple[str, Case]:
    def meet() -> None:
        (folder / me).write_text("here")
        wait_for_text(folder / other)

    return me, lambda: unittest.FunctionTestCase(meet)


def waiting_forever(folder: Path) -> tuple[str, Case]:
    def wait() -> None:
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(FOREVER)

    return "waits", lambda: unittest.FunctionTestCase(wait)


def wait_for_text(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)
    return path.read_text()


def assert_gone(pid: int) -> None:
    """It was killed before; all that is left is for the kernel, and whoever inherited it, to notice."""
    deadline = time.monotonic() + DEADLINE
    while (state := process_state(pid)) not in ("", "Z"):
        assert time.monotonic() < deadline, f"process {pid} is still there: {state}"
        time.sleep(0.005)


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
