"""Large bytes, bytearrays and texts travel beside the pickle, wherever they are; small ones inside it, as ever."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from remora.wire import raw_memory
from remora.wire.fast_pickle import LARGE_BYTES
from remora.wire.packed import Packed
from remora.wire.pickler import pack, unpack

N = LARGE_BYTES
LARGE = bytes(range(256)) * (N // 256)


@dataclasses.dataclass
class Parcel:
    label: str
    data: Any


def sent(packed: Packed) -> Any:
    return unpack(packed.body, [raw_memory.from_bytes(buffer) for buffer in packed.buffers])


NESTED = {
    "itself": lambda data: data,
    "arguments": lambda data: ("f", (data, 1), {}),
    "list": lambda data: [1, [data]],
    "dict": lambda data: {"a": {"b": data}, "c": 2},
    "object": lambda data: Parcel("x", [data]),
    "deep": lambda data: ((((((data,),),),),),),
    "among many": lambda data: [*range(100), data],
    "beside code": lambda data: (lambda: data, data),
}


def text(data: bytes) -> str:
    return data.decode("ascii", "replace").replace("\ufffd", "~")


@pytest.mark.parametrize("kind", [bytes, bytearray, text])
@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_wherever_it_is_it_goes_beside_the_pickle(nest: Any, kind: Any) -> None:
    value = nest(kind(LARGE))
    packed = pack(value)
    assert len(packed.body) < 2000
    assert [len(buffer) for buffer in packed.buffers] == [N]
    arrived = sent(packed)
    if nest is NESTED["beside code"]:
        code, arrived = arrived
        assert code() is arrived, "what is there twice is one object on arrival, too"
        value = value[1]
    assert arrived == value


def test_bytes_are_not_copied() -> None:
    packed = pack((LARGE, [LARGE]))
    assert [buffer.obj is LARGE for buffer in packed.buffers] == [True]
    first, [second] = sent(packed)
    assert first == LARGE
    assert type(first) is bytes
    assert first is second


def test_a_bytearray_is_a_value_and_stays_free() -> None:
    """The program may change it, and make it longer, before the message has left."""
    for size in (N, raw_memory.SMALLEST + 1):
        data = bytearray(size)
        packed = pack([data])
        data[0] = 1
        data.extend(b"more")
        del data[:]
        assert raw_memory.lasts(packed.buffers[0])
        [arrived] = sent(packed)
        assert arrived == bytearray(size)
        assert type(arrived) is bytearray
        arrived.extend(b"x")


def test_several_beside_tensors_and_arrays() -> None:
    tensor, array, other = torch.arange(100_000), np.arange(100_000), bytearray(b"y" * (N + 5))
    arrived = sent(pack({"a": array, "b": LARGE, "t": tensor, "c": other, "d": b"z" * (N + 1), "s": "s" * 2 * N}))
    assert (arrived["b"], arrived["c"], arrived["d"]) == (LARGE, other, b"z" * (N + 1))
    assert arrived["s"] == "s" * 2 * N
    assert torch.equal(arrived["t"], tensor)
    assert np.array_equal(arrived["a"], array)
    arrived["a"][0] = 7  # (it may be written to, as ever)


@pytest.mark.parametrize("letter", ["x", "é", "€", "😀", "\ud800", "\0"])
def test_a_text_arrives_as_it_was(letter: str) -> None:
    value = letter * N
    packed = pack(("f", (value, {"again": value}), {}))
    assert len(packed.body) < 2000
    assert [len(buffer) for buffer in packed.buffers] == [len(value.encode("utf-8", "surrogatepass"))]
    _, (first, second), _ = sent(packed)
    assert first == value
    assert second["again"] is first
    tensor, arrived = sent(pack((torch.arange(100_000), value)))
    assert (len(tensor), arrived) == (100_000, value)


def test_subclasses_and_what_looks_like_an_announcement() -> None:
    class Name(bytes):
        pass

    header = pickle.BINBYTES8 + N.to_bytes(8, "little")
    value = [header, Name(LARGE), header * 10_000, b"B" + N.to_bytes(4, "little"), LARGE]
    arrived = sent(pack(value))
    assert arrived == value
    assert type(arrived[1]) is Name or type(arrived[1]).__name__ == "Name"


@pytest.mark.parametrize("size", [0, 1, 100, 8192, 1 << 16, N - 1])
def test_small_ones_are_pickled_as_ever(size: int) -> None:
    for value in (b"x" * size, ("f", (b"x" * size, 1), {}), {b"key": b"x" * size}, "x" * size, ("f", ("x" * size,), {})):
        packed = pack(value)
        assert packed.body == pickle.dumps(value, 5)
        assert not packed.buffers
        assert unpack(packed.body) == value
