"""A stream of bytes, cut anywhere, yields the frames that were put into it; one that was damaged says so at once."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import ProtocolError
from remora.wire import frames, raw_memory
from remora.wire.enclosed import Missing, Reason
from remora.wire.frames import (
    ENDS,
    GUARD,
    HEADER,
    HEADER_SIZE,
    MAX_BUFFERS,
    WHOLE,
    Damaged,
    Frame,
    FrameReader,
    lengths,
)
from tests.thorough import THOROUGH

NO_MEMORY = Missing(Reason.NO_MEMORY)


def encode(call: int, body: bytes, buffers: list[bytes]) -> bytes:
    views = [memoryview(buffer) for buffer in buffers]
    if views:
        body += lengths(views)
    return frames.encode(0x102, 1, len(views), call, call + 1, call, 1.5, len(body), body + b"".join(buffers))


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[Frame]:
    """Give the bytes to the reader in pieces of these sizes, again and again."""
    found: list[Frame] = []
    at = turn = 0
    while at < len(data):
        space = reader.room
        assert len(space) > 0
        n = min(len(space), max(1, sizes[turn % len(sizes)]), len(data) - at)
        space[:n] = data[at : at + n]
        found += reader.received(n)
        at += n
        turn += 1
    return found


def contents(frame: Frame) -> tuple[int, bytes, list[bytes]]:
    assert not isinstance(frame.enclosed.buffers, Missing)
    buffers = [bytes(raw_memory.storage_view(buffer)) if buffer.nbytes() else b"" for buffer in frame.enclosed.buffers]
    body = bytes(frame.body)
    return frame.call, body[: len(body) - 8 * len(buffers)], buffers


messages = st.lists(
    st.tuples(
        st.binary(max_size=300) | st.integers(200, 3000).map(lambda n: b"x" * n) | st.just(b"z" * 20_000),
        st.lists(st.binary(max_size=50) | st.integers(100, 50_000).map(lambda n: b"y" * n), max_size=4),
    ),
    max_size=8,
)


@settings(max_examples=200 if THOROUGH else 60, deadline=None)
@given(messages, st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.sampled_from([4200, 8192, 1 << 16]))
def test_frames_survive_any_cutting(plan: list[tuple[bytes, list[bytes]]], sizes: list[int], capacity: int) -> None:
    data = b"".join(encode(i, body, buffers) for i, (body, buffers) in enumerate(plan))
    found = feed(FrameReader(capacity), data, sizes)
    assert [contents(frame) for frame in found] == [(i, body, buffers) for i, (body, buffers) in enumerate(plan)]


def test_the_header_arrives_as_it_was_sent() -> None:
    (frame,) = feed(FrameReader(), encode(7, b"body", []), [1])
    assert (frame.kind, frame.flags, frame.call, frame.number, frame.ack, frame.timeout) == (0x102, 1, 7, 8, 7, 1.5)
    assert frame.size == 4


def test_a_frame_that_does_not_fit_into_memory_is_skipped_and_the_next_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(nbytes: int) -> tuple[torch.UntypedStorage, memoryview]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    reader = FrameReader(1 << 16)
    monkeypatch.setattr(raw_memory, "allocate", refuse)
    large, small = feed(reader, encode(1, b"a", [b"z" * 300_000]) + encode(2, b"b", []), [7000])
    assert large.enclosed.buffers == NO_MEMORY
    assert large.size > 300_000
    assert contents(small) == (2, b"b", [])


@pytest.mark.parametrize("buffers", [[], [b"q" * 10], [b"q" * 90_000, b"r" * 5]])
@pytest.mark.parametrize("piece", [7, 5000, 1 << 20])
def test_a_body_that_does_not_fit_into_memory_is_skipped_with_its_buffers(
    monkeypatch: pytest.MonkeyPatch, buffers: list[bytes], piece: int
) -> None:
    def refuse(length: int = 0) -> bytearray:
        if length:
            raise MemoryError
        return bytearray()

    reader = FrameReader(1 << 13)
    monkeypatch.setattr(frames, "bytearray", refuse, raising=False)
    first, large, last = feed(
        reader, encode(1, b"a", []) + encode(2, b"z" * 30_000, buffers) + encode(3, b"c", [b"d"]), [piece]
    )
    assert contents(first) == (1, b"a", [])
    assert large.call == 2
    assert large.enclosed.buffers == NO_MEMORY
    assert contents(last) == (3, b"c", [b"d"])


def test_a_nonsensical_number_of_buffers_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 buffers"):
        feed(FrameReader(), frames.encode(0x102, 0, 5, 1, 1, 0, 0.0, 8, b"x" * 8), [HEADER_SIZE + 8])


def test_a_body_whose_growth_finds_no_memory_is_skipped_with_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(length: int = 0) -> bytearray:
        if length > 3 << 20:
            raise MemoryError
        return bytearray(length)

    monkeypatch.setattr(frames, "bytearray", refuse, raising=False)
    large, last = feed(FrameReader(), encode(2, b"z" * (9 << 20), [b"q" * 70_000]) + encode(3, b"c", []), [100_000])
    assert (large.call, large.enclosed.buffers, large.size) == (2, NO_MEMORY, (9 << 20) + 8 + 70_000)
    assert contents(last) == (3, b"c", [])


# Damage.

KINDS = {
    "word": encode(1, b"", []),
    "small": encode(1, b"a small body", []),
    "medium": encode(1, b"m" * (WHOLE + 1), []),
    "large": encode(1, b"l" * 300_000, []),
    "tensors": encode(1, b"t", [b"1" * 100, b"2" * 200]),
    "large tensors": encode(1, b"t" * 5000, [b"1" * 100_000, b"", b"2" * 90_000]),
}


def covered(data: bytes) -> list[int]:
    """Which bytes of a frame the checksum covers, and the checksum itself."""
    length, count = HEADER.unpack_from(data)[1] // GUARD, HEADER.unpack_from(data)[4]
    body = range(HEADER_SIZE, HEADER_SIZE + length)
    ends = body if length <= WHOLE else [*body[:ENDS], *body[-max(ENDS, 8 * count) :]]
    return [*range(HEADER_SIZE), *ends]


@pytest.mark.parametrize("kind", KINDS)
def test_each_flipped_bit_of_a_header_is_noticed_before_the_next_frame(kind: str) -> None:
    """Not a single one makes the reader wait for more than it has, or believe anything."""
    data, before, behind = KINDS[kind], encode(7, b"before", []), encode(8, b"behind", [])
    for bit in range(HEADER_SIZE * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged) as caught:
            feed(FrameReader(), before + damaged + behind, [len(before), 1 << 18])
        assert [frame.call for frame in caught.value.frames] == [], "the one before was handed over"


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_of_a_body_are_noticed_where_the_checksum_covers_it(kind: str) -> None:
    data = KINDS[kind]
    places = covered(data)[HEADER_SIZE:]
    for at in [*places[:100], *places[-100:], *places[:: max(len(places) // 100, 1)]]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(Damaged, match="checksum"):
            feed(FrameReader(), bytes(damaged), [1 << 18])


def test_what_came_before_the_damage_in_the_same_bytes_is_handed_over() -> None:
    damaged = bytearray(encode(3, b"c", []))
    damaged[20] ^= 1
    with pytest.raises(Damaged) as caught:
        feed(FrameReader(), encode(1, b"a", []) + encode(2, b"b", [b"x" * 10]) + damaged, [1 << 18])
    assert [frame.call for frame in caught.value.frames] == [1, 2]


LIMITS = [0, 1, WHOLE - 1, WHOLE, WHOLE + 1, (1 << 18) - HEADER_SIZE, (1 << 18) - HEADER_SIZE + 1, 1 << 32, (1 << 40) - 1]


@pytest.mark.parametrize("length", LIMITS)
def test_a_header_that_announces_much_gets_no_memory(length: int) -> None:
    """Of a body, memory is reserved as its bytes come: twice as much as came, and a megabyte."""
    begin = frames.encode(0x102, 0, 0, 1, 1, 0, 0.0, length, bytes(min(length, 1 << 20)))[: HEADER_SIZE + ENDS]
    reader = FrameReader()
    tracemalloc.start()
    try:
        found = feed(reader, begin, [1 << 20])
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert len(found) == (length <= ENDS)


def test_a_body_gets_memory_as_it_comes() -> None:
    reader = FrameReader()
    data = encode(1, bytes(40 << 20), [])[: 12 << 20]
    tracemalloc.start()
    try:
        assert feed(reader, data, [1 << 18]) == []
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_a_buffer_gets_memory_when_the_one_before_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 8 bytes that announce a buffer would be worth a page and several objects."""
    reserved: list[int] = []
    allocate = raw_memory.allocate
    monkeypatch.setattr(raw_memory, "allocate", lambda nbytes: reserved.append(nbytes) or allocate(nbytes))
    sizes = struct.pack("<5000Q", *[1 << 20] * 5000)
    data = frames.encode(0x102, 0, 5000, 1, 1, 0, 0.0, len(sizes), sizes + bytes((2 << 20) + 1))
    assert feed(FrameReader(), data, [1 << 18]) == []
    assert reserved == [1 << 20] * 3


