"""Replaces the names of torch's compiled RPC modules, and the names that torch's Python takes from them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn, get_origin

import torch

import remora.rpc
from remora.compat import replacements
from remora.compat.changes import Changes


def replace(changes: Changes) -> Iterator[tuple[Any, Any]]:
    """Replace the names of the compiled modules, in place: others may hold the module. Yields (torch's, ours).

    A name that has no counterpart raises when it is used: it must not reach torch's own agent.
    """
    for name in replacements.COMPILED.keys() & sys.modules.keys():
        module = sys.modules[name]
        for attribute, theirs in list(vars(module).items()):
            if not attribute.startswith("__"):
                ours = _find(f"{name}.{attribute}", theirs)
                changes.put(module, attribute, ours)
                if callable(theirs):
                    yield theirs, ours


def provide(changes: Changes) -> None:
    """Make the modules that this torch was built without, with all the names that Remora has."""
    for sign, name in replacements.SIGNS_OF_RPC.items():
        if not hasattr(torch._C, sign):
            module = ModuleType(name, "Remora's names in the place of a module that this torch was built without.")
            for home in reversed(replacements.COMPILED[name]):
                vars(module).update(_contents(home))
            changes.put_module(name, module)
            changes.put(torch._C, name.rpartition(".")[2], module)
            changes.put(torch._C, sign, lambda: True)


def _contents(module: str) -> dict[str, object]:
    try:
        found = vars(importlib.import_module(module))
    except ModuleNotFoundError:
        return {}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _find(dotted: str, theirs: object) -> Any:
    try:
        return replacements.find(dotted)
    except LookupError:
        return _stub(dotted) if callable(theirs) else theirs


def _stub(dotted: str) -> Callable[..., NoReturn]:
    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{dotted} belongs to torch's own RPC; Remora, which replaces it, has no such name")

    absent.__name__ = dotted.rpartition(".")[2]
    return absent


def names_torch_takes() -> dict[str, dict[str, object]]:
    """Return the names that modules of torch define only if torch was built with RPC: module -> name -> ours."""
    rref = remora.rpc.RRef
    is_rref = {"RRef": rref, "is_rref": _is_rref}
    return {
        "torch._jit_internal": {**is_rref, "PyRRef": rref},
        "torch.jit.annotations": {**is_rref, "RRefType": getattr(torch._C, "RRefType", None)},
        "torch.nn.parallel.distributed": {"RPC_AVAILABLE": True, "RRef": rref},
    }


def _is_rref(annotation: object) -> bool:
    """Return True if a type is RRef[...]."""
    if annotation is remora.rpc.RRef:
        raise RuntimeError("the annotation RRef needs the type of its value, as in RRef[int]")
    return get_origin(annotation) is remora.rpc.RRef
