"""Waits, in an interpreter that has just started, until torch has been imported, and redirects it then. Imports nothing.

torch imports its own RPC while it is being imported, so there is no earlier moment; and no later one, since the program
goes on right after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def watch() -> None:
    """Redirect torch when its import ends; at once, if torch has been imported."""
    if "torch" in sys.modules:
        _redirect()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Sees every import until torch's."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            return self._redirecting(self._found_by_others(name, path, target))
        if name.startswith("remora.") and not name.startswith("remora.compat") and name not in sys.modules:
            __import__("torch")  # else it would be imported in the middle of a module of ours that the redirection needs
            return _imported_meanwhile(name)
        return None

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find. This finder stays: the program may only ask if torch is installed."""
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)

    def _redirecting(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Return the spec of torch, such that loading it ends with the redirection."""
        if spec is None or spec.loader is None:
            return spec
        loader, load = spec.loader, spec.loader.exec_module

        def load_and_redirect(module: ModuleType) -> None:
            del loader.exec_module  # the loader is itself again
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _redirect()

        loader.exec_module = load_and_redirect  # type: ignore[method-assign]
        return spec


def _imported_meanwhile(name: str) -> ModuleSpec | None:
    """Return the spec of a module that the redirection has imported while it was looked for, such that loading it yields
    that module. importlib would make a second one, whose classes differ from those that other modules have."""
    module = sys.modules.get(name)
    if module is None or module.__spec__ is None or module.__spec__.loader is None:
        return None
    loader = module.__spec__.loader

    def leave_alone(module: ModuleType) -> None:
        del loader.create_module, loader.exec_module  # the loader is itself again

    loader.create_module = lambda spec: module  # type: ignore[method-assign]
    loader.exec_module = leave_alone  # type: ignore[method-assign]
    return module.__spec__


def _redirect() -> None:
    from remora.compat import install

    install()
