"""Shared memory: lent, used in place, given back, bounded, and gone when its users are."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from remora.errors import SerializationError
from remora.transport.shm import borrower as loans
from remora.transport.shm import sealed_memory
from remora.transport.shm.lender import IDLE, PAUSE, Lender
from remora.transport.shm.loan_reference import HEAD, IN_TURN, TOGETHER, TURNS, loans_in, places_in, size_class
from remora.transport.shm.mapping import map_memory
from remora.transport.shm.sealed_memory import identity
from remora.wire import raw_memory
from tests.systematic.tracing import SIGNALS, AtPlace, places_of, raising
from tests.transport.returns import returns

pytestmark = pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way")

MB = 1 << 20


def view(tensor: torch.Tensor) -> memoryview:
    return raw_memory.view(tensor.data_ptr(), tensor.nbytes)


def take(borrower: loans.Borrower, reference: bytes | None) -> list[torch.UntypedStorage]:
    assert reference is not None
    storages, filling = borrower.take(reference, 0.0)
    assert filling is None or filling.wait(lambda: False)
    return storages


def lend(lender: Lender, tensors: list[torch.Tensor], to: str = "b") -> bytes | None:
    buffers = [view(tensor) for tensor in tensors]
    placement = lender.lend(buffers, to, 0.0)
    if placement is None:
        return None
    placement.fill(buffers)
    lender.filled(placement, 0.0)
    return placement.refer()


@pytest.fixture
def lender() -> Lender:
    made = Lender(64 * MB)
    yield made
    made.close()


def test_what_is_lent_arrives_without_a_copy_and_can_be_written_to(lender: Lender) -> None:
    sent = [torch.arange(100_000), torch.zeros(0), torch.randn(333)]
    reference = lend(lender, sent)
    borrower = loans.Borrower()
    storages = take(borrower, reference)
    for tensor, storage in zip(sent, storages, strict=True):
        got = torch.empty(0, dtype=tensor.dtype).set_(storage)
        assert torch.equal(got, tensor)
    first = torch.empty(0, dtype=sent[0].dtype).set_(storages[0])
    first.add_(1)
    assert sent[0][0] == 0
    assert first[0] == 1


def test_each_large_tensor_is_given_back_when_it_is_gone_and_its_memory_is_lent_again(lender: Lender) -> None:
    borrower = loans.Borrower()
    one, two = take(borrower, lend(lender, [torch.ones(MB), torch.ones(2 * MB)]))
    part = torch.empty(0).set_(one)[5:10]
    del one
    assert returns(borrower) == []
    del part
    [first] = returns(borrower)
    lender.take_back([first], "somebody else", 1.0)
    assert lender.counts()[1] == 2, "only the borrower can give it back"
    lender.take_back([first, first], "b", 1.0)
    total, lent = lender.counts()
    assert lent == 1, "the other one is in use"
    assert lend(lender, [torch.ones(MB)]) is not None
    assert lender.counts() == (total, 2), "the same memory was lent again"
    lender.take_back([first], "b", 1.0)
    assert lender.counts()[1] == 2, "what is given back is one loan, not the memory"
    del two


def test_small_tensors_share_memory_but_not_much_of_it(lender: Lender) -> None:
    borrower = loans.Borrower()
    sent = [torch.full((2500,), float(i)) for i in range(40)] + [torch.ones(MB)] + [torch.full((9,), 7.0)]
    storages = take(borrower, lend(lender, sent))
    for tensor, storage in zip(sent, storages, strict=True):
        assert torch.equal(torch.empty(0).set_(storage), tensor)
    large = size_class(4 * MB + HEAD)[0]
    total = lender.counts()[0]
    assert total - large < 2 * sum(tensor.nbytes for tensor in sent if tensor.numel() < MB)
    kept = storages[3]
    del storages, storage
    lender.take_back(returns(borrower), "b", 0.0)
    assert lender.counts()[1] == 1
    lender.trim(100.0)
    assert lender.counts()[0] <= TOGETHER
    assert torch.empty(0).set_(kept)[0] == 3.0


def test_many_segments_need_one_descriptor_on_each_side(lender: Lender) -> None:
    before = len(os.listdir("/proc/self/fd"))
    borrower = loans.Borrower()
    kept = [take(borrower, lend(lender, [torch.full((17_500,), float(i))])) for i in range(500)]
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert [float(torch.empty(0).set_(storage)[-1]) for [storage] in kept] == list(range(500))


def places_lent_one_after_the_other(lender: Lender, floats: int, times: int) -> list[int]:
    """Which memory serves, if it is given back each time before the next is wanted."""
    found = []
    for _ in range(times):
        reference = lend(lender, [torch.ones(floats)])
        assert reference is not None
        [(number, place, _)] = places_in(reference)
        found.append(place)
        lender.take_back([number], "b", 0.0)
    return found


@pytest.mark.parametrize("floats", [1 << 15, 1 << 17, 250_000, MB])
def test_small_ones_take_turns_and_large_ones_are_used_again_at_once(lender: Lender, floats: int) -> None:
    places = places_lent_one_after_the_other(lender, floats, 40)
    turns = len(set(places))
    size = lender.counts()[0] // turns
    assert turns == max(1, min(TURNS, IN_TURN // size))
    assert places[turns:] == places[:-turns], "each in its turn: the one that was given back first"


def test_none_is_made_to_take_turns_where_there_is_no_room_for_it() -> None:
    lender = Lender(MB)
    try:
        assert len(set(places_lent_one_after_the_other(lender, MB // 8, 10))) == 1
    finally:
        lender.close()


def test_several_threads_may_give_back_at_once(lender: Lender) -> None:
    borrower = loans.Borrower()
    for _ in range(3):
        borrower.take(lend(lender, [torch.ones(MB // 8)]), 0.0)
    unused = list(borrower.unused)
    said = borrower.ended(unused)
    assert returns(borrower) == said  # another thread, before this one has noted it
    borrower.note_returned(unused)
    assert not borrower.unused
    lender.take_back(said, "b", 0.0)
    lender.take_back(said, "b", 0.0)
    lender.check()
    borrower.take(lend(lender, [torch.ones(MB // 8)]), 0.0)


def test_no_more_is_lent_than_the_limit_allows(lender: Lender) -> None:
    references = []
    while (reference := lend(lender, [torch.ones(3 * MB)])) is not None:
        references.append(reference)
    assert len(references) == 4
    assert lender.counts()[0] <= 64 * MB
    lender.forget("b")
    assert lender.counts() == (0, 0)
    assert lend(lender, [torch.ones(3 * MB)]) is not None


def test_free_segments_of_another_size_make_room(lender: Lender) -> None:
    for size in (MB // 8, 10 * MB):
        borrower = loans.Borrower()
        for _ in range(4):
            reference = lend(lender, [torch.ones(size)])
            if reference is None:
                break
            borrower.take(reference, 0.0)
        lender.take_back(returns(borrower), "b", 0.0)
    assert lend(lender, [torch.ones(15 * MB)]) is not None


def test_what_nobody_uses_is_returned_to_the_system(lender: Lender) -> None:
    borrower = loans.Borrower()
    borrower.take(lend(lender, [torch.ones(MB)]), 0.0)
    lender.take_back(returns(borrower), "b", 100.0)
    lender.trim(100.0 + IDLE / 2)
    assert lender.counts()[0]
    lender.trim(101.0 + IDLE)
    assert lender.counts() == (0, 0)
    before = len(os.listdir("/proc/self/fd"))
    borrower.trim(1000.0)
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_wrong_reference_is_refused(lender: Lender) -> None:
    reference = lend(lender, [torch.ones(MB)])
    assert reference is not None
    borrower = loans.Borrower()
    with pytest.raises(ValueError, match="beyond its arena"):
        borrower.take(reference[:-8] + (1 << 40).to_bytes(8, "little"), 0.0)
    with pytest.raises(ValueError, match="the length it should have"):
        borrower.take(reference[:-8], 0.0)
    wrong = (int.from_bytes(reference[:8], "little") + 1).to_bytes(8, "little") + reference[8:]
    with pytest.raises(ValueError, match="does not have the number"):
        loans.Borrower().take(wrong, 0.0)
    elsewhere = reference[:8] + (2**22 + 1).to_bytes(4, "little") + reference[12:]
    with pytest.raises(OSError, match="No such"):
        loans.Borrower().take(elsewhere, 0.0)
    assert returns(borrower) == []


def test_memory_that_its_lender_could_take_away_is_refused(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_memory, "SEALS", fcntl.F_SEAL_GROW)
    reference = lend(lender, [torch.ones(MB)])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not sealed"):
        loans.Borrower().take(reference, 0.0)


def test_another_process_uses_it_and_keeps_it_when_the_lender_is_gone() -> None:
    program = (
        "import sys, torch; from remora.transport.shm.lender import Lender\n"
        "lender = Lender(1 << 30); tensor = torch.arange(1 << 20)\n"
        "from remora.wire import raw_memory\n"
        "buffers = [raw_memory.view(tensor.data_ptr(), tensor.nbytes)]\n"
        "placement = lender.lend(buffers, 'b', 0.0); placement.fill(buffers)\n"
        "print(placement.refer().hex(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        reference = bytes.fromhex(child.stdout.readline().decode())
        [storage] = take(loans.Borrower(), reference)
    finally:
        child.kill()
        child.communicate(timeout=30)
    got = torch.empty(0, dtype=torch.int64).set_(storage)
    assert torch.equal(got, torch.arange(1 << 20))


class Lent:
    """A segment about which its borrower knows, and that is still to be filled."""

    def __init__(self, lender: Lender, value: float) -> None:
        self.tensor = torch.full((10_000,), value)
        self.buffers = [view(self.tensor)]
        placement = lender.lend(self.buffers, "b", 0.0)
        assert placement is not None
        placement.fill_later()
        self.placement = placement
        self.reference = placement.refer()
        self.loans = loans_in(self.reference)


def test_who_comes_before_it_is_filled_waits_for_that(lender: Lender) -> None:
    borrower = loans.Borrower()
    for value in (1.0, 2.0):  # the same memory the second time
        lent = Lent(lender, value)
        [storage], filling = borrower.take(lent.reference, 0.0)
        assert filling is not None
        waiting = threading.Event()

        def lives(waiting: threading.Event = waiting) -> bool:
            waiting.set()
            return True

        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(filling.wait, lives)
            assert waiting.wait(10)
            lent.placement.fill(lent.buffers)
            assert not waiter.done()
            lent.placement.tell()
            assert waiter.result(10) is True
        assert torch.equal(torch.empty(0).set_(storage), lent.tensor)
        lender.filled(lent.placement, 0.0)
        del storage, filling
        lender.take_back(returns(borrower), "b", 0.0)
        assert lender.counts()[1] == 0


def test_nobody_waits_for_one_that_died_before_it_was_filled(lender: Lender) -> None:
    lent = Lent(lender, 1.0)
    _, filling = loans.Borrower().take(lent.reference, 0.0)
    assert filling is not None
    lives = iter([True, True, False])
    assert filling.wait(lambda: next(lives)) is False
    lent.placement.tell()
    assert filling.wait(lambda: False) is True, "it died when all was there"


def test_what_is_given_back_unread_is_not_lent_again_before_it_is_filled() -> None:
    lender = Lender(size_class(40_000 + HEAD)[0])  # there is room for one
    try:
        lent = Lent(lender, 1.0)
        lender.take_back(lent.loans, "b", 0.0)
        assert lender.lend(lent.buffers, "b", 0.0) is None
        lender.filled(lent.placement, 0.0)
        assert lender.counts()[1] == 0
        again = lender.lend(lent.buffers, "b", 0.0)
        assert again is not None
        assert again.places[0][1] == lent.placement.places[0][1]
    finally:
        lender.close()


def test_nor_does_anybody_fill_one_from_a_device_whose_borrower_died_before(lender: Lender) -> None:
    lent = Lent(lender, 1.0)
    [place] = lent.placement.memory(range(1))
    lender.forget("b")
    place.fill_(0)  # who has it keeps it
    with pytest.raises(SerializationError, match="is gone"):
        lent.placement.memory(range(1))


@pytest.mark.parametrize("end", ["lender.forget('b')", "lender.close()"])
def test_one_whose_borrower_dies_while_it_is_being_filled_stays_until_that_is_done(end: str) -> None:
    program = (
        "import ctypes, torch; from remora.transport.shm.lender import Lender\n"
        "from remora.wire import raw_memory\n"
        "lender = Lender(1 << 30); tensor = torch.ones(1 << 20); real = ctypes.memmove\n"
        "buffers = [raw_memory.view(tensor.data_ptr(), tensor.nbytes)] * 2\n"
        "placement = lender.lend(buffers, 'b', 0.0); arena = placement.arena\n"
        "def move(*args):\n"
        f"    {end}\n"
        "    real(*args)\n"
        "ctypes.memmove = move\n"
        "placement.fill_later(); placement.fill(buffers); placement.tell(); lender.filled(placement, 0.0)\n"
        "placement.fill(buffers); placement.tell(); print(lender.counts(), arena.map)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "(0, 0) None\n"), done.stderr


@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create"])
def test_without_memory_or_descriptors_nothing_is_lent_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch, lender: Lender, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    buffers = [view(torch.ones(MB))]
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, refuse)
    assert lender.lend(buffers, "b", 100.0) is None
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert lender.lend(buffers, "b", 100.0 + PAUSE / 2) is None, "the system is left in peace for a moment"
    assert lender.lend(buffers, "b", 100.0 + PAUSE) is not None


def test_a_destructor_inside_the_lender_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch, lender: Lender) -> None:
    """The collector may run a destructor of the program where memory is made, and it may send a large tensor itself."""
    real = os.posix_fallocate
    inside: list[object] = []

    def interrupted(*args: int) -> None:
        if args[1]:
            inside.append(lend(lender, [torch.ones(MB)], "b"))
            inside.append(lend(lender, [torch.ones(MB)], "c"))
            lender.trim(0.0)
            lender.take_back([1], "b", 0.0)
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    assert lend(lender, [torch.ones(MB)]) is not None
    assert inside == [None, None], "they go over the connection"


def test_an_arena_is_gone_with_its_borrower_without_the_collector(lender: Lender) -> None:
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        assert lend(lender, [torch.ones(MB)]) is not None
        lender.forget("b")
        assert len(os.listdir("/proc/self/fd")) == before
        with open("/proc/self/maps") as maps:
            assert "memfd:remora" not in maps.read()
    finally:
        gc.enable()


def test_what_is_to_be_given_back_to_one_that_is_gone_keeps_nothing_mapped(lender: Lender) -> None:
    borrower = loans.Borrower()
    storages = take(borrower, lend(lender, [torch.ones(MB)]))
    arena = weakref.ref(borrower._arena)  # type: ignore[arg-type]
    gc.disable()  # it does not depend on a collection
    try:
        borrower.close()
        del storages
        assert len(borrower.unused) == 1
        assert arena() is None
    finally:
        gc.enable()


def test_gaps_between_segments_become_one_again() -> None:
    lender = Lender(8 * MB)
    try:
        for size in (MB // 4, MB // 2, MB, MB // 3, 2 * MB - 64, MB // 8, 2 * MB - 64) * 3:  # floats; mostly all there is
            borrower = loans.Borrower()
            kept = [take(borrower, reference) for _ in range(3) if (reference := lend(lender, [torch.ones(size)]))]
            assert kept
            del kept
            lender.take_back(returns(borrower), "b", 0.0)
        lender.trim(100.0)
        assert lender.counts() == (0, 0)
        assert lend(lender, [torch.ones(2 * MB - 64)]) is not None
    finally:
        lender.close()


def in_child(action: Callable[[], bool]) -> Callable[[], bool]:
    """Fork. The child waits until it is asked, runs it, and tells whether it was true."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(reader, 1)
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)

    def ask() -> bool:
        os.write(writer, b"x")
        os.close(reader)
        os.close(writer)
        return os.waitpid(child, 0)[1] == 0

    return ask


