"""Whole programs: a clean end prints nothing and exits with 0, Ctrl-C ends a worker wherever it waits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.programs import PROGRAMS

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.timeout(320)


@dataclass
class Ended:
    """How one of the two processes of a program ended."""

    code: int | None  # none if it had to be killed: it waited for what does not end
    out: str
    err: str


Outcomes = dict[str, tuple[Ended, Ended]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """All programs are run once, one after the other, by one process: importing torch is what takes long."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-W", "default", "-m", "tests.processes.programs", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    found = json.loads((folder / "outcomes.json").read_text())

    def ended(name: str, rank: int) -> Ended:
        out, err = ((folder / name / f"{stream}{rank}").read_text() for stream in ("out", "err"))
        return Ended(found[name][rank], out, err)

    return {name: (ended(name, 0), ended(name, 1)) for name in PROGRAMS}


@pytest.mark.parametrize(
    "name", ["leave_gracefully", "leave_at_exit", "leave_at_once", "serve_at_exit", "use_coroutines"]
)
def test_a_clean_end_prints_nothing(outcomes: Outcomes, name: str) -> None:
    for ended in outcomes[name]:
        assert (ended.code, ended.out, ended.err) == (0, "done\n", "")


def test_a_program_that_forgets_to_leave_still_ends(outcomes: Outcomes) -> None:
    for ended in outcomes["forget_to_leave"]:
        assert (ended.code, ended.out) == (0, "done\n")
        assert "Traceback" not in ended.err
        assert "Fatal" not in ended.err


def test_a_function_that_still_runs_does_not_hold_up_the_end(outcomes: Outcomes) -> None:
    for ended in outcomes["leave_a_call_unanswered"]:
        assert (ended.code, ended.out) == (0, "done\n")
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "name",
    [
        "interrupted_in_rpc_sync",
        "interrupted_in_wait",
        "interrupted_in_then",
        "interrupted_in_shutdown",
        "interrupted_in_init_rpc",
    ],
)
def test_ctrl_c_ends_a_worker_wherever_it_waits(outcomes: Outcomes, name: str) -> None:
    first, _ = outcomes[name]
    assert first.code in (130, -2), first.err
    assert "done" not in first.out
    said = [line for line in first.err.splitlines() if "ResourceWarning" not in line]  # it was torn away from its work
    assert said[-1] == "KeyboardInterrupt", first.err
    for noise in ("Fatal Python error", "Exception ignored", "Current thread", "terminate called"):
        assert noise not in first.err


@pytest.mark.parametrize("name", ["interrupted_in_rpc_sync", "interrupted_in_wait", "interrupted_in_then"])
def test_the_others_are_told_who_ended(outcomes: Outcomes, name: str) -> None:
    _, second = outcomes[name]
    assert second.code == 0, second.err
    assert "WorkerLost" in second.out
    assert "worker0" in second.out


def test_a_caller_of_an_interrupted_worker_gets_an_error(outcomes: Outcomes) -> None:
    _, second = outcomes["interrupted_in_shutdown"]
    assert second.code == 0, second.err
    assert "worker0" in second.out


def test_after_ctrl_c_a_program_can_still_use_its_worker(outcomes: Outcomes) -> None:
    first, second = outcomes["interrupted_with_care"]
    assert (first.code, first.err) == (0, "")
    assert second.code == 0
