"""The JSON form of what observers ask and workers answer: dataclasses to dictionaries and back, checked on the way.

Every class is an object with the names of its fields; a reader ignores fields that it does not know, and refuses another
`version` (`UnknownVersion`). A field that is added has a default, and needs no new version.

A snapshot may have thousands of entries, and is asked for twice a second. So what is to be done for a class is worked out
once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from remora.observer.model import VERSION, UnknownVersion

T = TypeVar("T")
Read = Callable[[Any], Any]

_ATOMS = frozenset((str, int, float, bool, type(None)))


def to_json(value: Any) -> Any:
    """A snapshot as dictionaries, lists, texts and numbers. Empty fields that have a default are left out."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:
        return [to_json(each) for each in value]
    if kind is dict:
        return {str(key): to_json(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(kind):
        return value  # a text that is one of an enumeration
    found = {}
    for name, default in _defaults(kind):
        item = getattr(value, name)
        if item != default or name == "version":
            found[name] = item if type(item) in _ATOMS else to_json(item)
    return found


def from_json(kind: type[T], data: Any) -> T:
    """Read what `to_json` made. ValueError if it is not the form of `kind`; UnknownVersion if it is of another version."""
    try:
        found: T = _reader(typing.cast(typing.Any, kind))(data)
    except _Misfit as misfit:
        raise ValueError(f"{kind.__name__}{''.join(reversed(misfit.place))} {misfit.reason}") from None
    return found


class _Misfit(Exception):
    """Some value has another form than the model says. On its way out it is told where the value is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place: list[str] = []  # the innermost first


@cache
def _defaults(kind: Any) -> tuple[tuple[str, object], ...]:
    """The fields of a class, and what each is if nothing is said of it."""
    return tuple((each.name, _default(each)) for each in dataclasses.fields(kind))


def _default(each: dataclasses.Field[Any]) -> object:
    return each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default


@cache
def _reader(kind: Any) -> Read:
    """What reads a value of a type of the model."""
    if dataclasses.is_dataclass(kind):
        return _object_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # `X | None` is the only union of the model
        read = _reader(arguments[0])
        return lambda data: None if data is None else read(data)
    if origin is tuple:
        return _items_reader(_reader(arguments[0]))
    if origin is dict:
        return _table_reader(arguments[0], _reader(arguments[1]))
    if issubclass(kind, StrEnum):
        return _word_reader(kind)
    return _atom_reader(kind)


def _word_reader(kind: type[StrEnum]) -> Read:
    def read(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError as error:
            raise _Misfit(f"is none of its words: {error}") from None

    return read


def _atom_reader(kind: type) -> Read:
    def read(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int:
            return float(data)
        raise _Misfit(f"is not what it should be: {str(data)[:80]!r}")

    return read


def _items_reader(read_item: Read) -> Read:
    def read(data: Any) -> Any:
        if not isinstance(data, list):
            raise _Misfit(f"is not what it should be: {str(data)[:80]!r}")
        found: list[Any] = []
        try:
            found.extend(map(read_item, data))
        except _Misfit as misfit:
            misfit.place.append(f"[{len(found)}]")
            raise
        return tuple(found)

    return read


def _table_reader(kind: type, read_item: Read) -> Read:
    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _Misfit(f"is not what it should be: {str(data)[:80]!r}")
        found = {}
        for key, item in data.items():
            try:
                known = kind(key)
            except ValueError:
                raise _Misfit(f"has the key {key[:80]!r}, which is none") from None
            try:
                found[known] = read_item(item)
            except _Misfit as misfit:
                misfit.place.append(f"[{key[:80]!r}]")
                raise
        return found

    return read


def _object_reader(kind: Any) -> Read:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    readers: dict[str, Read] = {}  # of the fields; made when the first object is read: a class may have one of its own kind
    versioned = "version" in names

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _Misfit(f"is not an object: {str(data)[:80]!r}")
        if versioned and data.get("version", VERSION) != VERSION:
            raise UnknownVersion(
                f"this snapshot has version {data['version']!r}, and this is a Remora that reads version {VERSION}: use the "
                "version of Remora that made it, or install the same one everywhere"
            )
        if not readers:
            readers.update({name: _reader(hints[name]) for name in names})
        found = {}
        for name, item in data.items():
            if (read_item := readers.get(name)) is not None:
                try:
                    found[name] = read_item(item)
                except _Misfit as misfit:
                    misfit.place.append(f".{name}")
                    raise
        try:
            return kind(**found)
        except TypeError as error:  # a field without default is missing
            raise _Misfit(f"is not complete: {error}") from None

    return read