def all_are(array: Any, value: float) -> bool:
    return bool((array == value).all())


def array_in(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0).set_(storage).numpy()


def test_a_fork_makes_what_is_on_loan_ours_and_gives_it_back(lender: Lender) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    array = array_in(storage)
    address = storage.data_ptr()
    ask = in_child(partial(all_are, array, 1.0))
    array += 1
    lender.take_back(returns(borrower), "b", 0.0)
    assert lender.counts()[1] == 0
    [again] = take(borrower, lend(lender, [torch.full((MB,), 7.0)]))
    assert again.data_ptr() != address, "the old mapping is of no use"
    assert (array_in(again) == 7.0).all()
    assert (array == 2.0).all()
    assert ask()
    assert returns(borrower) == []
    del array, storage
    assert returns(borrower) == [], "it went back before"
    del again
    assert len(returns(borrower)) == 1


def test_memory_that_was_made_ours_is_free_when_its_tensor_is_gone(lender: Lender) -> None:
    borrower = loans.Borrower()
    kept = [take(borrower, lend(lender, [torch.ones(MB)])) for _ in range(8)]
    assert in_child(lambda: True)()
    before = private_bytes()
    del kept[1:]
    assert before - private_bytes() > 6 * 4 * MB, "one that is kept does not keep the others"
    assert (array_in(kept[0][0]) == 1.0).all()


