"""Memory that large tensors arrive in is used again, but never while anybody can see it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from remora.wire import buffer_pool
from remora.wire.buffer_pool import IDLE, SMALLEST, BufferPool
from remora.wire.raw_memory import buffer_of

SIZE = 2 * SMALLEST
ENOUGH = 64 * SIZE  # whatever REMORA_WARM_MEMORY says


def tensor_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32).set_(storage)


def test_what_nobody_uses_is_used_again() -> None:
    spare_buffers = BufferPool(ENOUGH)
    first = spare_buffers.take(SIZE)
    address = first.data_ptr()
    del first
    assert spare_buffers.kept_bytes == SIZE
    again = spare_buffers.take(SIZE)
    assert again.data_ptr() == address
    assert spare_buffers.kept_bytes == 0


@pytest.mark.parametrize(
    "hold",
    [
        lambda storage: storage,
        tensor_in,
        lambda storage: tensor_in(storage)[5:],
        lambda storage: tensor_in(storage).numpy(),
        lambda storage: tensor_in(storage).untyped_storage(),
        lambda storage: torch.utils.dlpack.to_dlpack(tensor_in(storage)),
        lambda storage: [tensor_in(storage).view(torch.int32)],
        lambda storage: memoryview(tensor_in(storage).numpy()),
        lambda storage: tensor_in(storage).requires_grad_().square(),
        lambda storage: torch.from_numpy(tensor_in(storage).numpy()),
        lambda storage: torch.empty(0).set_(tensor_in(storage)),
        lambda storage: tensor_in(storage).resize_(10),
        lambda storage: buffer_of(storage)[10:],
    ],
    ids=[
        "storage", "tensor", "view", "numpy", "its-storage", "dlpack", "other-type", "buffer", "saved-for-backward",
        "from-numpy", "set", "made-smaller", "slice-of-a-buffer",
    ],
)
def test_what_somebody_uses_is_not(hold: Callable[[torch.UntypedStorage], object]) -> None:
    spare_buffers = BufferPool(ENOUGH)
    storage = spare_buffers.take(SIZE)
    address = storage.data_ptr()
    held = hold(storage)
    del storage
    other = spare_buffers.take(SIZE)
    assert other.data_ptr() != address
    del held
    assert spare_buffers.take(SIZE).data_ptr() == address


@pytest.mark.parametrize(
    "share",
    [lambda tensor: tensor.share_memory_(), lambda tensor: tensor.untyped_storage()._share_fd_cpu_()],
    ids=["share_memory_", "what-queues-do"],
)
def test_what_other_processes_were_handed_is_never_used_again(share: Callable[[torch.Tensor], object]) -> None:
    """torch moves the storage to memory that processes share. No count shows who uses that."""
    spare_buffers = BufferPool(ENOUGH)
    tensor = tensor_in(spare_buffers.take(SIZE)).fill_(1.0)
    ours = tensor.data_ptr()
    handed = share(tensor)
    shared = tensor.data_ptr()
    assert shared != ours
    assert float(tensor.sum()) == tensor.numel()
    del tensor
    others = [spare_buffers.take(SIZE) for _ in range(3)]
    assert shared not in [other.data_ptr() for other in others]
    del handed


def test_a_forked_child_has_its_own() -> None:
    spare_buffers = BufferPool(ENOUGH)
    tensor = tensor_in(spare_buffers.take(SIZE)).fill_(1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(1 + (tensor.numpy() == 1.0).all())  # (not torch: its threads are the parent's)
    try:
        del tensor
        tensor_in(spare_buffers.take(SIZE)).fill_(2.0)
    finally:
        os.write(writer, b"x")
        os.close(reader)
        os.close(writer)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 2


def test_another_size_gets_other_memory() -> None:
    spare_buffers = BufferPool(ENOUGH)
    spare_buffers.take(SIZE)
    assert spare_buffers.take(SIZE + 64).nbytes() == SIZE + 64
    assert spare_buffers.kept_bytes == 2 * SIZE + 64


def test_it_comes_back_without_the_collector() -> None:
    spare_buffers = BufferPool(ENOUGH)
    gc.disable()
    try:
        tensor_in(spare_buffers.take(SIZE)).numpy()
        assert spare_buffers.kept_bytes == SIZE
    finally:
        gc.enable()


def test_small_and_huge_ones_are_not_kept() -> None:
    spare_buffers = BufferPool(limit=4 * SIZE)
    assert spare_buffers.take(SMALLEST - 1).nbytes() == SMALLEST - 1
    assert spare_buffers.take(4 * SIZE + 1).nbytes() == 4 * SIZE + 1
    assert spare_buffers.kept_bytes == 0


def test_what_is_kept_is_bounded_and_tensors_outlive_it() -> None:
    spare_buffers = BufferPool(limit=4 * SIZE)
    tensors = [tensor_in(spare_buffers.take(SIZE)).fill_(i) for i in range(20)]
    assert spare_buffers.kept_bytes == 0
    assert [float(tensor[0]) for tensor in tensors] == list(range(20))
    assert len({tensor.data_ptr() for tensor in tensors}) == 20
    del tensors[:10]
    assert spare_buffers.kept_bytes == 4 * SIZE
    del tensors
    spare_buffers.take(3 * SIZE)
    assert spare_buffers.kept_bytes == 4 * SIZE


def test_what_is_not_used_for_a_while_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(buffer_pool.time, "monotonic", lambda: clock[0])
    spare_buffers = BufferPool(ENOUGH)
    spare_buffers.take(SIZE)
    clock[0] += 2
    spare_buffers.take(2 * SIZE)
    clock[0] += IDLE - 2
    spare_buffers.trim()
    assert spare_buffers.kept_bytes == 3 * SIZE
    clock[0] += 1
    spare_buffers.trim()
    assert spare_buffers.kept_bytes == 2 * SIZE
    clock[0] += 2
    spare_buffers.trim()
    assert spare_buffers.kept_bytes == 0


def test_no_two_threads_get_the_same() -> None:
    spare_buffers = BufferPool(ENOUGH)
    start = threading.Barrier(4)
    mixed: list[int] = []

    def use(mark: int) -> None:
        start.wait(10.0)
        for _ in range(300):
            tensor = tensor_in(spare_buffers.take(SMALLEST))
            tensor[::65536] = mark
            if not bool((tensor[::65536] == mark).all()):
                mixed.append(mark)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert mixed == []
