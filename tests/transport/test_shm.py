"""Shared memory: lent, used in place, given back, bounded, and gone when its users are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from remora.transport import shm
from remora.wire.memory import readonly_view

pytestmark = pytest.mark.skipif(not shm.identity(), reason="this system has no memory that processes can share in this way")

MB = 1 << 20


def view(tensor: torch.Tensor) -> memoryview:
    return readonly_view(tensor.data_ptr(), tensor.nbytes)


def lend(lender: shm.Lender, tensors: list[torch.Tensor], to: str = "b") -> bytes | None:
    buffers = [view(tensor) for tensor in tensors]
    segment = lender.lend(shm.room_for(buffers), to)
    return None if segment is None else segment.fill(buffers)


@pytest.fixture
def lender() -> shm.Lender:
    made = shm.Lender(64 * MB)
    yield made
    made.close()


def test_what_is_lent_arrives_without_a_copy_and_can_be_written_to(lender: shm.Lender) -> None:
    sent = [torch.arange(100_000), torch.zeros(0), torch.randn(333)]
    reference = lend(lender, sent)
    borrower = shm.Borrower()
    storages = borrower.take(reference, 0.0)
    for tensor, storage in zip(sent, storages, strict=True):
        got = torch.empty(0, dtype=tensor.dtype).set_(storage)
        assert torch.equal(got, tensor)
    first = torch.empty(0, dtype=sent[0].dtype).set_(storages[0])
    first.add_(1)
    assert sent[0][0] == 0
    assert first[0] == 1


def test_a_segment_is_given_back_when_the_last_tensor_is_gone_and_lent_again(lender: shm.Lender) -> None:
    borrower = shm.Borrower()
    one, two = borrower.take(lend(lender, [torch.ones(MB), torch.ones(MB)]), 0.0)
    part = torch.empty(0).set_(one)[5:10]
    del one, two
    gc.collect()
    assert borrower.given_back() == []
    del part
    numbers = borrower.given_back()
    assert len(numbers) == 1
    lender.take_back(numbers, "somebody else", 1.0)
    assert lender.counts()[1] == 1, "only the borrower can give it back"
    lender.take_back(numbers, "b", 1.0)
    total, lent = lender.counts()
    assert lent == 0
    again = lend(lender, [torch.ones(2 * MB)])
    assert again is not None
    assert lender.counts() == (total, 1), "the same memory was lent again"


def numbers_lent_one_after_the_other(lender: shm.Lender, floats: int, times: int) -> list[int]:
    """Which segments serve, if each is given back before the next is wanted."""
    found = []
    for _ in range(times):
        reference = lend(lender, [torch.ones(floats)])
        assert reference is not None
        found.append(shm.number_of(reference, 0))
        lender.take_back(found[-1:], "b", 0.0)
    return found


@pytest.mark.parametrize("floats", [1 << 15, 1 << 17, 250_000, MB])
def test_small_ones_take_turns_and_large_ones_are_used_again_at_once(lender: shm.Lender, floats: int) -> None:
    numbers = numbers_lent_one_after_the_other(lender, floats, 40)
    turns = len(set(numbers))
    size = lender.counts()[0] // turns
    assert turns == max(1, min(shm.TURNS, shm.IN_TURN // size))
    assert numbers[turns:] == numbers[:-turns], "each in its turn: the one that was given back first"


def test_none_is_made_to_take_turns_where_there_is_no_room_for_it() -> None:
    lender = shm.Lender(MB)
    try:
        assert len(set(numbers_lent_one_after_the_other(lender, MB // 8, 10))) == 1
    finally:
        lender.close()


def test_no_more_is_lent_than_the_limit_allows(lender: shm.Lender) -> None:
    references = []
    while (reference := lend(lender, [torch.ones(3 * MB)])) is not None:
        references.append(reference)
    assert len(references) == 4
    assert lender.counts()[0] <= 64 * MB
    lender.forget("b")
    assert lender.counts() == (0, 0)
    assert lend(lender, [torch.ones(3 * MB)]) is not None


def test_free_segments_of_another_size_make_room(lender: shm.Lender) -> None:
    for size in (MB // 8, 10 * MB):
        borrower = shm.Borrower()
        for _ in range(4):
            reference = lend(lender, [torch.ones(size)])
            if reference is None:
                break
            borrower.take(reference, 0.0)
        lender.take_back(borrower.given_back(), "b", 0.0)
    assert lend(lender, [torch.ones(15 * MB)]) is not None


def test_what_nobody_uses_is_returned_to_the_system(lender: shm.Lender) -> None:
    borrower = shm.Borrower()
    borrower.take(lend(lender, [torch.ones(MB)]), 0.0)
    lender.take_back(borrower.given_back(), "b", 100.0)
    lender.trim(100.0 + shm.IDLE / 2)
    assert lender.counts()[0]
    lender.trim(101.0 + shm.IDLE)
    assert lender.counts() == (0, 0)
    borrower.trim(1000.0)
    assert not borrower._maps


def test_a_wrong_reference_is_refused(lender: shm.Lender) -> None:
    reference = lend(lender, [torch.ones(MB)])
    borrower = shm.Borrower()
    with pytest.raises(ValueError, match="beyond its segment"):
        borrower.take(reference[:-8] + (1 << 40).to_bytes(8, "little"), 0.0)
    wrong = (int.from_bytes(reference[:8], "little") + 1).to_bytes(8, "little") + reference[8:]
    with pytest.raises(ValueError, match="not the one"):
        borrower.take(wrong, 0.0)
    elsewhere = reference[:8] + (2**22 + 1).to_bytes(4, "little") + reference[12:]
    with pytest.raises(OSError, match="No such"):
        shm.Borrower().take(elsewhere, 0.0)


def test_another_process_uses_it_and_keeps_it_when_the_lender_is_gone() -> None:
    program = (
        "import sys, torch; from remora.transport import shm\n"
        "lender = shm.Lender(1 << 30); tensor = torch.arange(1 << 20)\n"
        "from remora.wire.memory import readonly_view\n"
        "buffers = [readonly_view(tensor.data_ptr(), tensor.nbytes)]\n"
        "print(lender.lend(shm.room_for(buffers), 'b').fill(buffers).hex(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        reference = bytes.fromhex(child.stdout.readline().decode())
        [storage] = shm.Borrower().take(reference, 0.0)
    finally:
        child.kill()
        child.communicate(timeout=30)
    got = torch.empty(0, dtype=torch.int64).set_(storage)
    assert torch.equal(got, torch.arange(1 << 20))


def test_without_memory_nothing_is_lent(monkeypatch: pytest.MonkeyPatch, lender: shm.Lender) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    assert lend(lender, [torch.ones(MB)]) is None
    assert len(os.listdir("/proc/self/fd")) == before
