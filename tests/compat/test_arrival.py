"""The moment of the redirection: when torch is imported, whatever came before. A stand-in for torch saves the time."""

from __future__ import annotations

from pathlib import Path

from tests.compat.fresh import run

WATCH = """
import sys
import remora.compat
from remora.compat import arrival

done = []
remora.compat.install = lambda: done.append(redirect())
arrival.watch()
"""


def test_who_asks_whether_torch_is_there_and_imports_it_later_is_redirected(tmp_path: Path) -> None:
    """Many libraries ask so before they import it. And an import that failed may be tried again."""
    (tmp_path / "torch.py").write_text("import sys\nif not hasattr(sys, 'mended'): raise ImportError('not yet')")
    asked = """
import importlib.util
redirect = lambda: None
assert importlib.util.find_spec("torch").origin.endswith("torch.py")
try:
    import torch
except ImportError as error:
    assert str(error) == "not yet"
assert not done
sys.mended = True
before = list(sys.meta_path)
import torch
assert done == [None]
assert len(sys.meta_path) == len(before) - 1
"""
    run(WATCH + asked, tmp_path)


def test_a_module_of_ours_that_is_imported_before_torch_is_not_there_twice(tmp_path: Path) -> None:
    """It is imported by the redirection while it is looked for: errors of a second one would be caught by nobody."""
    (tmp_path / "torch.py").write_text("")
    imports_ours_first = """
import importlib.util
def redirect():
    import remora.errors
    return remora.errors.RemoraError
if sys.argv[1:]:
    assert importlib.util.find_spec("remora.errors") is not None
from remora.errors import RemoraError
import remora.errors
assert done == [RemoraError]
assert remora.errors is sys.modules["remora.errors"]
assert remora.errors.RemoraError is RemoraError
importlib.reload(remora.errors)
assert remora.errors.RemoraError is not RemoraError  # which does make another one
"""
    run(WATCH + imports_ours_first, tmp_path)
    run(WATCH + "sys.argv.append('asked')" + imports_ours_first, tmp_path)
