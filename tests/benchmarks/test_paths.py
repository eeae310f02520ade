"""What a fast path is worth: one side has it, the other does not, and nothing else differs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks.__main__ as command_line
from benchmarks import observed, paths, report
from benchmarks.against import Comparison
from benchmarks.measure import Benchmark, Reading, Setting, Unit


def test_one_side_is_without_it(tmp_path: Path) -> None:
    """On the callee, too; and the table tells which is which."""
    benchmark = Benchmark("cost", "cost of a call", cost)
    said: list[str] = []
    found = Comparison("stencils")
    paths.run("stencils", [benchmark], found, rounds=1, quick=True, say=said.append)
    assert found.notes == {}
    (change,) = found.of("cost")
    assert set(change.rounds[0]) == {(1.0, 2.0)}
    assert said == ["stencils · round 1 of 1 · cost"]
    console = Console(width=120, file=io.StringIO(), record=True)
    report.show_paths([found], [benchmark], console)
    table = console.export_text()
    assert "stencils" in table
    assert "0.500 to 0.500" in table
    report.write_paths([found], tmp_path / "paths.json")
    (written,) = json.loads((tmp_path / "paths.json").read_text())["paths"]
    assert (written["against"], written["changes"][0]["ratio"]) == ("stencils", 0.5)


def cost(setting: Setting) -> list[Reading]:
    """On worker0; the number is found on worker1."""
    return [Reading("cost", setting.rpc.rpc_sync("worker1", cost_here), Unit.SECONDS)]


def cost_here() -> float:
    from remora.options import FAST_PATHS, FastPaths

    assert FAST_PATHS in (FastPaths(), FastPaths(stencils=False))
    return 1.0 if FAST_PATHS.stencils else 2.0


def test_one_side_is_observed() -> None:
    found = Comparison("observer")
    paths.run("observer", [Benchmark("seen", "who answers an observer", seen)], found, rounds=1, quick=True, say=str)
    assert found.notes == {}
    assert set(found.of("seen")[0].rounds[0]) == {(2.0, 0.0)}


def seen(setting: Setting) -> list[Reading]:
    """On worker0."""
    with observed.observer() as answered:
        return [Reading("workers", float(answered), Unit.SECONDS)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "invalid choice: 'nowhere'"),
        (["spin", "--who", "torch"], "of this tree alone"),
        (["--against", "HEAD"], "of this tree alone"),
        (["--only", "callers"], "no benchmark is called 'callers'"),
        (["observer", "recorder"], "name it alone"),
    ],
)
def test_what_does_not_go_with_it(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--paths", *arguments])
    with pytest.raises(SystemExit):
        command_line.main()
    assert reason in capsys.readouterr().err
