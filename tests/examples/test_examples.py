"""The examples learn what they say, save their curve, end their workers, and say so if they learned nothing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG"

# As many steps as it takes to learn; the examples do more of them.
STEPS = {"parameter_server": 50, "split_rnn": 130, "pipeline": 40, "actor_learner": 20}


def run(script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", STEPS)
def test_it_learns(name: str, tmp_path: Path) -> None:
    done = run(EXAMPLES / f"{name}.py", "--steps", str(STEPS[name]), "--plot", tmp_path / "curve.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("✓")
    assert done.stderr == ""
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_it_says_so_if_it_learned_nothing(tmp_path: Path) -> None:
    done = run(EXAMPLES / "pipeline.py", "--steps", "1", "--plot", tmp_path / "curve.png")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("✗")


def test_an_error_ends_all_workers(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "from group import group\n"
        "if __name__ == '__main__':\n"
        "    with group('a', 'b', 'c'):\n"
        "        raise KeyError('gone wrong')\n"
    )
    done = run(script)  # what is still there afterwards is found by the check after every test
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'gone wrong'")


# What they show.


@pytest.fixture
def progress() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_progress", EXAMPLES / "progress.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))


def test_without_rich_there_are_plain_lines(
    progress: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "rich")
    with progress.progress("training", 100) as show:
        for step in (0, 1, 10, 10, 15, 100):
            show(step, loss=1 / (step + 1))
    assert capsys.readouterr().out.splitlines() == ["training   10/100  loss 0.0909", "training  100/100  loss 0.0099"]


def test_without_matplotlib_a_line_says_so(
    progress: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without(monkeypatch, "matplotlib")
    progress.save_curve(tmp_path / "curve.png", "a", "b", c=[1.0])
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_curve_fits_into_a_line(progress: ModuleType) -> None:
    assert progress.sparkline([]) == ""
    assert progress.sparkline([1.0, 1.0]) == "▁▁"
    assert progress.sparkline([0.0, 3.0, 7.0]) == "▁▄█"
    assert len(progress.sparkline([float(n) for n in range(1000)], width=20)) == 20
