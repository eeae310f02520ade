"""Decides which functions and classes go by name, and which by value. `pickler` does it.

What the receiver can import goes by name: it runs what it has, with the state of its own modules. Two things do not:

- code of modules that the program gave to `cloudpickle.register_pickle_by_value`;
- code of `__main__`, unless both ends run the same main program. Each worker says in its record what it runs: the hash of
  the file, so that copies of a script on several hosts are the same, and an edited one is not. An interactive program (a
  notebook, a REPL) has no file that says what is in it, and is the same as no other. What goes by value is taken as it is
  at the moment of the call, so a function that was defined anew is the new one.

A class that goes by value is made anew by its receiver, and comes back as what it was: cloudpickle gives it an id. But
cloudpickle also sets its attributes again, each time it arrives. At the receiver that is how changes take effect; where
the class was defined it would put copies in the place of its methods, with globals of their own. So there it is not done.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, NewType, ParamSpec, TypeVar, TypeVarTuple

import cloudpickle  # type: ignore[import-untyped]

CACHED = functools._lru_cache_wrapper
TYPE_NAMES: tuple[Any, ...] = (TypeVar, ParamSpec, TypeVarTuple, NewType)  # pickle knows them by their names alone
MAIN = "main"  # where a worker's record says what it runs
MAIN_NAMES = ("__main__", "__mp_main__")  # the second one: in processes that multiprocessing, or a Supervisor, started
_IN_BOTH = b"_main__"

registered: set[str] = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES  # not a copy: it is looked at for each call

_process = secrets.token_hex(8)
_hash = ""  # of the main file, read when the first worker of this process asks: later it may have been edited
_defined_here: weakref.WeakSet[type] = weakref.WeakSet()  # classes that went out by value, and were not made of what came in
_made_here: weakref.WeakSet[type] = weakref.WeakSet()  # those that were


def identity() -> str:
    """Return the identity of the main program: the same text in each process that runs the same file."""
    global _hash
    _hash = _hash or _hash_of_main()
    return _hash or f"{_process} {os.getpid()}"  # (what was typed in: a fork of it is another program from now on)


def _hash_of_main() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or hasattr(sys, "ps1") or sys.flags.inspect or hasattr(builtins, "__IPYTHON__"):
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:  # it is in an archive, or gone
        return ""


def goes_by_value(module: str | None, shares_main: bool) -> bool:
    """Return True if what is defined in this module goes by value, though it has a name."""
    if module in MAIN_NAMES:
        return not shares_main
    if not registered or module is None:
        return False
    parts = module.split(".")
    return any(".".join(parts[:n]) in registered for n in range(len(parts), 0, -1))


def may_name(body: bytes, shares_main: bool) -> bool:
    """Return True if something in this pickle may go by name that must not: the name of its module would be there. Quick,
    and wrong at times: only False is certain."""
    return (not shares_main and _IN_BOTH in body) or any(name.encode() in body for name in registered)


def has_name(code: FunctionType | type) -> bool:
    """Return True if its module has it, under its name."""
    found: Any = sys.modules.get(code.__module__ or "")
    for part in code.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is code


def reduce_named(pickler: Any, code: FunctionType | type) -> tuple[Any, ...]:
    """Return what cloudpickle would make of a function or a class if it had no name."""
    reduced: tuple[Any, ...] = (
        pickler._dynamic_function_reduce(code)
        if isinstance(code, FunctionType)
        else cloudpickle.cloudpickle._dynamic_class_reduce(code)
    )
    return reduced


def reduce_cached(cached: Any) -> tuple[Any, ...]:
    """Reduce a function under `functools.lru_cache`, which pickle knows by name alone. Its receiver has its own cache."""
    return _cached_again, (cached.__wrapped__, cached.cache_parameters())


def reduce_type_name(obj: Any) -> tuple[Any, ...]:
    """Reduce a TypeVar and the like, which typing pickles by name alone. It comes back as what it was, like a class."""
    kind = type(obj)
    args: tuple[Any, ...] = (obj.__name__,)
    kwargs: dict[str, Any] = {}
    if kind is NewType:
        args += (obj.__supertype__,)
    elif kind is not TypeVarTuple:
        args += getattr(obj, "__constraints__", ())
        kwargs = {"bound": obj.__bound__, "covariant": obj.__covariant__, "contravariant": obj.__contravariant__}
    identity = cloudpickle.cloudpickle._get_or_create_tracker_id(obj)
    return _type_name_again, (kind.__name__, args, kwargs, obj.__module__, identity)


def keep_home(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change what cloudpickle made of a class, such that it is left alone where it was defined. cloudpickle makes a class
    with `__slots__` anew without them; then its instances would have a `__dict__`, and could not come back."""
    if cls not in _made_here:
        _defined_here.add(cls)
    make, args = reduced[:2]
    slotted = "__slots__" in vars(cls) and make is cloudpickle.cloudpickle._make_skeleton_class
    if slotted and NamedTuple not in args[2]:  # (one of its bases; it gives its classes slots itself, and allows no others)
        args = (*args[:3], {**args[3], "__slots__": vars(cls)["__slots__"]}, *args[4:])
    return (make, args, *reduced[2:5], _set_class_state)


# What follows runs on the receiver. Its names are on the wire.


def _cached_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _type_name_again(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, identity: str) -> Any:
    made = next(each for each in TYPE_NAMES if each.__name__ == kind)(*args, **kwargs)
    made.__module__ = module
    return cloudpickle.cloudpickle._lookup_class_or_track(identity, made)


def _set_class_state(cls: type, state: Any) -> type:
    if cls not in _defined_here:
        _made_here.add(cls)
        cloudpickle.cloudpickle._class_setstate(cls, state)
    return cls
