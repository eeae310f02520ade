"""Device memory between real processes on a real device: right, in order, bounded, and gone when somebody is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from remora.transport import cuda_ipc
from remora.transport.cuda_ipc import deferred_free, importer
from remora.transport.cuda_ipc.flags import SLOTS
from tests.eventually import eventually
from tests.gpu.neighbour import DEVICE, Neighbour, busy

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

MB = 1 << 20


@pytest.fixture(scope="module")
def other() -> Iterator[Neighbour]:
    """For the tests that leave it alive: it takes seconds to start one."""
    with Neighbour() as made:
        yield made


@pytest.fixture(scope="module")
def taker(other: Neighbour) -> Iterator[cuda_ipc.Importer]:
    made = cuda_ipc.Importer()
    fetch(made, other.export(100, 1))  # what is opened once is open before a test begins
    yield made
    other.kill()
    made.close()
    assert eventually(_nothing_is_left)


def _nothing_is_left() -> bool:
    cuda_ipc.sweep()
    return deferred_free.count() == 0


def tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)


def fetch(taker: cuda_ipc.Importer, reference: bytes) -> torch.Tensor:
    (storage,) = taker.fetch(reference, DEVICE)
    return tensor_of(storage)


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def let_go(other: Neighbour) -> bool:
    return eventually(lambda: other.ask("held") == "0")


def test_memory_can_be_shared_here() -> None:
    assert cuda_ipc.available(DEVICE) == ""


@pytest.mark.parametrize("size", [1, 1000, MB + 1, 300 * MB])
def test_what_is_fetched_is_what_was_exported(other: Neighbour, taker: cuda_ipc.Importer, size: int) -> None:
    got = fetch(taker, other.export(size, 7))
    assert got.numel() == size
    assert holds(got, 7)
    assert let_go(other)


def test_neither_side_waits_for_the_kernels_before_it(other: Neighbour, taker: cuda_ipc.Importer) -> None:
    torch.cuda.synchronize()
    began = time.monotonic()
    got = fetch(taker, other.export(64 * MB, 9, 0.5))
    assert time.monotonic() - began < 0.4, "the processes did not wait, the stream does"
    assert holds(got, 9)
    assert time.monotonic() - began > 0.4
    assert let_go(other)


def test_every_hand_over_is_in_the_order_of_the_streams(other: Neighbour, taker: cuda_ipc.Importer) -> None:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[tuple[int, torch.Tensor]] = []
    for i in range(120):
        reference = other.export([100, 3 * MB, 40 * MB][i % 3], i, 0.002 * (i % 2))
        with torch.cuda.stream(streams[i % len(streams)]):
            busy(0.002 * (i % 5 == 0))
            got = fetch(taker, reference)
            busy(0.001)
            results.append((i, (got == i).all()))
            del got  # its memory may be used again, in the order of this stream
    torch.cuda.synchronize()
    assert [i for i, right in results if not bool(right)] == []
    assert let_go(other)


def test_memory_is_held_until_the_copy_is_done(other: Neighbour, taker: cuda_ipc.Importer) -> None:
    references = [other.export(32 * MB, value) for value in range(20)]
    busy(0.3)
    got = [fetch(taker, reference) for reference in references]
    assert other.ask("held") == "20"
    others = [other.export(32 * MB, value) for value in range(20, 40)]  # would take memory that was let go of too early
    assert all(holds(tensor, value) for value, tensor in enumerate(got))
    assert eventually(lambda: other.ask("held") == "20")
    for reference in others:
        taker.discard(reference)
    assert let_go(other)


def test_there_is_an_end_to_what_is_held(other: Neighbour, taker: cuda_ipc.Importer) -> None:
    references: list[str] = []
    while (answer := other.ask("export", 100, 1, 0)) != "refused":
        references.append(answer)
    assert len(references) == SLOTS
    for reference in references:
        taker.discard(bytes.fromhex(reference))
    assert let_go(other)
    assert holds(fetch(taker, other.export(100, 5)), 5)


def test_an_allocation_that_was_freed_is_not_taken_for_the_one_that_follows(
    other: Neighbour, taker: cuda_ipc.Importer
) -> None:
    for value in range(4):
        got = fetch(taker, other.export(600 * MB, value))
        assert holds(got, value)
        assert let_go(other)
        other.ask("free")
    free_before = torch.cuda.mem_get_info()[0]
    taker.trim(time.monotonic() + importer.IDLE + 1)
    assert taker.opened == 0
    assert torch.cuda.mem_get_info()[0] - free_before >= 600 * MB, "what its owner had freed is free at last"


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["ready", "not ready"])
def test_a_killed_exporter_keeps_nobody_waiting(seconds: float) -> None:
    before = set(os.listdir("/dev/shm"))
    with Neighbour() as other:
        taker = cuda_ipc.Importer()
        fetch(taker, other.export(MB, 3))
        torch.cuda.synchronize()
        got = fetch(taker, other.export(256 * MB, 5, seconds))
        done = torch.cuda.Event()
        done.record()
        other.kill()
    if seconds:
        assert not done.query()
    taker.close()
    assert eventually(done.query)
    assert holds(got, 0 if seconds else 5)
    assert eventually(_nothing_is_left)
    assert taker.opened == 0
    assert set(os.listdir("/dev/shm")) <= before


def test_a_killed_importer_leaves_its_exporter_the_memory() -> None:
    giver = cuda_ipc.Exporter()
    tensor = torch.full((256 * MB,), 4, dtype=torch.uint8, device=DEVICE)
    with Neighbour() as other:
        for _ in range(3):
            reference = giver.export([(tensor.untyped_storage(), 0, tensor.numel())])
            assert reference is not None
            other.ask("busy", 20)
            other.ask("fetch", reference.hex())
        assert giver.outstanding[0] == 3
        other.kill()
    giver.forget()
    assert eventually(_nothing_is_left)
    assert giver.outstanding == (0, 0)
    assert holds(tensor.add_(1), 5), "and the device is as good as before"


def test_a_fence_keeps_later_work_behind_the_copy() -> None:
    giver = cuda_ipc.Exporter()
    tensor = torch.full((64 * MB,), 4, dtype=torch.uint8, device=DEVICE)
    with Neighbour() as other:
        for value in range(4, 14):
            reference = giver.export([(tensor.untyped_storage(), 0, tensor.numel())])
            assert reference is not None
            other.ask("busy", 0.05)
            other.ask("fetch", reference.hex())
            giver.fence(cuda_ipc.number_of(reference))
            tensor.add_(1)
            assert other.ask("value") == f"{value} {value}"
        assert eventually(lambda: giver.collect() is None and giver.outstanding == (0, 0))
        reference = giver.export([(tensor.untyped_storage(), 0, tensor.numel())])
        assert reference is not None
        other.ask("busy", 60)
        other.ask("fetch", reference.hex())
        giver.fence(cuda_ipc.number_of(reference))
        other.kill()
    giver.forget()
    assert eventually(_nothing_is_left)
    assert holds(tensor, 14)


def test_a_neighbour_that_is_only_lost_may_finish_its_copy() -> None:
    giver = cuda_ipc.Exporter()
    tensor = torch.full((64 * MB,), 4, dtype=torch.uint8, device=DEVICE)
    with Neighbour() as other:
        reference = giver.export([(tensor.untyped_storage(), 0, tensor.numel())])
        assert reference is not None
        other.ask("busy", 0.5)
        other.ask("fetch", reference.hex())
        giver.forget()
        assert giver.outstanding[0] == 1
        assert other.ask("value") == "4 4"
        assert eventually(_nothing_is_left)


def test_expandable_segments_are_refused_with_a_reason() -> None:
    with Neighbour(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as other:
        assert "expandable" in other.ask("available")
        assert other.ask("export", 100, 1, 0) == "refused"


def test_importing_it_does_not_initialise_cuda() -> None:
    program = "import torch, remora.transport.cuda_ipc as i; i.identity(); print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