def test_lengths_beyond_the_limits_are_damage() -> None:
    sizes = struct.pack("<2Q", 1 << 43, (1 << 43) + 1)
    with pytest.raises(Damaged, match="17592186044417 bytes in 2 buffers"):
        feed(FrameReader(), frames.encode(0x102, 0, 2, 1, 1, 0, 0.0, 16, sizes), [100])
    with pytest.raises(Damaged, match=f"{MAX_BUFFERS + 1} buffers"):
        feed(FrameReader(), frames.encode(0x102, 0, MAX_BUFFERS + 1, 1, 1, 0, 0.0, 1 << 30, b"x" * 5000), [5000])


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])  # (the second is torch's)
def test_a_buffer_that_no_memory_can_hold_is_skipped(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Its bytes would come for a day; the link goes on with them, or ends."""

    def allocate(nbytes: int) -> object:  # (there are machines that promise any amount)
        raise error(f"no {nbytes} bytes")

    monkeypatch.setattr(raw_memory, "allocate", allocate)
    sizes = struct.pack("<Q", 1 << 43)
    (large,) = feed(FrameReader(), frames.encode(0x102, 0, 1, 1, 1, 0, 0.0, 8, sizes + bytes(100)), [1 << 18])
    assert large.enclosed.buffers == NO_MEMORY


def test_received_memory_belongs_to_the_tensor_alone() -> None:
    """The stream buffer is used again: what arrived first must not change."""
    reader = FrameReader(1024)
    (first,) = feed(reader, encode(1, b"", [b"a" * 100]), [4096])
    kept = contents(first)
    feed(reader, encode(2, b"", [b"b" * 100]), [4096])
    assert contents(first) == kept