def private_bytes() -> int:
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return int(found["RssAnon"].split()[0]) << 10


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_what_no_tensor_uses_is_not_there_in_a_child(lender: Lender) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    take(borrower, lend(lender, [torch.ones(2 * MB)]))

    def resident() -> bool:
        with open("/proc/self/maps") as maps:
            mapped = [line.split()[0].split("-") for line in maps if "memfd:remora" in line]
        held = [each for each in descriptors() if "memfd:remora" in each]
        return sum(int(end, 16) - int(start, 16) for start, end in mapped) < 5 * MB and not held

    assert in_child(resident)()
    assert (array_in(storage) == 1.0).all()


def test_a_child_of_a_child_has_its_own_too(lender: Lender) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    array = array_in(storage)

    def fork_again() -> bool:
        ask = in_child(lambda: bool((array == 1.0).all()))
        array[:] = 3.0
        return ask() and bool((array == 3.0).all())

    assert in_child(fork_again)()
    assert (array == 1.0).all()


def test_what_is_not_filled_yet_stays_shared_until_it_is(lender: Lender) -> None:
    """The one that waits for it has to see what the lender writes."""
    borrower = loans.Borrower()
    lent = Lent(lender, 5.0)
    [storage], filling = borrower.take(lent.reference, 0.0)
    assert filling is not None
    ask = in_child(lambda: filling.wait(lambda: True) is False)
    lent.placement.fill(lent.buffers)
    lent.placement.tell()
    assert filling.wait(lambda: False)
    assert (array_in(storage) == 5.0).all()
    assert ask(), "a child does not wait for what is its parent's"
    del storage
    assert returns(borrower) == lent.loans


