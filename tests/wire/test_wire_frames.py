"""A stream of bytes, cut anywhere, yields the frames that were put into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import ProtocolError
from remora.wire import frames, memory
from remora.wire.frames import HEADER, HEADER_SIZE, Frame, FrameReader, lengths


def encode(call: int, body: bytes, buffers: list[bytes]) -> bytes:
    views = [memoryview(buffer) for buffer in buffers]
    if views:
        body += lengths(views)
    return HEADER.pack(len(body), 0x102, 1, len(views), call, call + 1, call, 1.5) + body + b"".join(buffers)


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[Frame]:
    """Give the bytes to the reader in pieces of these sizes, again and again."""
    found: list[Frame] = []
    at = turn = 0
    while at < len(data):
        space = reader.space()
        assert len(space) > 0
        n = min(len(space), max(1, sizes[turn % len(sizes)]), len(data) - at)
        space[:n] = data[at : at + n]
        found += reader.received(n)
        at += n
        turn += 1
    return found


def contents(frame: Frame) -> tuple[int, bytes, list[bytes]]:
    assert frame.buffers is not None
    buffers = [bytes(memory.storage_view(buffer)) if buffer.nbytes() else b"" for buffer in frame.buffers]
    body = bytes(frame.body)
    return frame.call, body[: len(body) - 8 * len(buffers)], buffers


messages = st.lists(
    st.tuples(
        st.binary(max_size=300) | st.integers(200, 3000).map(lambda n: b"x" * n),
        st.lists(st.binary(max_size=50) | st.integers(100, 50_000).map(lambda n: b"y" * n), max_size=4),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(messages, st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.sampled_from([64, 256, 4096]))
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
    monkeypatch.setattr(memory, "allocate", refuse)
    large, small = feed(reader, encode(1, b"a", [b"z" * 300_000]) + encode(2, b"b", []), [7000])
    assert large.buffers is None
    assert large.size > 300_000
    assert contents(small) == (2, b"b", [])


@pytest.mark.parametrize("buffers", [[], [b"q" * 10], [b"q" * 90_000, b"r" * 5]])
@pytest.mark.parametrize("piece", [7, 5000, 1 << 20])
def test_a_body_that_does_not_fit_into_memory_is_skipped_with_its_buffers(
    monkeypatch: pytest.MonkeyPatch, buffers: list[bytes], piece: int
) -> None:
    def refuse(length: int) -> bytearray:
        raise MemoryError

    reader = FrameReader(1 << 12)
    monkeypatch.setattr(frames, "bytearray", refuse, raising=False)
    first, large, last = feed(
        reader, encode(1, b"a", []) + encode(2, b"z" * 30_000, buffers) + encode(3, b"c", [b"d"]), [piece]
    )
    assert contents(first) == (1, b"a", [])
    assert large.call == 2
    assert large.buffers is None
    assert contents(last) == (3, b"c", [b"d"])


def test_a_nonsensical_number_of_buffers_is_refused() -> None:
    header = HEADER.pack(8, 0x102, 0, 5, 1, 1, 0, 0.0)
    with pytest.raises(ProtocolError, match="5 buffers"):
        feed(FrameReader(), header + b"x" * 8, [HEADER_SIZE + 8])


def test_received_memory_belongs_to_the_tensor_alone() -> None:
    """The stream buffer is used again: what arrived first must not change."""
    reader = FrameReader(1024)
    (first,) = feed(reader, encode(1, b"", [b"a" * 100]), [4096])
    kept = contents(first)
    feed(reader, encode(2, b"", [b"b" * 100]), [4096])
    assert contents(first) == kept
