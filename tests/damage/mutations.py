"""What can happen to bytes. A mutation is three plain values, so that it can be drawn, printed, stored and done again."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LIMITS = (
    0, 1, 2, 7, 8, 47, 48, 49, 255, 256, 4095, 4096, 4097, 2**15, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**24 + 1, 2**27,
    2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40, 2**47, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1,
)  # fmt: skip
SIGNED = (*LIMITS, -1, -2, -8, -(2**31), -(2**31) - 1, -(2**32), -(2**63), -(2**63) - 1)
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Mutation:
    """`kind` says what happens, `at` where (taken modulo what there is), `value` what else has to be known."""

    kind: str
    at: int = 0
    value: int = 0

    def __call__(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """The bytes after it. `others`: what else was captured, for those that mix."""
        return KINDS[self.kind](data, self.at, self.value, others)


def apply(mutations: Sequence[Mutation], data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """All of them, one after the other."""
    for mutation in mutations:
        data = mutation(data, others)
    return data


def draw(chance: random.Random, kinds: Sequence[str] = (), most: int = 3) -> tuple[Mutation, ...]:
    """A few at random; one more often than two."""
    names = kinds or tuple(KINDS)
    n = min(1 + int(chance.expovariate(1.5)), most)
    return tuple(Mutation(chance.choice(names), chance.getrandbits(24), chance.getrandbits(24)) for _ in range(n))


def _flip(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """One bit."""
    if not data:
        return data
    at %= 8 * len(data)
    return data[: at // 8] + bytes((data[at // 8] ^ 1 << at % 8,)) + data[at // 8 + 1 :]


def _byte(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at %= len(data)
    return data[:at] + bytes((value % 256,)) + data[at + 1 :]


def _limit(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """A number somewhere, little endian, at a limit."""
    width = WIDTHS[value % len(WIDTHS)]
    if len(data) < width:
        return data
    at %= len(data) - width + 1
    limit = LIMITS[value // len(WIDTHS) % len(LIMITS)] % (1 << 8 * width)
    return data[:at] + limit.to_bytes(width, "little") + data[at + width :]


def _cut(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """The end is lost."""
    return data[: at % (len(data) + 1)]


def _lose(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """Some bytes in the midst are lost."""
    if not data:
        return data
    at %= len(data)
    return data[:at] + data[at + 1 + value % 64 :]


def _double(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """Some bytes come twice."""
    if not data:
        return data
    at %= len(data)
    end = at + 1 + value % 256
    return data[:end] + data[at:]


def _insert(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    at %= len(data) + 1
    return data[:at] + random.Random(value).randbytes(1 + value % 16) + data[at:]


def _zero(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """A run of zeros: a page that was never written."""
    if not data:
        return data
    at %= len(data)
    run = min(1 + value % 512, len(data) - at)
    return data[:at] + bytes(run) + data[at + run :]


def _swap(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """Two parts change places."""
    if len(data) < 2:
        return data
    one, two = sorted((at % len(data), value % len(data)))
    size = min(1 + value % 32, two - one, len(data) - two)
    if not size:
        return data
    return data[:one] + data[two : two + size] + data[one + size : two] + data[one : one + size] + data[two + size :]


def _splice(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """The beginning of one, the end of another."""
    if not others:
        return data
    other = others[value % len(others)]
    return data[: at % (len(data) + 1)] + other[value % (len(other) + 1) :]


def _replace(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """Another one in its place."""
    return others[value % len(others)] if others else data


# Pickles, by their opcodes.

_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"}
_FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))


def opcodes(data: bytes) -> tuple[list[tuple[str, object, bytes]], bytes]:
    """The opcodes of a pickle without frames (which only say how long what follows is), and what comes behind it."""
    found: list[tuple[str, object, int]] = []
    try:
        found = [(opcode.name, argument, place or 0) for opcode, argument, place in pickletools.genops(data)]
    except Exception:  # it is damaged already
        return [], data
    ends = [place for _, _, place in found[1:]] + [found[-1][2] + 1]
    pieces = [(name, arg, data[at:end]) for (name, arg, at), end in zip(found, ends, strict=True) if name != "FRAME"]
    return pieces, data[ends[-1] :]


def pickled_integer(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


def _joined(pieces: Sequence[tuple[str, object, bytes]], rest: bytes) -> bytes:
    return b"".join(piece for _, _, piece in pieces) + rest


def _integer(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """A number in a pickle at a limit, or next to what it was."""
    pieces, rest = opcodes(data)
    places = [i for i, (name, _, _) in enumerate(pieces) if name in _INTEGERS]
    if not places:
        return data
    i = places[at % len(places)]
    was = pieces[i][1]
    assert isinstance(was, int)
    near = (was + 1, was - 1, was * 2, -was, was * 1024, was << 32, was ^ 1 << value % 40)
    choices = (*SIGNED, *near)
    pieces[i] = ("", None, pickled_integer(choices[value % len(choices)]))
    return _joined(pieces, rest)


def _float(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    pieces, rest = opcodes(data)
    places = [i for i, (name, _, _) in enumerate(pieces) if name == "BINFLOAT"]
    if not places:
        return data
    pieces[places[at % len(places)]] = ("", None, b"G" + struct.pack(">d", _FLOATS[value % len(_FLOATS)]))
    return _joined(pieces, rest)


def _text(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """One text of the pickle in the place of another."""
    pieces, rest = opcodes(data)
    places = [i for i, (_, argument, _) in enumerate(pieces) if isinstance(argument, str)]
    if len(places) < 2:
        return data
    i, j = places[at % len(places)], places[value % len(places)]
    pieces[i] = pieces[j]
    return _joined(pieces, rest)


def _operation(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """An opcode is lost, comes twice, changes places with another or becomes one of another argument."""
    pieces, rest = opcodes(data)
    if len(pieces) < 3:
        return data
    i = 1 + at % (len(pieces) - 2)
    j = 1 + value // 4 % (len(pieces) - 2)
    if value % 4 == 0:
        del pieces[i]
    elif value % 4 == 1:
        pieces.insert(i, pieces[i])
    elif value % 4 == 2:
        pieces[i], pieces[j] = pieces[j], pieces[i]
    else:
        pieces[i] = pieces[j]
    return _joined(pieces, rest)


def _argument(data: bytes, at: int, value: int, others: Sequence[bytes]) -> bytes:
    """A number where something else was, or a text, or nothing."""
    pieces, rest = opcodes(data)
    places = [i for i, (name, argument, _) in enumerate(pieces) if argument is not None and name != "PROTO"]
    if not places:
        return data
    values = (None, True, 3, -1, 2**63, 1.5, "float32", "x" * 300, b"", b"\0" * 64, (), [], {}, (1, 2), {"a": 1})
    pieces[places[at % len(places)]] = ("", None, pickle.dumps(values[value % len(values)], 2)[2:-1])
    return _joined(pieces, rest)


Apply = Callable[[bytes, int, int, Sequence[bytes]], bytes]

PLAIN: dict[str, Apply] = {
    "flip": _flip, "byte": _byte, "limit": _limit, "cut": _cut, "lose": _lose, "double": _double, "insert": _insert,
    "zero": _zero, "swap": _swap, "splice": _splice, "replace": _replace,
}  # fmt: skip
PICKLED: dict[str, Apply] = {
    "integer": _integer, "float": _float, "text": _text, "operation": _operation, "argument": _argument,
}  # fmt: skip
KINDS: dict[str, Apply] = {**PLAIN, **PICKLED}