def test_a_thread_that_writes_while_another_forks_loses_nothing(lender: Lender) -> None:
    borrower = loans.Borrower()
    stop = threading.Event()

    def count(array: Any) -> int:
        done = 0
        while not stop.is_set():
            array += 1  # (numpy lets others have the interpreter meanwhile)
            done += 1
        return done

    with ThreadPoolExecutor(1) as pool:
        for _ in range(8):
            stop.clear()
            [storage] = take(borrower, lend(lender, [torch.zeros(MB // 2)]))
            array = array_in(storage)
            counting = pool.submit(count, array)
            while not array[-1]:
                pass
            assert in_child(lambda: True)()
            stop.set()
            assert (array == counting.result(10)).all()
            lender.take_back(returns(borrower), "b", 0.0)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_where_pages_cannot_be_copied_for_sure_the_lender_does_not_get_them_back(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))

    def refuse(*_: int) -> bool:
        ctypes.set_errno(error)
        return False

    monkeypatch.setattr(loans, "populate", refuse)
    array = array_in(storage)
    ask = in_child(lambda: bool((array == 1.0).all()))
    monkeypatch.undo()
    assert len(returns(borrower)) == (error == errno.EINVAL), "older systems have copied them when they were mapped"
    array[:] = 2.0
    assert ask()


def test_pages_that_could_not_be_copied_for_sure_keep_what_is_written_to_them_at_the_next_fork(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> bool:
        ctypes.set_errno(errno.ENOMEM)
        return False

    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    array = array_in(storage)
    monkeypatch.setattr(loans, "populate", refuse)
    assert in_child(lambda: True)()
    array[:] = 2.0
    assert in_child(lambda: bool((array == 2.0).all()))()
    assert (array == 2.0).all()


def test_two_threads_that_fork_make_memory_private_once_and_both_wait_for_it(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    mapped: list[int] = []
    late = threading.Thread(target=loans._before_fork)

    def map_slowly(*args: Any) -> int:
        mapped.append(args[-1])
        if len(mapped) == 1:
            late.start()
            late.join(0.2)
            assert late.is_alive(), "it would fork before the memory is its own"
        return map_memory(*args)

    monkeypatch.setattr(loans, "map_memory", map_slowly)
    loans._before_fork()
    late.join(5.0)
    assert not late.is_alive()
    assert len(mapped) == 1, "what it maps may be lent again by then"
    assert (array_in(storage) == 1.0).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("before", [True, False])
def test_a_strike_before_a_fork_leaves_nothing_out(lender: Lender, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    borrower = loans.Borrower()
    arrays = [array_in(take(borrower, lend(lender, [torch.full((MB,), float(n))]))[0]) for n in range(3)]
    strikes = [KeyboardInterrupt]

    def map_and_strike(*args: Any) -> int:
        if before and strikes:
            raise strikes.pop()
        mapped = map_memory(*args)
        if strikes:
            raise strikes.pop()
        return mapped

    monkeypatch.setattr(loans, "map_memory", map_and_strike)
    ask = in_child(lambda: all(bool((array == n).all()) for n, array in enumerate(arrays)))
    assert not strikes
    assert len(returns(borrower)) == 3
    for array in arrays:
        array[:] = 7.0
    assert ask()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_strike_before_a_fork_loses_nothing_that_another_thread_writes(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrower = loans.Borrower()
    [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
    array = array_in(storage)
    strikes = [KeyboardInterrupt]

    def map_and_strike(*args: Any) -> int:
        mapped = map_memory(*args)
        if strikes:
            array[:] = 2.0  # (by another thread)
            raise strikes.pop()
        return mapped

    monkeypatch.setattr(loans, "map_memory", map_and_strike)
    assert in_child(lambda: all_are(array, 2.0))()
    assert all_are(array, 2.0)
    assert len(returns(borrower)) == 1


def test_what_a_struck_thread_has_borrowed_is_made_private_all_the_same(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrower = loans.Borrower()
    reference = lend(lender, [torch.full((MB,), 5.0)])
    assert reference is not None
    borrowed: dict[int, Any] = {}

    def strike(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(loans, "_frombuffer", strike)
        with pytest.raises(KeyboardInterrupt):
            borrower.take(reference, 0.0, borrowed)
    [storage], filling = borrower.take(reference, 0.0, borrowed)
    borrowed.clear()
    assert filling is not None
    assert filling.wait(lambda: False)
    array = array_in(storage)
    assert in_child(lambda: bool((array == 5.0).all()))(), "a child that looks at it does not end with a fault"
    assert len(returns(borrower)) == 1


def test_a_fork_before_the_second_attempt_takes_nothing_away(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    borrower = loans.Borrower()
    take(borrower, lend(lender, [torch.ones(MB)]))
    lender.take_back(returns(borrower), "b", 0.0)
    reference = lend(lender, [torch.full((MB,), 5.0)])  # in memory that is mapped by now
    assert reference is not None
    borrowed: dict[int, Any] = {}

    def strike(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(loans, "_frombuffer", strike)
        with pytest.raises(KeyboardInterrupt):
            borrower.take(reference, 0.0, borrowed)
    assert in_child(lambda: True)()
    lender.take_back(returns(borrower), "b", 0.0)
    assert lend(lender, [torch.full((MB,), 6.0)]) is not None  # where the other was
    [storage], filling = borrower.take(reference, 0.0, borrowed)
    assert filling is None
    assert (array_in(storage) == 5.0).all()
    borrowed.clear()
    assert returns(borrower) == [], "it went back before"


def test_a_fork_before_the_second_attempt_leaves_what_is_not_filled_yet_with_the_lender(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrower = loans.Borrower()
    take(borrower, lend(lender, [torch.ones(IN_TURN // 8)]))
    lender.take_back(returns(borrower), "b", 0.0)
    lent = Lent(lender, 5.0)
    borrowed: dict[int, Any] = {}

    def strike(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(loans, "_frombuffer", strike)
        with pytest.raises(KeyboardInterrupt):
            borrower.take(lent.reference, 0.0, borrowed)
    assert in_child(lambda: True)()
    lent.placement.fill(lent.buffers)
    lent.placement.tell()
    [storage], filling = borrower.take(lent.reference, 0.0, borrowed)
    assert filling is None or filling.wait_briefly(), "this process does not see any more what the lender writes"
    assert filling is None or filling.wait(lambda: True)
    assert (array_in(storage) == 5.0).all()


def test_a_lender_that_is_dropped_is_gone() -> None:
    made = Lender(64 * MB)
    assert lend(made, [torch.ones(MB)]) is not None
    gone = weakref.ref(made._arenas["b"])
    del made
    gc.collect()
    gc.collect()
    assert gone() is None


def test_a_borrower_that_is_forgotten_as_its_first_message_is_lent() -> None:
    lender = Lender(16 * MB)

    class Gone:
        """A borrower. Another thread comes each time that its hash is asked for, and hears once that it is gone."""

        told = False

        def __hash__(self) -> int:
            if not self.told and lender._arenas:
                self.told = True
                lender.forget(self)
            return 1

    borrower = Gone()
    lender.lend([view(torch.ones(MB))], borrower, 0.0)  # raises nothing
    lender.forget(borrower)
    assert lender.counts() == (0, 0)


class Struck(BaseException):
    """What a signal handler raises."""


def test_a_strike_loses_no_segment_and_leaves_the_turn_to_the_next() -> None:
    def work(lender: Lender) -> None:
        lend(lender, [torch.ones(2 * MB)])
        assert lend(lender, [torch.ones(MB), torch.ones(2 * MB)]) is None, "the second buffer does not fit"
        lender.trim(100.0)

    lender = Lender(16 * MB)
    places = places_of(partial(work, lender), SIGNALS)
    lender.close()
    # (One that strikes while a file is being opened or mapped can lose that.)
    places = [place for place in places if place.file.endswith(("lender.py", "arena.py"))]
    places = [place for place in places if not place.function.endswith("__init__")]
    assert len(places) > 40
    for place in places:
        lender = Lender(16 * MB)
        with contextlib.suppress(Struck), AtPlace(place, raising(Struck), SIGNALS):
            work(lender)
        lender.check()
        lender.forget("b")
        assert lend(lender, [torch.ones(MB)]) is not None, f"after a strike at {place}"
        lender.close()


def test_a_fork_without_loans_changes_nothing(lender: Lender) -> None:
    borrower = loans.Borrower()
    addresses = set()
    for _ in range(2):
        [storage] = take(borrower, lend(lender, [torch.ones(MB)]))
        addresses.add(storage.data_ptr())
        del storage
        lender.take_back(returns(borrower), "b", 0.0)
        assert in_child(lambda: True)()
    assert len(addresses) == 1
