"""Run by an interpreter that starts with this folder on its PYTHONPATH. Makes way for the sitecustomize it stands before.

It may be an interpreter that has nothing to do with Remora (another Python, a tool written in Python), so it never fails.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_OFF = ("", "0", "no", "off", "false")
_HERE = os.path.dirname(os.path.abspath(__file__))


def _watch() -> None:
    if sys.flags.ignore_environment or os.environ.get("REMORA_COMPAT", "").strip().lower() in _OFF:
        return
    try:
        from remora.compat import arrival
    except ImportError as error:
        if importlib.util.find_spec("torch") is not None:
            sys.stderr.write(f"REMORA_COMPAT is set, but {sys.executable} runs PyTorch's own RPC: {error}\n")
    else:
        arrival.watch()


def _make_way() -> None:
    """Run the sitecustomize that this one hides, and let it have the name."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_watch()
_make_way()
