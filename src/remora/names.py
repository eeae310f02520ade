"""Names of things of the program, found without running any of its code: no `repr`, no `__getattr__`, no property."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

Name = tuple[str | None, Any]  # module, and name in it

LONGEST = 200  # characters of a name

_QUALNAME = type.__dict__["__qualname__"].__get__
_MODULE = type.__dict__["__module__"].__get__


class Word:
    """Stands in the place of a function where a call is Remora's own, and has a name as a function has."""

    __slots__ = ("__qualname__",)
    __module__: Any = None

    def __init__(self, name: str) -> None:
        self.__qualname__ = name


@lru_cache(maxsize=1024)
def word(name: str) -> Word:
    """Return the word of that name."""
    return Word(name)


def function_name(target: object) -> str:
    """Return how people call a function, or what is called in its place."""
    if isinstance(target, str):
        return target[:LONGEST]
    if type(target) is Word:
        return str(target.__qualname__)
    if type(target) is MethodType:
        target = target.__func__
    if type(target) in (FunctionType, BuiltinFunctionType):
        return joined(getattr(target, "__module__", None), getattr(target, "__qualname__", "?"))
    return type_name(target if issubclass(type(target), type) else type(target))


def type_name(kind: Any) -> str:
    """Return the name of a class, with its module."""
    return joined(_MODULE(kind), _QUALNAME(kind))


def joined(module: object, name: object) -> str:
    """Return `module.name`; either may be missing, or no text."""
    text = name if isinstance(name, str) else "?"
    text = text.removeprefix("_VariableFunctionsClass.")  # where torch keeps its functions
    if isinstance(module, str) and module:
        return f"{module}.{text}"[:LONGEST]
    return f"torch.{text}"[:LONGEST] if text is not name else text[:LONGEST]


def name_parts(target: Any) -> Name:
    """Return (module, name) of what is called: two texts that are there anyway, as the path of a call has no time for more.
    Of what is no function, the class counts. It may run a `__getattr__` of the program."""
    if type(target) is str:
        return None, target
    try:
        return target.__module__, target.__qualname__
    except Exception:  # of the program
        return None, function_name(target)


_PACKAGE = os.path.dirname(__file__) + os.sep


def is_ours(code: CodeType) -> bool:
    """Return True of code of Remora."""
    return code.co_filename.startswith(_PACKAGE)


def calling_line() -> str:
    """Return "file:line" of the innermost frame of this thread that is not Remora's. Takes a microsecond."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
