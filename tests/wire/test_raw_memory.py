"""Views, fresh memory, copies, and telling whether a message still is what was packed."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.wire import raw_memory
from remora.wire.pickler import Packed, pack, unpack
from remora.wire.raw_memory import (
    allocate,
    buffer_of,
    copy_bytes,
    fingerprint,
    from_bytes,
    storage_view,
    unchanged,
)

LARGE = 30_000


def test_a_view_is_the_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    memory = storage_view(tensor.untyped_storage())
    memory[1] = 7
    assert tensor.tolist() == [0, 7, 0, 0]
    assert (memory.format, memory.nbytes, memory.readonly) == ("B", 4, False)


def test_views_of_nothing() -> None:
    assert (
        raw_memory.view(0, 0).nbytes
        == storage_view(torch.UntypedStorage(0)).nbytes
        == buffer_of(torch.UntypedStorage(0)).nbytes
        == 0
    )
    assert copy_bytes(0, 0) == b""
    for wrong in ((0, 4), (1234, -1)):
        with pytest.raises(ValueError, match=r"no .* bytes of memory"):
            raw_memory.view(*wrong)
        with pytest.raises(ValueError, match=r"no .* bytes of memory"):
            copy_bytes(*wrong)


def test_memory_elsewhere_is_not_looked_at() -> None:
    for look in (storage_view, buffer_of):
        with pytest.raises(ValueError, match="on meta"):
            look(torch.UntypedStorage(8, device="meta"))


@given(st.binary(max_size=100), st.sampled_from([bytes, bytearray, memoryview]))
def test_from_bytes_owns_a_writable_copy(data: bytes, kind: type) -> None:
    storage = from_bytes(kind(data))
    assert bytes(storage) == data
    assert storage.resizable()
    if data:
        storage[0] = (data[0] + 1) % 256
        assert bytes(storage) != data


def test_allocate_gives_memory_to_receive_into() -> None:
    storage, memory = allocate(5)
    memory[:] = b"hello"
    assert bytes(storage) == b"hello"
    assert allocate(0)[1].nbytes == 0


def test_allocation_ignores_the_default_device() -> None:
    with torch.device("meta"):
        assert allocate(5)[0].device.type == from_bytes(b"x").device.type == "cpu"


def test_a_buffer_keeps_its_storage_alive() -> None:
    storage = from_bytes(b"x" * 100)
    alive = weakref.ref(storage)
    part = buffer_of(storage)[10:20]
    del storage
    gc.collect()
    assert alive() is not None
    assert bytes(part) == b"x" * 10
    del part
    gc.collect()
    assert alive() is None


def test_a_small_tensor_is_a_value_at_once() -> None:
    tensor = torch.zeros(4)
    packed = pack(tensor)
    before = fingerprint(packed)
    tensor.fill_(1)
    assert unchanged(packed, before)
    assert rebuilt(packed).eq(0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t[10:],
        lambda t: t.view(-1, 2),
        lambda t: torch.nn.Parameter(t),
        lambda t: (t[:1], t.view(torch.int32)),
        lambda t: {"a": t.detach()},
    ],
)
def test_writes_in_place_are_noticed(make: object) -> None:
    base = torch.zeros(LARGE)
    sent = make(base)  # type: ignore[operator]
    packed = pack(sent)
    before = fingerprint(packed)
    assert unchanged(packed, before)
    with torch.no_grad():
        (sent if isinstance(sent, torch.nn.Parameter) else base).add_(1)
    assert not unchanged(packed, before)


def test_a_write_through_a_tensor_that_counts_apart() -> None:
    base = torch.zeros(LARGE)
    alias = base.data
    packed = pack((base, alias))
    before = fingerprint(packed)
    alias.add_(1)
    assert not unchanged(packed, before)


def test_in_doubt_it_changed() -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(LARGE)
    for sent in (uncounted, torch.zeros(LARGE).untyped_storage()):
        packed = pack(sent)
        assert not unchanged(packed, fingerprint(packed))


def test_nothing_in_place_nothing_to_change() -> None:
    packed = pack("no tensors")
    assert not any(fingerprint(packed))
    assert unchanged(packed, fingerprint(packed))


def rebuilt(packed: Packed) -> object:
    return unpack(packed.body, [from_bytes(buffer) for buffer in packed.buffers])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for pages")
@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("nbytes", [100, 3 << 20, 40 << 20])
def test_fresh_memory_is_filled_with_large_pages_where_they_go_with_the_object(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, huge: bool
) -> None:
    """`bytes` that arrive are made anew; with small pages to make them took five times as long as to copy them."""
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(raw_memory, "madvise", lambda *given: advice.append(given) or 0)
    monkeypatch.setattr(raw_memory, "_has_huge_pages", lambda: huge)
    source, target = bytes(range(256)) * (nbytes // 256 + 1), torch.UntypedStorage(nbytes)
    raw_memory.fill_fresh(target.data_ptr(), raw_memory.address_of(memoryview(source)), nbytes)
    assert bytes(storage_view(target)) == source[:nbytes]
    kinds = [kind for _, _, kind in advice]
    if nbytes < mmap.PAGESIZE:
        assert not kinds
    else:
        assert kinds == [raw_memory._HUGE_PAGES if huge and nbytes > raw_memory._MAPPED_FROM else raw_memory._POPULATE_WRITE]
        [(start, size, _)] = advice
        assert target.data_ptr() <= start < start + size <= target.data_ptr() + nbytes, "no memory of others"
