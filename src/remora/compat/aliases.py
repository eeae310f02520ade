"""Finds our modules under torch's names. The module is the same, not a second one with a state of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from remora.compat import replacements


class Aliases(MetaPathFinder, Loader):
    """Finds the modules that are replaced; leaves all others to the finders after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = replacements.counterpart(name)
        if ours is None:
            return None
        if not _exists(ours):
            raise ModuleNotFoundError(f"{name} is PyTorch's, and Remora, which replaces it, has no {ours}", name=name)
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that importlib made by ours; importlib takes what it finds in sys.modules."""
        ours = replacements.counterpart(module.__name__)
        assert ours is not None
        sys.modules[module.__name__] = importlib.import_module(ours)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False
