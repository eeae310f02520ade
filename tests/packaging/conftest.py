"""The distributions, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source distribution of this tree, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    wheel, source = done.stdout.split()[-2:]
    return {"wheel": folder / wheel, "source": folder / source}
