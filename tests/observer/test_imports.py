"""Nothing that observes from outside imports torch: the command `remora` starts quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import remora.observer

MODULES = [f"remora.observer.{each.stem}" for each in Path(remora.observer.__file__).parent.glob("[a-z]*.py")]


def test_no_module_of_observers_imports_torch() -> None:
    code = f"import sys, {', '.join(sorted(MODULES))}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
    assert "remora.observer.group_observer" in MODULES
