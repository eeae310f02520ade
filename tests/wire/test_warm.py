"""Memory that large tensors arrive in is used again, but never while anybody can see it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from remora.wire import warm as warming
from remora.wire.warm import IDLE, SMALLEST, Warm

pytestmark = pytest.mark.skipif(warming._holders is None, reason="this torch does not say who holds a storage")
SIZE = 2 * SMALLEST
ENOUGH = 64 * SIZE  # whatever REMORA_WARM_MEMORY says


def tensor_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32).set_(storage)


def test_what_nobody_uses_is_used_again() -> None:
    warm = Warm(ENOUGH)
    first = warm.take(SIZE)
    address = first.data_ptr()
    del first
    again = warm.take(SIZE)
    assert again.data_ptr() == address
    assert warm.kept_bytes == SIZE


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
    ],
    ids=["storage", "tensor", "view", "numpy", "its-storage", "dlpack", "other-type", "buffer", "saved-for-backward"],
)
def test_what_somebody_uses_is_not(hold: Callable[[torch.UntypedStorage], object]) -> None:
    warm = Warm(ENOUGH)
    storage = warm.take(SIZE)
    address = storage.data_ptr()
    held = hold(storage)
    del storage
    other = warm.take(SIZE)
    assert other.data_ptr() != address
    del held
    assert warm.take(SIZE).data_ptr() == address


def test_another_size_gets_other_memory() -> None:
    warm = Warm(ENOUGH)
    warm.take(SIZE)
    assert warm.take(SIZE + 64).nbytes() == SIZE + 64
    assert warm.kept_bytes == 2 * SIZE + 64


def test_a_storage_that_the_program_resized_is_not_used_again() -> None:
    warm = Warm(ENOUGH)
    storage = warm.take(SIZE)
    assert storage.resizable()
    storage.resize_(2 * SIZE)
    del storage
    assert warm.take(SIZE).nbytes() == SIZE


def test_small_and_huge_ones_are_not_kept() -> None:
    warm = Warm(limit=4 * SIZE)
    assert warm.take(SMALLEST - 1).nbytes() == SMALLEST - 1
    assert warm.take(4 * SIZE + 1).nbytes() == 4 * SIZE + 1
    assert warm.kept_bytes == 0


def test_what_is_kept_is_bounded_and_tensors_outlive_it() -> None:
    warm = Warm(limit=4 * SIZE)
    tensors = [tensor_in(warm.take(SIZE)).fill_(i) for i in range(20)]
    assert warm.kept_bytes == 4 * SIZE
    assert [float(tensor[0]) for tensor in tensors] == list(range(20))
    assert len({tensor.data_ptr() for tensor in tensors}) == 20


def test_what_is_not_used_for_a_while_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(warming.time, "monotonic", lambda: clock[0])
    warm = Warm(ENOUGH)
    storage = warm.take(SIZE)
    clock[0] += 2
    warm.take(2 * SIZE)
    clock[0] += IDLE - 2
    warm.trim()
    assert warm.kept_bytes == 3 * SIZE
    clock[0] += 1
    warm.trim()
    assert warm.kept_bytes == 2 * SIZE
    assert sys.getrefcount(storage) == 2
    clock[0] += 2
    warm.trim()
    assert warm.kept_bytes == 0


def test_no_two_threads_get_the_same() -> None:
    warm = Warm(ENOUGH)
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
