"""Tensors over the host: sent while the device still copies, copied to it while they still come, and whole in any case."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.devices import copies, registry, staging, streams
from remora.devices.maps import Wishes
from remora.devices.staging import Download, Upload
from remora.errors import CallNotSent, RemoteError, SerializationError
from remora.testing.world import World
from remora.wire.device_buffers import Landing, split
from remora.wire.frames import FrameReader, encode, lengths
from remora.wire.pack_scope import PackScope, UnpackScope
from remora.wire.packed import Packed
from remora.wire.pickler import pack, unpack
from tests.devices.pretence import CPU, PLACE, PRETENDED, Module, Stream
from tests.devices.slow import CHUNK, SlowDevice, slow
from tests.wire.test_device_buffers import Road

__all__ = ["slow"]

PIECES = 5
SIZE = PIECES * CHUNK - 300
ran: list[int] = []  # what functions were given


def take(tensor: torch.Tensor) -> int:
    ran.append(tensor.nbytes)
    return int(tensor.sum())


def give(seed: int) -> torch.Tensor:
    return sample(seed)


def sample(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 200, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["tcp", "unix"])
def world(slow: SlowDevice, request: pytest.FixtureRequest) -> Iterator[World]:
    """Two workers, with a link between them that is not shared memory."""
    with _world(transports=[request.param], shared_memory=0) as made:
        yield made


def _world(**settings: Any) -> World:
    both_ways = {CPU: PLACE, PLACE: CPU}
    made = World(2, devices=lambda rank: Wishes({f"worker{1 - rank}": both_ways}), **settings)
    made.run(0, rpc.rpc_sync, "worker1", abs, (1,))  # now there is a link
    ran.clear()
    return made


class Background:
    """A call on a thread of its own."""

    def __init__(self, world: World, *how: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(world, how), daemon=True)
        self._thread.start()

    def _run(self, world: World, how: Any) -> None:
        try:
            self.value = world.run(0, *how)
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


def call(world: World, *args: Any) -> Background:
    return Background(world, rpc.rpc_sync, "worker1", *args)


# Side by side.


def test_what_is_copied_is_at_the_peer_before_the_rest_is_copied(world: World, slow: SlowDevice) -> None:
    sent = sample(1)
    under_way = call(world, take, (sent,))
    for pieces in range(1, PIECES):
        slow.until(lambda n=pieces: slow.received >= n * CHUNK)  # type: ignore[misc]
        assert slow.finished <= pieces, "the peer has what is copied, and no more was"
        slow.allow(1)
    assert under_way.result() == int(sent.sum())


def test_what_has_come_is_copied_to_the_device_before_the_rest_comes(world: World, slow: SlowDevice) -> None:
    sent = sample(2)
    under_way = call(world, take, (sent,))
    for pieces in range(1, PIECES):
        slow.until(lambda n=pieces: slow.uploaded >= n)  # type: ignore[misc]
        assert slow.finished <= pieces
        slow.allow(1)
    assert under_way.result() == int(sent.sum())
    assert slow.uploaded == PIECES


def test_replies_too(world: World, slow: SlowDevice) -> None:
    under_way = call(world, give, (3,))
    for pieces in range(1, PIECES):
        slow.until(lambda n=pieces: slow.uploaded >= n)  # type: ignore[misc]
        assert slow.finished <= pieces
        slow.allow(1)
    assert torch.equal(under_way.result(), sample(3))


def test_other_messages_follow_whole(world: World, slow: SlowDevice) -> None:
    under_way = call(world, take, (sample(1),))
    slow.until(lambda: slow.received >= CHUNK)
    others = [call(world, abs, (-n,)) for n in range(3)]
    slow.allow(100)
    assert [other.result() for other in others] == [0, 1, 2]
    assert under_way.result() == int(sample(1).sum())


@pytest.mark.parametrize("pinned", [0, 1 << 28])
@pytest.mark.parametrize("shared", [0, 1 << 28])
def test_everything_arrives_whole_whichever_way(
    slow: SlowDevice, monkeypatch: pytest.MonkeyPatch, pinned: int, shared: int
) -> None:
    monkeypatch.setattr(staging, "PINNED_UP_TO", pinned)
    slow.allow(1000)
    large, other = sample(5), sample(6).reshape(-1, 20)
    sent = [large, large[100:200], other[:, ::2], torch.ones(3), b"x" * CHUNK, other.t(), sample(7, CHUNK)]
    with _world(shared_memory=shared) as world:
        for _ in range(2):
            back = call(world, same, (sent, pickle.PickleBuffer(bytearray(b"y" * CHUNK)))).result()
            assert all(a == b if isinstance(a, bytes) else torch.equal(a, b) for a, b in zip(sent, back, strict=True))
            assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()


def same(value: Any, *others: Any) -> Any:
    assert all(bytes(other) == b"y" * CHUNK for other in others)
    return value


# When something goes wrong.


def test_a_reconnect_in_the_midst_of_it(world: World, slow: SlowDevice) -> None:
    sent = sample(8)
    under_way = call(world, take, (sent,))
    slow.until(lambda: slow.received >= CHUNK)
    world[0].agent.peers.find("worker1").outgoing.cut(OSError("cut by the test"))
    slow.allow(100)
    assert under_way.result() == int(sent.sum())
    assert ran == [SIZE], "once"


def test_a_reconnect_in_the_midst_of_a_reply(world: World, slow: SlowDevice) -> None:
    under_way = call(world, give, (9,))
    slow.until(lambda: slow.received >= CHUNK)
    world[1].agent.peers.find("worker0").incoming.cut(OSError("cut by the test"))
    slow.allow(100)
    assert torch.equal(under_way.result(), sample(9))


@pytest.mark.parametrize("fails_at", [1, PIECES - 1])
def test_a_copy_that_fails_fails_the_call_and_no_other(world: World, slow: SlowDevice, fails_at: int) -> None:
    slow.fails_at = fails_at
    slow.allow(100)
    with pytest.raises(
        CallNotSent, match=r"call of .*take on worker1: .* copied from cpu.*: the device is gone.*not run"
    ):
        call(world, take, (sample(10),)).result()
    slow.fails_at = -1
    assert call(world, take, (sample(11),)).result() == int(sample(11).sum())
    assert ran == [SIZE], "the one that failed did not run"


def test_nor_does_it_lose_what_others_say_meanwhile(world: World, slow: SlowDevice) -> None:
    slow.fails_at = 2
    failing = call(world, take, (sample(12),))
    slow.until(lambda: slow.received >= CHUNK)
    others = [call(world, abs, (-n,)) for n in range(3)]
    slow.allow(100)
    with pytest.raises(CallNotSent, match="the device is gone"):
        failing.result()
    assert [other.result() for other in others] == [0, 1, 2]


def test_a_future_has_the_error(world: World, slow: SlowDevice) -> None:
    slow.fails_at = 1
    slow.allow(100)
    future = world.run(0, rpc.rpc_async, "worker1", take, (sample(13),))
    with pytest.raises(CallNotSent, match="the device is gone"):
        future.wait()


def test_what_was_to_be_made_is_not(world: World, slow: SlowDevice) -> None:
    slow.fails_at = 1
    slow.allow(100)
    with pytest.raises(CallNotSent, match="the device is gone"):
        world.run(0, rpc.remote, "worker1", take, (sample(13),))
    assert not world[0].agent.peers.find("worker1").outgoing.pending, "nobody waits for it"


@pytest.mark.parametrize("fails_at", [1, PIECES - 1])
def test_a_result_that_cannot_be_copied_is_an_error_for_its_caller(
    world: World, slow: SlowDevice, fails_at: int
) -> None:
    slow.fails_at = fails_at
    slow.allow(100)
    with pytest.raises(SerializationError, match=r"copied from cpu.*the device is gone") as caught:
        call(world, give, (14,)).result()
    assert isinstance(caught.value, RemoteError)
    slow.fails_at = -1
    assert torch.equal(call(world, give, (15,)).result(), sample(15))


def test_what_fails_on_the_way_into_shared_memory_leaves_none_behind(slow: SlowDevice) -> None:
    slow.fails_at = 3
    slow.allow(100)
    with _world(shared_memory=1 << 28) as world:
        with pytest.raises(CallNotSent, match="the device is gone"):
            call(world, take, (sample(16),)).result()
        assert world[0].agent.peers.shared_memory.lender.counts()[1] == 0, "lent"
        slow.fails_at = -1
        assert call(world, take, (sample(16),)).result() == int(sample(16).sum())


def test_what_cannot_be_copied_to_the_device_is_an_error_for_the_call(world: World, slow: SlowDevice) -> None:
    slow.allow(100)
    slow.uploads_fail = True
    with pytest.raises(SerializationError, match="could not be copied to cpu:0: the device is gone"):
        call(world, take, (sample(17),)).result()
    slow.uploads_fail = False
    assert call(world, take, (sample(17),)).result() == int(sample(17).sum())


# Pinned memory.


@pytest.mark.parametrize("pinned", [0, 1 << 28])
def test_pinned_memory_is_bounded_and_let_go(
    world: World, slow: SlowDevice, monkeypatch: pytest.MonkeyPatch, pinned: int
) -> None:
    monkeypatch.setattr(staging, "PINNED_UP_TO", pinned)
    slow.allow(1000)
    size = 40 * CHUNK
    assert call(world, take, (sample(18, size),)).result() == int(sample(18, size).sum())
    assert slow.most_pinned <= (staging.AHEAD + 3) * CHUNK + (size if pinned else staging.AHEAD * CHUNK)
    call(world, abs, (1,)).result()  # what acknowledges the first
    assert slow.nothing_is_pinned()


# Piece by piece.


def test_small_parts_share_a_piece_and_large_ones_have_several(slow: SlowDevice) -> None:
    slow.allow(100)
    parts = [sample(n, size) for n, size in enumerate([10, 20, 2 * CHUNK, 5, CHUNK - 5, 0])]
    download = Download(parts)
    found = list(download.pieces())
    assert [sum(place.stop - place.start for _, place in ranges) for ranges in found] == [CHUNK] * 3 + [30]
    assert [index for ranges in found for index, _ in ranges] == [0, 1, 2, 2, 2, 3, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(parts, download.memory, strict=True))


def test_the_first_piece_is_there_when_a_message_is_packed(slow: SlowDevice) -> None:
    Download([sample(1)])
    assert slow.finished == 1
    slow.fails_at = PIECES  # the first one of the next
    slow.allow(100)
    with pytest.raises(RuntimeError, match="the device is gone"):
        Download([sample(2)])


def test_an_upload_fills_its_memory_piece_by_piece(slow: SlowDevice) -> None:
    sent = sample(20)
    upload = Upload(SIZE, PLACE)
    at = 0
    while (space := upload.space()) is not None:
        space.copy_(sent[at : at + space.nbytes])
        at += space.nbytes
        upload.filled()
    assert (at, slow.uploaded) == (SIZE, PIECES)
    assert torch.equal(copies.span(upload.storage(), 0, SIZE), sent)


def test_copies_are_ordered_between_what_the_current_stream_did_and_what_it_does_next(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stream] = []

    def new_stream(device: torch.device) -> Stream:
        made.append(Stream(f"beside {len(made)}"))
        return made[-1]

    monkeypatch.setattr(module, "Stream", new_stream)
    monkeypatch.setattr(registry, "UNNUMBERED", ("meta",))  # the CPU has streams
    monkeypatch.setattr(copies, "CHUNK", CHUNK)
    download = Download([sample(1)])
    (beside,) = made
    assert beside.told == ["default", "synchronized"], "it goes on from there, and the first piece is waited for"
    assert module.current.told == ["beside 0"]
    assert [len(ranges) for ranges in download.pieces()] == [1] * PIECES
    assert beside.told == ["default"] + ["synchronized"] * (1 + PIECES)
    assert torch.equal(download.memory[0], sample(1))
    Download([sample(1, CHUNK)])
    assert len(made) == 1, "what is small goes with the current stream"
    assert module.current.told == ["beside 0", "synchronized"]


def test_a_device_is_not_started_by_what_arrives(module: Module) -> None:
    assert staging.worthwhile(PRETENDED)
    module.started = False
    assert not staging.worthwhile(PRETENDED)
    assert not staging.worthwhile(CPU)
    assert staging.upload(SIZE, torch.device("meta")) is None


def test_without_room_on_the_device_what_arrives_waits_on_the_host(module: Module) -> None:
    streams.for_arrivals.cache_clear()
    assert staging.upload(SIZE, torch.device("cuda", 99)) is None  # there is no such device
    streams.for_arrivals.cache_clear()


# As they come in.


def as_bytes(packed: Packed) -> bytes:
    packed.complete()
    body = packed.body + lengths(packed.buffers)
    head = encode(0x102, packed.flags, len(packed.buffers), 1, 1, 0, 0.0, len(body), body)
    return b"".join((head, *packed.buffers))


def fed(data: bytes, step: Callable[[], int]) -> Any:
    reader, at, frames = FrameReader(), 0, []
    while at < len(data):
        space = reader.room
        n = min(len(space), len(data) - at, step())
        space[:n] = data[at : at + n]
        frames += reader.received(n)
        at += n
    return frames


@pytest.mark.parametrize("seed", range(6))
def test_frames_with_cargo_are_read_in_any_pieces(slow: SlowDevice, seed: int) -> None:
    slow.allow(1000)
    chance = random.Random(seed)
    sizes = [chance.choice([10, CHUNK // 8 - 1, CHUNK // 8, CHUNK, CHUNK + 1, 3 * CHUNK]) for _ in range(4)]
    sent: list[Any] = [sample(n, size) for n, size in enumerate(sizes)]
    sent.insert(chance.randrange(5), pickle.PickleBuffer(bytearray(b"z" * chance.choice([9000, CHUNK]))))
    road = Road(False)
    data = as_bytes(pack(sent, PackScope(route=road)))
    frames = fed(
        data * 2, lambda: chance.choice([1, 1000, 1 << 16, 1 << 18, 1 << 22]) if chance.random() < 0.9 else 1 << 30
    )
    assert len(frames) == 2
    for frame in frames:
        buffers, uploads = frame.enclosed[:2]
        body, manifest = split(frame.body, len(buffers))
        assert len(uploads) == sum(size >= CHUNK // 8 for size in sizes)
        found = unpack(body, buffers, UnpackScope(landing=Landing(manifest, road, uploads)))
        for a, b in zip(sent, found, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else bytes(a) == bytes(b)
