"""Device memory of a message: on the CPU, which passes for a device here, lent and not lent."""

from __future__ import annotations

import gc
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remora.errors import SerializationError
from remora.wire.device_buffers import Landing, Manifest, Region, split, write_manifest
from remora.wire.pack_scope import PackScope, UnpackScope
from remora.wire.packed import DEVICE_BUFFERS, Packed
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import from_bytes
from remora.wire.tensors.storages import Outgoing
from tests.devices.pretence import PLACE

LARGE = 10_000


class Road:
    """A route and its other end. `willing`: it lends; otherwise all goes in buffers."""

    moves_cpu = True

    def __init__(self, willing: bool) -> None:
        self.willing = willing
        self.lent: dict[bytes, list[torch.UntypedStorage]] = {}
        self.retracted: list[bytes] = []
        self.returned: list[bytes] = []
        self.tried: list[bytes] = []
        self.offers: bytes | None = None

    def target(self, device: torch.device) -> torch.device:
        return PLACE

    def lend(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        if not self.willing:
            return None
        reference = b"number %d" % len(self.lent)
        self.lent[reference] = [from_bytes(bytes(bytearray(s)[start : start + n])) for s, start, n in regions]
        return reference

    def retract(self, reference: bytes) -> None:
        self.retracted.append(reference)

    def probe(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        return self.offers

    def fetch(self, reference: bytes, device: torch.device) -> list[torch.UntypedStorage]:
        return self.lent[reference]

    def try_out(self, reference: bytes, device: torch.device) -> None:
        self.tried.append(reference)
        raise OSError("it cannot be opened")

    def give_back(self, reference: bytes) -> None:
        self.returned.append(reference)


@pytest.fixture(autouse=True)
def the_cpu_passes_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outgoing, "place", Outgoing.load)


@pytest.fixture(params=[True, False], ids=["lent", "in buffers"])
def road(request: pytest.FixtureRequest) -> Road:
    return Road(request.param)


def packed_by(road: Road, value: object) -> Packed:
    return pack(value, PackScope(route=road))


def landed(road: Road, packed: Packed) -> tuple[bytes, Landing]:
    assert packed.flags == DEVICE_BUFFERS
    body, manifest = split(packed.body)
    return body, Landing(manifest, road)


def there(road: Road, value: object) -> Any:
    packed = packed_by(road, value)
    body, landing = landed(road, packed)
    return unpack(body, [from_bytes(buffer) for buffer in packed.buffers], UnpackScope(landing=landing))


@pytest.mark.parametrize("size", [1, 5, LARGE])
def test_tensors_arrive(road: Road, size: int) -> None:
    sent = torch.arange(float(size))
    assert torch.equal(there(road, sent), sent)
    assert len(road.lent) == road.willing


def test_what_shares_memory_still_does(road: Road) -> None:
    whole = torch.zeros(LARGE)
    a, b, c, storage = there(road, (whole, whole[5:], torch.ones(3), whole.untyped_storage()))
    b[0] = 9.0
    assert a[5] == 9.0
    assert a.untyped_storage().data_ptr() == storage.data_ptr()
    assert torch.equal(c, torch.ones(3))


def test_strides_bits_and_wishes(road: Road) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    sent = [base.t(), base.clone().requires_grad_(), torch.complex(base, base).conj(), base[:, 1], base[:0]]
    for before, after in zip(sent, there(road, sent), strict=True):
        assert torch.equal(before, after)
        assert (before.shape, before.stride(), before.is_conj()) == (after.shape, after.stride(), after.is_conj())
    assert there(road, sent)[1].requires_grad


def test_a_small_view_leaves_the_rest_behind(road: Road) -> None:
    assert there(road, torch.zeros(LARGE)[3:5]).untyped_storage().nbytes() < 100
    assert there(road, torch.zeros(LARGE)[::100]).untyped_storage().nbytes() == LARGE // 100 * 4


@pytest.mark.parametrize("sent", [torch.ones(LARGE), torch.ones(LARGE)[::100]], ids=["whole", "with gaps"])
def test_a_thread_that_makes_fake_tensors_sends_real_ones(road: Road, sent: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = packed_by(road, sent)
    body, landing = landed(road, packed)
    found = unpack(body, [from_bytes(buffer) for buffer in packed.buffers], UnpackScope(landing=landing))
    assert torch.equal(found, sent)


def test_other_buffers_of_the_message_are_not_mixed_up(road: Road) -> None:
    foreign = bytearray(b"x" * LARGE)
    from pickle import PickleBuffer

    a, buffer, b = there(road, (torch.ones(LARGE), PickleBuffer(foreign), torch.zeros(LARGE)))
    assert bytes(buffer) == bytes(foreign)
    assert (a.sum(), b.sum()) == (LARGE, 0)


def test_what_is_not_fetched_is_given_back() -> None:
    road = Road(True)
    _, landing = landed(road, packed_by(road, torch.ones(3)))
    del landing
    gc.collect()
    assert road.returned == [b"number 0"]
    there(road, torch.ones(3))
    gc.collect()
    assert road.returned == [b"number 0"]  # the other one was fetched


def test_what_is_never_sent_is_taken_back() -> None:
    road = Road(True)
    packed = packed_by(road, torch.ones(3))
    assert packed.undo is not None
    for undo in packed.undo:
        undo()
    assert road.retracted == [b"number 0"]


def test_what_cannot_be_packed_lends_nothing() -> None:
    road = Road(True)
    with pytest.raises(Exception, match="generator"):
        packed_by(road, (torch.ones(3), (x for x in ())))
    assert list(road.lent) == road.retracted


def test_a_trial_goes_along_and_does_no_harm() -> None:
    road = Road(False)
    road.offers = b"try this"
    assert torch.equal(there(road, torch.ones(3)), torch.ones(3))
    assert road.tried == [b"try this"]
    _, landing = landed(road, packed_by(road, torch.ones(3)))
    del landing
    gc.collect()
    assert road.returned == [b"try this"]


def test_without_its_memory_it_says_so(road: Road) -> None:
    packed = packed_by(road, torch.ones(3))
    with pytest.raises(SerializationError, match="without its memory"):
        unpack(split(packed.body)[0], [from_bytes(buffer) for buffer in packed.buffers])


def test_the_sizes_of_buffers_may_follow_the_manifest() -> None:
    packed = packed_by(Road(False), torch.ones(3))
    assert split(packed.body + b"12345678", 1) == split(packed.body)


def test_a_packer_forgets_the_cargo_of_the_last_message() -> None:
    packed_by(Road(True), torch.ones(3))
    assert packed_by(Road(True), (1, {})).flags == 0


MANIFEST: Manifest = [("cpu", (3, 2)), ("cuda:1", b"t" + bytes(80)), ("?cuda:0", b"h" + bytes(8))]


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert split(b"body" + write_manifest(MANIFEST)) == (b"body", MANIFEST)
    assert split(b"body" + write_manifest(MANIFEST) + bytes(16), 2) == (b"body", MANIFEST)


def test_each_byte_of_a_manifest_at_each_value_is_an_error_or_a_list() -> None:
    body = b"body" + write_manifest(MANIFEST)
    for at in range(len(b"body"), len(body)):
        for value in range(256):
            try:
                _, found = split(body[:at] + bytes((value,)) + body[at + 1 :])
            except SerializationError:
                continue
            assert 0 < len(found) <= len(body)
    for end in range(len(body)):
        with pytest.raises(SerializationError):
            split(body[:end])


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(SerializationError, match="empty reference"):
        split(b"body" + write_manifest([("cpu", b"")]))


def test_a_manifest_is_not_unpickled() -> None:
    """LONG_BINPUT makes the unpickler's memo as long as it says: 2 GB here."""
    hostile = b"\x80\x05]r" + struct.pack("<I", 1 << 27) + pickle.STOP
    with pytest.raises(SerializationError, match="device memory"):
        split(b"body" + hostile + struct.pack("<I", len(hostile)))
