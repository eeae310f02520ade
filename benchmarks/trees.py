"""Another revision of Remora beside the working tree: its `src` in a temporary folder, for as long as it is measured.

The folder is filled by `git archive`. Nothing is entered in the repository, so nothing stays behind in it however the run
ends.
"""

from __future__ import annotations

import compileall
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NoSuchTree(Exception):
    """The revision cannot be had, for the reason given."""


def commit_of(revision: str, repository: Path = ROOT) -> str:
    """The full hash of the commit that `revision` names."""
    # "--end-of-options" keeps a revision that begins with a dash from being read as an option.
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        reason = found.stderr.decode().strip() or "git knows no commit of that name"
        raise NoSuchTree(f"--against {revision}: {reason}")
    return found.stdout.decode().strip()


@contextmanager
def checked_out(revision: str, repository: Path = ROOT) -> Iterator[Path]:
    """The folder with the packages of that revision; it is gone afterwards."""
    archive = _git(repository, "archive", "--format=tar", commit_of(revision, repository), "--", "src")
    if archive.returncode:
        raise NoSuchTree(f"--against {revision}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="remora-against-") as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as packed:
            packed.extractall(folder, filter="data")
        packages = Path(folder, "src")
        if not Path(packages, "remora", "__init__.py").exists():
            raise NoSuchTree(f"--against {revision}: there is no src/remora in it")
        compile_all(packages)
        yield packages


def compile_all(packages: Path) -> None:
    """To bytecode, ahead of time: the first import must not cost one tree more than the other."""
    compileall.compile_dir(packages, quiet=2)


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, check=False)
    except OSError as error:
        raise NoSuchTree(f"git cannot be run: {error}") from error
