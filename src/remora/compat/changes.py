"""Logs changes to modules, to sys.modules and to the import system, so that they can be undone. Decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class Changes:
    """Changes in the order in which they were made; `undo` reverts them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def put(self, module: ModuleType, name: str, value: object) -> None:
        """Set an attribute of a module."""
        if name in vars(module):
            self._undo.append(partial(setattr, module, name, vars(module)[name]))
        else:
            self._undo.append(partial(vars(module).pop, name, None))
        setattr(module, name, value)

    def put_module(self, name: str, module: ModuleType) -> None:
        """Make a module known by a name."""
        self.remove_module(name)
        sys.modules[name] = module

    def remove_module(self, name: str) -> None:
        """Remove a module from sys.modules; the next import looks for it."""
        before = sys.modules.pop(name, None)
        if before is None:
            self._undo.append(partial(sys.modules.pop, name, None))
        else:
            self._undo.append(partial(sys.modules.__setitem__, name, before))

    def insert_finder(self, finder: MetaPathFinder) -> None:
        """Make `finder` the first that every import asks."""
        sys.meta_path.insert(0, finder)
        self._undo.append(partial(sys.meta_path.remove, finder))

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
