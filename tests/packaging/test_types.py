"""Types reach the user of the wheel: mypy reads a program against it, finds what is wrong and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.fixture(scope="module")
def python(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and besides it what is installed here, this tree excepted."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        wheel.extractall(packages)
    (packages / "more.pth").write_text(sysconfig.get_path("purelib") + "\n")  # (whose own .pth files are not read)
    found = folder / "bin" / "python"
    where = subprocess.run(
        [found, "-c", "import remora; print(remora.__file__)"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert Path(where.stdout.strip()).is_relative_to(packages), where
    return found


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What `make lint` has found out about torch, if it ran: to do so takes mypy most of its time."""
    known = ROOT / ".mypy_cache"
    return Path(shutil.copytree(known, tmp_path / "cache")) if known.is_dir() else tmp_path / "cache"


def findings(text: str) -> set[tuple[int, str]]:
    return {(int(line), code) for line, code in re.findall(r"^program\.py:(\d+): error: .*\[([a-z-]+)\]$", text, re.M)}


def expected(program: str) -> set[tuple[int, str]]:
    marks = (re.search(r"# error: ([a-z-]+)$", line) for line in program.splitlines())
    return {(number, mark[1]) for number, mark in enumerate(marks, 1) if mark is not None}


def test_mypy_checks_a_program_against_the_wheel(python: Path, cache: Path, tmp_path: Path) -> None:
    program = Path(shutil.copy(PROGRAM, tmp_path / "program.py"))
    options = ["--strict", "--config-file=", f"--cache-dir={cache}", f"--python-executable={python}"]
    command = [sys.executable, "-m", "mypy", *options, program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=115)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert findings(done.stdout) == expected(program.read_text()), done.stdout
    assert len(findings(done.stdout)) == done.stdout.count(": error:"), done.stdout
