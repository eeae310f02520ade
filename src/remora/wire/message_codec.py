"""Payloads to bodies of frames, and back: the only place that knows how (`remora.vocabulary.messages` says what).

Values of the program are for the pickler. A body that is no payload of its type is a ProtocolError that names the sender
and the type; it is the fault of one message, and costs no other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin

from remora.errors import ProtocolError
from remora.vocabulary.ids import GloballyUniqueId
from remora.vocabulary.messages import MESSAGES, Layout, Message, MessageType
from remora.wire.id_codec import pack_id, pack_ids, unpack_id, unpack_ids
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed
from remora.wire.pickler import pack, unpack

M = TypeVar("M", bound=Message)
Body = bytes | bytearray | memoryview
Check = Callable[[Any], bool]

BEGUN: Final = b"1"
_DELETED, _NEVER_MADE = b"\0", b"\1"
_U64 = struct.calcsize("<Q")


def encode(message: Message, scope: PackScope | None = None) -> Packed:
    """A payload as it is sent. `scope`: for the values of the program in it."""
    if message.layout is Layout.BINARY:
        return Packed(_BINARY[message.type][0](message), [], [], [])
    return pack(to_value(message), scope)


def to_value(message: Message) -> object:
    """Return the value that is pickled for a payload. For answers, which are packed by `Request.reply`."""
    layout, values = message.layout, tuple([getattr(message, name) for name, _ in _FIELDS[message.type]])
    if layout is Layout.NONE or (layout is Layout.FIELDS_OR_NONE and message == type(message)()):
        return None
    return values[0] if layout is Layout.VALUE else values


def from_value(kind: type[M], value: object, sender: str) -> M:
    """The payload, by what was unpickled."""
    layout = kind.layout
    if value is None and layout in (Layout.NONE, Layout.FIELDS_OR_NONE):
        return kind()
    values = (value,) if layout in (Layout.VALUE, Layout.BINARY) else value  # (BINARY: a fetch that is recorded)
    checks = _FIELDS[kind.type]
    if type(values) is not tuple or len(values) != len(checks):
        raise _unreadable(kind, sender, f"{_shown(value)} in the place of {len(checks)} fields")
    for (name, check), each in zip(checks, values, strict=True):
        if not check(each):
            raise _unreadable(kind, sender, f"its {name} is {_shown(each)}")
    return kind(*values)


def decode(kind: type[M], body: Body, sender: str) -> M:
    """The payload, by the body of a frame without tensors and references."""
    if kind.layout is Layout.BINARY:
        try:
            return kind(*_BINARY[kind.type][1](body))
        except (ValueError, ProtocolError) as error:
            raise _unreadable(kind, sender, str(error)) from None
    if kind.layout is Layout.EMPTY:
        if body:
            raise _unreadable(kind, sender, f"it has {len(body)} bytes, and should have none")
        return kind()
    try:
        value = unpack(body)
    except Exception as error:
        if kind.of_program:
            raise
        raise _unreadable(kind, sender, repr(error)) from error
    return from_value(kind, value, sender)


# Bodies of a fixed order.


def write_numbers(numbers: Sequence[int]) -> bytes:
    """GIVE_BACK: a u64 for each number."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def read_numbers(body: Body) -> tuple[int, ...]:
    """Read what `write_numbers` wrote. ValueError if it cannot have."""
    if len(body) % _U64:
        raise ValueError(f"{len(body)} bytes are no list of numbers")
    return struct.unpack(f"<{len(body) // _U64}Q", body)


def write_name(module: str, name: str) -> bytes:
    """FUNCTION: module and name in UTF-8, with a newline between."""
    return f"{module}\n{name}".encode()


def read_name(body: Body) -> tuple[str, str]:
    """Read what `write_name` wrote. What is no UTF-8 names no function: it is for the call that says its number to fail."""
    module, _, name = str(body, "utf-8", "replace").partition("\n")
    return module, name


def _two_ids(body: Body) -> list[GloballyUniqueId]:
    ids = unpack_ids(body)
    if len(ids) != 2:
        raise ValueError(f"{len(body)} bytes are not two ids")
    return ids


def _read_delete(body: Body) -> tuple[bool, tuple[GloballyUniqueId, ...]]:
    """A byte (1: the value will never be made), then ids."""
    how = bytes(body[:1])
    ids = unpack_ids(memoryview(body)[1:])
    if how not in (_DELETED, _NEVER_MADE) or len(ids) % 2:
        raise ValueError(f"it begins with {how!r}, and has {len(ids)} ids")
    return how == _NEVER_MADE, tuple(ids)


def _read_progress(body: Body) -> tuple[bool]:
    if body not in (BEGUN, b""):
        raise ValueError(f"{bytes(body[:8])!r} says neither that a function has begun nor that it has not")
    return (body == BEGUN,)


_BINARY: dict[MessageType, tuple[Callable[[Any], bytes], Callable[[Body], Sequence[Any]]]] = {
    MessageType.PYTHON_RREF_FETCH_CALL: (lambda it: pack_id(it.rref), lambda body: (unpack_id(body),)),
    MessageType.SCRIPT_RREF_FETCH_CALL: (lambda it: pack_id(it.rref), lambda body: (unpack_id(body),)),
    MessageType.RREF_FORK_REQUEST: (lambda it: pack_ids(it.rref, it.fork), _two_ids),
    MessageType.RREF_CHILD_ACCEPT: (lambda it: pack_id(it.fork), lambda body: (unpack_id(body),)),
    MessageType.RREF_USER_DELETE: (
        lambda it: (_NEVER_MADE if it.never_made else _DELETED) + pack_ids(*it.ids),
        _read_delete,
    ),
    MessageType.PROGRESS: (lambda it: BEGUN if it.begun else b"", _read_progress),
    MessageType.FUNCTION: (lambda it: write_name(it.module, it.name), read_name),
    MessageType.GIVE_BACK: (lambda it: write_numbers(it.numbers), lambda body: (read_numbers(body),)),
}


# Fields.


def _check(hint: Any) -> Check:
    """Return True if a value is of a type: as deep as tuples of a fixed length go, not into lists and dicts."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin in (Union, UnionType) or (origin is tuple and args[-1] is not Ellipsis):
        inner = [_check(each) for each in args]
        if origin is not tuple:
            return lambda value: any(check(value) for check in inner)
        return lambda value: (
            type(value) is tuple
            and len(value) == len(inner)
            and all(check(each) for check, each in zip(inner, value, strict=True))
        )
    kinds: Any = (float, int) if hint is float else origin or hint
    return lambda value: isinstance(value, kinds)


def _shown(value: object) -> str:
    """A value of a stranger, for people: its type, and its text if that is short and harmless."""
    simple = isinstance(value, (int, float, str, bytes, NoneType))
    return repr(value)[:60] if simple else f"a {type(value).__name__}"


def _unreadable(kind: type[Message], sender: str, why: str) -> ProtocolError:
    return ProtocolError(f"a {kind.type.name} from {sender} makes no sense: {why}")


# Names, and what tells whether a value may be there.
_FIELDS: dict[MessageType, tuple[tuple[str, Check], ...]] = {
    type: tuple((each.name, _check(each.type)) for each in fields(cast(Any, kind))) for type, kind in MESSAGES.items()
}
