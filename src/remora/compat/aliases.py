"""Finds our modules under torch's names. The module is the same, not a second one with a state of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from remora.compat import names


class Aliases(MetaPathFinder, Loader):
    """For the modules that are replaced; all others are left to the finders after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = names.counterpart(name)
        if ours is None:
            return None
        if not _exists(ours):
            raise ModuleNotFoundError(f"{name} is PyTorch's, and Remora, which stands in for it, has no {ours}", name=name)
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put ours in the place of the empty one that was made for it; importlib takes what it finds there."""
        ours = names.counterpart(module.__name__)
        assert ours is not None
        sys.modules[module.__name__] = importlib.import_module(ours)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False
