"""Memory that large tensors arrive in is used again, but never while anybody can see it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from remora.wire import buffer_pool as warming
from remora.wire.buffer_pool import IDLE, SMALLEST, BufferPool
from remora.wire.raw_memory import buffer_of

SIZE = 2 * SMALLEST
ENOUGH = 64 * SIZE  # whatever REMORA_WARM_MEMORY says


def tensor_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32).set_(storage)


def test_what_nobody_uses_is_used_again() -> None:
    warm = BufferPool(ENOUGH)
    first = warm.take(SIZE)
    address = first.data_ptr()
    del first
    assert warm.kept_bytes == SIZE
    again = warm.take(SIZE)
    assert again.data_ptr() == address
    assert warm.kept_bytes == 0


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
    warm = BufferPool(ENOUGH)
    storage = warm.take(SIZE)
    address = storage.data_ptr()
    held = hold(storage)
    del storage
    other = warm.take(SIZE)
    assert other.data_ptr() != address
    del held
    assert warm.take(SIZE).data_ptr() == address


@pytest.mark.parametrize(
    "share",
    [lambda tensor: tensor.share_memory_(), lambda tensor: tensor.untyped_storage()._share_fd_cpu_()],
    ids=["share_memory_", "what-queues-do"],
)
def test_what_other_processes_were_handed_is_never_used_again(share: Callable[[torch.Tensor], object]) -> None:
    """torch moves the storage to memory that processes share. No count shows who uses that."""
    warm = BufferPool(ENOUGH)
    tensor = tensor_in(warm.take(SIZE)).fill_(1.0)
    ours = tensor.data_ptr()
    handed = share(tensor)
    shared = tensor.data_ptr()
    assert shared != ours
    assert float(tensor.sum()) == tensor.numel()
    del tensor
    others = [warm.take(SIZE) for _ in range(3)]
    assert shared not in [other.data_ptr() for other in others]
    del handed


def test_a_forked_child_has_its_own() -> None:
    warm = BufferPool(ENOUGH)
    tensor = tensor_in(warm.take(SIZE)).fill_(1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(1 + (tensor.numpy() == 1.0).all())  # (not torch: its threads are the parent's)
    try:
        del tensor
        tensor_in(warm.take(SIZE)).fill_(2.0)
    finally:
        os.write(writer, b"x")
        os.close(reader)
        os.close(writer)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 2


def test_another_size_gets_other_memory() -> None:
    warm = BufferPool(ENOUGH)
    warm.take(SIZE)
    assert warm.take(SIZE + 64).nbytes() == SIZE + 64
    assert warm.kept_bytes == 2 * SIZE + 64


def test_it_comes_back_without_the_collector() -> None:
    warm = BufferPool(ENOUGH)
    gc.disable()
    try:
        tensor_in(warm.take(SIZE)).numpy()
        assert warm.kept_bytes == SIZE
    finally:
        gc.enable()


def test_small_and_huge_ones_are_not_kept() -> None:
    warm = BufferPool(limit=4 * SIZE)
    assert warm.take(SMALLEST - 1).nbytes() == SMALLEST - 1
    assert warm.take(4 * SIZE + 1).nbytes() == 4 * SIZE + 1
    assert warm.kept_bytes == 0


def test_what_is_kept_is_bounded_and_tensors_outlive_it() -> None:
    warm = BufferPool(limit=4 * SIZE)
    tensors = [tensor_in(warm.take(SIZE)).fill_(i) for i in range(20)]
    assert warm.kept_bytes == 0
    assert [float(tensor[0]) for tensor in tensors] == list(range(20))
    assert len({tensor.data_ptr() for tensor in tensors}) == 20
    del tensors[:10]
    assert warm.kept_bytes == 4 * SIZE
    del tensors
    warm.take(3 * SIZE)
    assert warm.kept_bytes == 4 * SIZE


def test_what_is_not_used_for_a_while_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(warming.time, "monotonic", lambda: clock[0])
    warm = BufferPool(ENOUGH)
    warm.take(SIZE)
    clock[0] += 2
    warm.take(2 * SIZE)
    clock[0] += IDLE - 2
    warm.trim()
    assert warm.kept_bytes == 3 * SIZE
    clock[0] += 1
    warm.trim()
    assert warm.kept_bytes == 2 * SIZE
    clock[0] += 2
    warm.trim()
    assert warm.kept_bytes == 0


def test_no_two_threads_get_the_same() -> None:
    warm = BufferPool(ENOUGH)
    start = threading.Barrier(4)
    mixed: list[int] = []

    def use(mark: int) -> None:
        start.wait(10.0)
        for _ in range(300):
            tensor = tensor_in(warm.take(SMALLEST))
            tensor[::65536] = mark
            if not bool((tensor[::65536] == mark).all()):
                mixed.append(mark)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert mixed == []
