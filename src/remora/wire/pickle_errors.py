"""Finds the part of a value that cannot be sent, and says what to do instead, after packing has failed. No I/O."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from remora.wire.pack_scope import PackScope
from remora.wire.pickler import pack

_ATTEMPTS = 500  # parts that are tried; what has more is not looked into any further
_FEW = 8  # parts that are tried one by one: of more, halves
_TEXT = 40  # characters of a key
_STEPS = 4  # steps of the way into what is nested too deeply: it goes on like that

_PLAIN = (
    TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError, RecursionError,
    pickle.PickleError, pickle.PicklingError,
)  # fmt: skip

Part = tuple[str, Any]  # what leads to it from the whole, and the part itself
NewScope = Callable[[], PackScope]

_ADVICE: list[tuple[tuple[Any, ...], str]] = [
    ((GeneratorType, AsyncGeneratorType),
     "A generator cannot be sent: send a list of what it yields, or the function that makes it."),
    ((CoroutineType,),
     "A coroutine cannot be sent: send the async function and its arguments, and the callee awaits it."),
    ((torch._C.Future, concurrent.futures.Future, asyncio.Future),
     "A future stays where it was made: send its value, or an RRef."),
    ((io.IOBase,),
     "An open file belongs to its process: send its name, or what is in it."),
    ((_BaseDataLoaderIter,),
     "The iterator of a DataLoader stays in its process, and so do the workers it forked: send batches, or the dataset, and "
     "make the DataLoader where it is used."),
]  # fmt: skip
_OTHERWISE = (
    "It cannot leave its process: make it where it is used, leave it out (`__getstate__`), or keep its container here and "
    "send a reference: rpc.RRef(x)."
)


_TOO_DEEP = (
    "nested too deeply to be pickled: send it in a flat form (a list of its parts), or keep it here and send a reference: "
    "rpc.RRef(x)."
)


def explain(error: BaseException, roots: Sequence[Part], of: str, scope: NewScope) -> None:
    """Add to the text of `error`, which packing these raised, the part of them that is to blame. `of`: the call they belong
    to. `scope` makes the scope that such values are packed with. Never raises."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        return
    try:
        place, culprit = _Search(scope, error).descend(roots)
        is_ours = type(error).__module__ == "remora.errors"  # ours say what to do
        if _too_deep(error):
            text = f"{place}… of {of} is {_TOO_DEEP}"
        else:
            name = type(culprit).__qualname__
            text = f"{place} of {of} is {'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}."
            text += "" if is_ours else f" {_known(culprit) or _OTHERWISE}"
        if type(error) in _PLAIN or is_ours:
            error.args = (f"{error}: {text}",)
        else:  # it may be that more depends on its arguments
            error.add_note(text)
    except Exception:  # of the program's `__reduce__` or `__repr__`, most likely
        pass


def _too_deep(error: Exception) -> bool:
    return isinstance(error, RecursionError) or (type(error) is pickle.PicklingError and "deep recursion" in str(error))


def _known(culprit: object) -> str:
    return next((sentence for kinds, sentence in _ADVICE if isinstance(culprit, kinds)), "")


class _Search:
    """One search for the smallest part that fails in the same way as the whole. (What a part consists of may fail in other
    ways, and not matter.)"""

    def __init__(self, scope: NewScope, error: Exception) -> None:
        self._scope = scope
        self._error = (type(error), str(error))
        self._too_deep = _too_deep(error)
        self._steps = _STEPS if self._too_deep else _ATTEMPTS
        self._attempts = 0
        self._seen: set[int] = set()

    def descend(self, parts: Sequence[Part]) -> Part:
        """Return the innermost of the parts that fail, and the path to it."""
        found = self._first_of(parts)
        if found is None:
            raise LookupError("nothing of it fails when it is packed alone")
        place, culprit = found
        while id(culprit) not in self._seen and not _known(culprit) and len(self._seen) < self._steps:
            self._seen.add(id(culprit))
            try:
                found = self._first_of(list(_parts(culprit)))
            except Exception:  # of the program: it cannot even say what it consists of
                found = None
            if found is None:
                break
            place, culprit = place + found[0], found[1]
        return place, culprit

    def _first_of(self, parts: Sequence[Part]) -> Part | None:
        """Return the first part that fails. If there are many, halves of them are tried."""
        while len(parts) > _FEW:
            half = parts[: len(parts) // 2]
            parts = half if self._fails([part for _, part in half]) else parts[len(half) :]
        for part in parts:
            if self._fails(part[1]):
                return part
        return None

    def _fails(self, value: object) -> bool:
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            return False
        scope = self._scope()
        try:
            pack(value, scope)
        except Exception as error:
            return _too_deep(error) if self._too_deep else (type(error), str(error)) == self._error
        scope.roll_back()  # it was a trial
        return False


def _parts(value: Any) -> Iterator[Part]:
    """Yield the parts of a value, as pickle sees them."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield f"[{_short(key)}]", part
        for key in list(value):
            yield f" (its key {_short(key)})", key
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for number, part in enumerate(value):
            yield f".{names[number]}" if names else f"[{number}]", part
    elif isinstance(value, (set, frozenset)):
        for part in value:
            yield " (one of its elements)", part
    elif isinstance(value, FunctionType):
        yield from _variables(value)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, type):
        for name, part in list(vars(value).items()):
            yield f".{name}", getattr(part, "__func__", part)
    else:
        yield from _attributes(value)
        yield "'s class", type(value)


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"


def _variables(function: FunctionType) -> Iterator[Part]:
    """Yield the variables that a function takes along when it goes by value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"'s variable {name!r}", cell.cell_contents
        except ValueError:
            pass  # it has no value yet
    names = set(function.__code__.co_names)
    for constant in function.__code__.co_consts:  # what functions inside it use
        names.update(getattr(constant, "co_names", ()))
    for name in sorted(names & function.__globals__.keys()):
        yield f"'s variable {name!r}", function.__globals__[name]
    yield "'s defaults", function.__defaults__


def _attributes(value: Any) -> Iterator[Part]:
    """Yield the attributes of an object, or whatever else its `__getstate__` returns."""
    state = value.__getstate__()
    for each in state if isinstance(state, tuple) else (state,):
        if isinstance(each, dict):
            for name, part in each.items():
                yield f".{name}", part
        elif each is not None:
            yield "'s state", each
