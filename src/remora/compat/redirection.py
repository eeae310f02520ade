"""Puts Remora where programs look for torch's RPC, and restores torch's. The log of changes has everything it touches.

Modules are aliases, never copies: `torch.distributed.rpc.api` is the module `remora.rpc.api`. Modules that are not imported
yet are found when a program imports them (`aliases.py`); a module that Remora does not have is an error that says so. Names
that other modules took from torch's modules before are replaced there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import remora.autograd
import remora.rpc
from remora.compat import compiled, replacements
from remora.compat.aliases import Aliases
from remora.compat.changes import Changes
from remora.wire import exceptions


class Pair(NamedTuple):
    """One object of torch, and its counterpart of ours."""

    theirs: Any
    ours: Any


class _Redirection(NamedTuple):
    changes: Changes
    pairs: list[Pair]


_current: _Redirection | None = None


def installed() -> bool:
    """Return True if torch's names are ours."""
    return _current is not None


def install() -> None:
    """Redirect torch's names to ours."""
    global _current
    if _current is not None:
        return
    _refuse_while_running("Remora cannot replace torch.distributed.rpc")
    changes = Changes()
    try:
        pairs = _redirect(changes)
    except BaseException:
        changes.undo()
        raise
    _current = _Redirection(changes, pairs)


def uninstall() -> None:
    """Put torch's names back."""
    global _current
    if _current is None:
        return
    _refuse_while_running("torch.distributed.rpc cannot be restored")
    for name in [name for name in sys.modules if replacements.counterpart(name)]:
        del sys.modules[name]  # an alias; those of torch that were there come back now
    _current.changes.undo()
    pairs = [*_current.pairs, *_loaded_meanwhile()]
    _current = None
    _exchange(Changes(), [Pair(pair.ours, pair.theirs) for pair in pairs], only_in_torch=True)


def _refuse_while_running(what: str) -> None:
    stock = sys.modules.get("torch._C._distributed_rpc") if _current is None else None
    if stock is not None and stock._is_current_rpc_agent_set():
        raise RuntimeError(f"{what}: torch's own RPC was initialized in this process. Call shutdown() first.")
    if remora.rpc._is_current_rpc_agent_set():
        raise RuntimeError(f"{what}: RPC was initialized in this process. Call shutdown() first.")


def _redirect(changes: Changes) -> list[Pair]:
    originals = {name: module for name, module in sys.modules.items() if replacements.counterpart(name)}
    # torch.distributed.nn generated these; they are bound to torch's RPC and reused by name.
    generated = [name for name in sys.modules if name.startswith("_remote_module_")]
    for name in (*originals, *generated):
        changes.remove_module(name)
    compiled_pairs = [Pair(*pair) for pair in compiled.replace(changes)]
    changes.insert_finder(Aliases())
    for name in (*replacements.PACKAGES, *(originals.keys() & replacements.MODULES.keys())):
        # In both places: `from a.b import c` asks sys.modules, `import a.b as m` the attribute of `a`.
        parent, _, leaf = name.rpartition(".")
        changes.put(sys.modules[parent], leaf, importlib.import_module(name))  # through Aliases
    pairs = [*compiled_pairs, *_pairs(originals)]
    _exchange(changes, pairs, keep=list(originals.values()))
    _complete_torch(changes)
    changes.put(exceptions, "speaks_like_torch", True)
    return pairs


def _pairs(originals: dict[str, ModuleType]) -> Iterator[Pair]:
    """Yield torch's modules and what is defined in them, with our counterparts, as far as there are any."""
    for name, theirs in originals.items():
        try:
            ours = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        yield Pair(theirs, ours)
        for attribute, value in list(vars(theirs).items()):
            if _is_defined_in_what_we_replace(value) and hasattr(ours, attribute):
                yield Pair(value, getattr(ours, attribute))


def _is_defined_in_what_we_replace(value: object) -> bool:
    home = getattr(value, "__module__", None)
    is_code = isinstance(value, (type, FunctionType, BuiltinFunctionType))
    return is_code and isinstance(home, str) and replacements.is_replaced(home)


def _exchange(
    changes: Changes, pairs: list[Pair], keep: list[ModuleType] = [], only_in_torch: bool = False  # noqa: B006 (read only)
) -> None:
    """Replace the first of each pair by the second, under whatever name a module holds it."""
    replacements = {id(pair.theirs): pair.ours for pair in pairs}
    kept = {id(module) for module in keep}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or id(module) in kept or name.startswith(("remora", "torch._C")):
            continue
        if only_in_torch and name.partition(".")[0] != "torch":
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replacements:
                changes.put(module, attribute, replacements[id(value)])


def _complete_torch(changes: Changes) -> None:
    """Add the names that torch's modules define only if torch was built with RPC, and use if RPC is there."""
    compiled.provide(changes)
    for module, attributes in compiled.names_torch_takes().items():
        for name, value in attributes.items():
            if module in sys.modules and not hasattr(sys.modules[module], name):
                changes.put(sys.modules[module], name, value)
    for package, (name, module) in replacements.OFFERED.items():
        if package in sys.modules:
            changes.put(sys.modules[package], name, getattr(importlib.import_module(module), name))


def _loaded_meanwhile() -> Iterator[Pair]:
    """Yield classes of ours that packages of torch took when they were imported after the redirection, and torch's."""
    for package, (name, module) in replacements.OFFERED.items():
        if package in sys.modules:
            ours = importlib.import_module(replacements.MODULES[module])
            try:
                theirs = importlib.import_module(module)
            except ImportError:  # a torch built without RPC offers none
                vars(sys.modules[package]).pop(name, None)
                continue
            yield from (Pair(theirs, ours), Pair(getattr(theirs, name), getattr(ours, name)))
