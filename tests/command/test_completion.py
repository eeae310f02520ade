"""Completion: a real bash proposes what the parsers know; fish and zsh read their scripts, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remora.command.verbs import VERBS
from remora.command.verbs.completion_verb import MAKERS

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "remora.bash"
    path.write_text(MAKERS["bash"]())
    return path


def proposed(script: Path, line: str, folder: Path | None = None) -> list[str]:
    """What bash proposes at the end of a line."""
    words = line.split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    text = f"""
        source '{script}'
        COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}
        _remora
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([str(BASH), "-c", text], capture_output=True, text=True, timeout=30, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


pytestmark = pytest.mark.skipif(BASH is None, reason="no bash")


def test_bash_knows_the_command(script: Path) -> None:
    done = subprocess.run(
        [str(BASH), "-c", f"source '{script}'; complete -p remora"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "complete -F _remora remora"


def test_verbs(script: Path) -> None:
    assert proposed(script, "remora ") == [*VERBS, "--help", "--version"]
    assert proposed(script, "remora wh") == ["why"]
    assert proposed(script, "remora --v") == ["--version"]


def test_options_of_a_verb(script: Path) -> None:
    assert proposed(script, "remora calls --o") == ["--older"]
    assert {"--worker", "--function", "--sort", "--limit", "--watch", "--json"} <= set(
        proposed(script, "remora calls --")
    )
    assert "--older" not in proposed(script, "remora ps --")


def test_values_of_an_option(script: Path) -> None:
    assert proposed(script, "remora calls --sort ") == ["age", "left", "bytes", "function"]
    assert proposed(script, "remora calls --sort b") == ["bytes"]
    assert proposed(script, "remora completion ") == ["bash", "fish", "zsh"]


def test_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert proposed(script, "remora run tr", tmp_path) == ["train.py"]
    assert proposed(script, "remora ps --secret-file tr", tmp_path) == ["train.py"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell: str, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(MAKERS[shell]())
    text = path.read_text()
    assert all(name in text for name in VERBS)
    assert "--older" in text or "-l older" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: only its text was looked at")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
