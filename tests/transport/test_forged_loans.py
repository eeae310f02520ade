"""References to shared memory that lie: refused before anything is opened, mapped or allocated that should not be."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.transport.cuda_ipc.flags import FlagPage
from remora.transport.link import process_at
from remora.transport.shm import borrower as loans
from remora.transport.shm.arena import Placement
from remora.transport.shm.lender import Lender
from remora.transport.shm.loan_reference import HEAD, PLACE, REFERENCE, SHORT, loans_in
from remora.transport.shm.mapping import HOST_MEMORY, PAGE
from remora.transport.shm.sealed_memory import SEALS, identity
from remora.wire import raw_memory
from tests.transport.returns import returns

pytestmark = pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way")

MB = 1 << 20
NUMBER = 77
SIZE = 4 * MB
FIRST = PAGE + HEAD


def reference(
    *places: tuple[int, int, int],
    number: int = NUMBER,
    process: int = 0,
    descriptor: int = 0,
    size: int = SIZE,
    late: int = 0,
) -> bytes:
    """What a message says of its memory."""
    head = REFERENCE.pack(number, process or os.getpid(), descriptor, size, 0, late, len(places))
    return head + b"".join(PLACE.pack(*place) for place in places)


class Forged:
    """Memory that passes for an arena: all of it is there, or nothing but its first page."""

    def __init__(self, seals: int = SEALS, size: int = SIZE, sparse: bool = False, flags: int = 0) -> None:
        self.descriptor = os.memfd_create("remora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        self.size = size
        os.ftruncate(self.descriptor, size)
        os.pwrite(self.descriptor, NUMBER.to_bytes(8, "little"), 0)
        if not sparse:
            os.pwrite(self.descriptor, bytes(size - 8), 8)
        if seals:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def refer(self, *places: tuple[int, int, int], **other: int) -> bytes:
        return reference(*places, descriptor=self.descriptor, **{"size": self.size, **other})

    def allocated(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512


@pytest.fixture
def forge() -> Iterator[Callable[..., Forged]]:
    made: list[Forged] = []

    def make(*args: Any, **settings: Any) -> Forged:
        made.append(Forged(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        os.close(each.descriptor)


def refuse(borrower: loans.Borrower, forged: bytes, match: str) -> None:
    """It is refused, with these words; nothing is on loan, and no descriptor is left open."""
    before = len(os.listdir("/proc/self/fd"))
    kept = borrower.borrowed_bytes()
    with pytest.raises((ValueError, OSError), match=match):
        borrower.take(forged, 0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert borrower.borrowed_bytes() == kept


WHOLE = (1, FIRST, MB)


def test_an_arena_as_it_should_be_is_taken(forge: Callable[..., Forged]) -> None:
    [storage], filling = loans.Borrower().take(forge().refer(WHOLE), 0.0)
    assert filling is not None
    assert filling.wait(lambda: False)
    assert storage.nbytes() == MB


@pytest.mark.parametrize("missing", ["F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"])
def test_memory_that_lacks_a_seal_is_refused(forge: Callable[..., Forged], missing: str) -> None:
    refuse(loans.Borrower(), forge(SEALS & ~getattr(fcntl, missing)).refer(WHOLE), "not sealed")


def test_so_is_memory_without_seals_and_memory_that_cannot_be_written_to(forge: Callable[..., Forged]) -> None:
    refuse(loans.Borrower(), forge(0).refer(WHOLE), "not sealed")
    refuse(loans.Borrower(), forge(SEALS | fcntl.F_SEAL_WRITE).refer(WHOLE), "cannot be mapped|not permitted")


def test_so_is_memory_of_huge_pages_where_a_fault_may_end_the_process(forge: Callable[..., Forged]) -> None:
    descriptor = os.memfd_create("remora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        refuse(loans.Borrower(), reference(WHOLE, descriptor=descriptor), "not memory that this user shares")
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    finally:
        os.close(descriptor)


@pytest.fixture(params=["file", "zero", "directory", "pipe", "fifo", "socket", "terminal", "deleted", "/dev/shm", "epoll"])
def other_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The descriptor of something that is no memory."""
    with contextlib.ExitStack() as end:

        def opened(path: Path | str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
            end.callback(os.close, descriptor)
            return descriptor

        match request.param:
            case "file" | "deleted":
                path = tmp_path / "a file of the user's"
                found = opened(path)
                os.truncate(path, SIZE)
                os.pwrite(found, NUMBER.to_bytes(8, "little"), 0)
                if request.param == "deleted":
                    path.unlink()
            case "zero":
                found = opened("/dev/zero", os.O_RDWR)
            case "directory":
                found = opened(tmp_path, os.O_RDONLY)
            case "pipe":
                found, other = os.pipe()
                end.callback(os.close, found)
                end.callback(os.close, other)
            case "fifo":
                os.mkfifo(tmp_path / "fifo")
                found = opened(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
            case "socket":
                found = end.enter_context(socket.socket(socket.AF_UNIX)).fileno()
            case "terminal":
                main, found = os.openpty()
                end.callback(os.close, main)
                end.callback(os.close, found)
            case "epoll":
                import select

                found = end.enter_context(select.epoll()).fileno()
            case _:
                name = Path("/dev/shm") / f"remora-test-{os.getpid()}"
                found = opened(name)
                end.callback(name.unlink)
                os.truncate(name, SIZE)
                os.pwrite(found, NUMBER.to_bytes(8, "little"), 0)
        yield found


def test_what_is_no_memory_is_refused_without_being_opened(other_file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened = os.open, []

    def watched(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_PATH:
            opened.append(path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    refuse(loans.Borrower(), reference(WHOLE, descriptor=other_file), "not memory that this user shares")
    assert opened == [], "a device, a pipe or a file of the user's would notice"


def test_memory_of_a_process_that_is_not_the_lenders_is_refused(forge: Callable[..., Forged]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[(arena := forge()).descriptor],
    )
    try:
        borrower = loans.Borrower()
        borrower.process = os.getpid()
        refuse(borrower, arena.refer(WHOLE, process=child.pid), f"of process {child.pid}, which is not the lender's")
        borrower.process = -1
        refuse(borrower, arena.refer(WHOLE), "not the lender's")
        unsure = loans.Borrower()
        unsure.take(arena.refer(WHOLE), 0.0)
        returns(unsure)
        unsure.trim(1000.0)
        refuse(unsure, arena.refer(WHOLE, process=child.pid), "not the lender's")
    finally:
        child.communicate(timeout=30)


def test_the_kernel_says_whose_process_is_at_the_other_end() -> None:
    here, there = socket.socketpair()
    with here, there, socket.socket(socket.AF_INET) as other:
        assert process_at(here) == os.getpid()
        assert process_at(other) == 0
    listener = socket.socket(socket.AF_UNIX)
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"
    with listener:
        listener.bind("")
        listener.listen()
        name = listener.getsockname()
        address = (b"\0" + name[1:]).decode() if isinstance(name, bytes) else name
        program = program.replace("sys.argv[1]", repr(address))
        child = subprocess.Popen([sys.executable, "-c", program])
        listener.settimeout(30)
        accepted, _ = listener.accept()
        with accepted:
            assert process_at(accepted) == child.pid
        child.wait(30)


U64 = (1 << 64) - 1


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([], "no memory"),
        ([(1, FIRST, SIZE)], "beyond"),
        ([(1, SIZE - 64, 65)], "beyond"),
        ([(1, SIZE, 64)], "beyond"),
        ([(1, U64 - 63, 64)], "beyond"),
        ([(1, FIRST, U64)], "beyond"),
        ([(1, 0, 64)], "beyond"),  # (the number of the arena is there)
        ([(1, FIRST - 64, 64)], "beyond"),
        ([(1, FIRST + 1, 64)], "aligned"),
        ([(1, FIRST, MB), (1, FIRST + MB - 64, 64)], "same memory"),
        ([(1, FIRST, MB), (2, FIRST, MB)], "same memory"),
        ([(1, FIRST, 64), (2, FIRST + 128, 64)], "same memory"),  # (two loans in one page)
        ([(1, FIRST + MB, 64), (2, FIRST + 2 * MB, 64), (1, FIRST + 3 * MB, 64)], "same memory"),
    ],
)
def test_places_that_cannot_be_are_refused(
    forge: Callable[..., Forged], places: list[tuple[int, int, int]], words: str
) -> None:
    arena = forge()
    refuse(loans.Borrower(), arena.refer(*places), words)
    borrower = loans.Borrower()
    kept = borrower.take(arena.refer((9, FIRST + 3 * MB, 64)), 0.0)  # the arena is known
    refuse(borrower, arena.refer(*places), words)
    del kept
    assert returns(borrower) == [9]


@pytest.mark.parametrize("size", [0, PAGE, SIZE - 1, SIZE + PAGE, 1 << 50, U64])
def test_a_size_that_is_not_the_files_is_refused_at_first_and_later(forge: Callable[..., Forged], size: int) -> None:
    arena = forge()
    beyond = (2, min(size, 1 << 45) // 2 // 64 * 64 + FIRST, 64)
    refuse(loans.Borrower(), arena.refer(WHOLE, size=size), "bytes|beyond")
    borrower = loans.Borrower()
    kept = borrower.take(arena.refer(WHOLE), 0.0)
    refuse(borrower, arena.refer(beyond, size=size), "bytes|beyond")
    del kept


def test_an_arena_larger_than_the_host_is_refused(forge: Callable[..., Forged]) -> None:
    size = 2 * HOST_MEMORY + PAGE
    refuse(loans.Borrower(), forge(size=size, sparse=True).refer(WHOLE), "more than this host has memory for")
    assert Lender(1 << 62).limit == HOST_MEMORY, "and no worker makes one"


HEAD = REFERENCE.size


@pytest.mark.parametrize("length", [0, 1, HEAD - 1, HEAD + 1, HEAD + 2 * PLACE.size])
def test_a_reference_that_is_cut_short_or_too_long_is_refused(forge: Callable[..., Forged], length: int) -> None:
    whole = forge().refer(WHOLE)
    cut = (whole + bytes(64))[:length]
    refuse(loans.Borrower(), cut, "length")
    assert loans_in(cut) == []


def test_what_is_in_use_is_not_lent_a_second_time(forge: Callable[..., Forged]) -> None:
    arena, borrower = forge(), loans.Borrower()
    kept = borrower.take(arena.refer(WHOLE), 0.0)
    refuse(borrower, arena.refer(WHOLE), "a second time")  # the same loan
    refuse(borrower, arena.refer((2, FIRST, 64)), "a second time")  # the same segment
    refuse(borrower, forge().refer(WHOLE, number=NUMBER + 1), "second arena")
    assert returns(borrower) == []
    del kept
    assert returns(borrower) == [1]
    assert borrower.take(arena.refer((2, FIRST, 64)), 0.0)


@pytest.mark.parametrize("late", [0, 1])
def test_a_hole_is_not_filled_by_its_receiver(forge: Callable[..., Forged], late: int) -> None:
    arena = forge(size=min(1 << 40, HOST_MEMORY // PAGE * PAGE), sparse=True)
    borrower = loans.Borrower()
    place = (1, FIRST, arena.size // 2)
    if late:  # it says that it is filled
        os.pwrite(arena.descriptor, late.to_bytes(8, "little"), PAGE)
    before = arena.allocated()
    storages, filling = borrower.take(arena.refer(place, late=late), 0.0)
    assert filling is not None, "no thread that holds a lock looks at all of it"
    with pytest.raises(loans.Hole, match="no memory"):
        filling.wait(lambda: True)
    child = os.fork()  # which makes what is on loan private
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert arena.allocated() == before
    del storages, filling


def test_a_hole_that_the_lender_makes_later_harms_nobody(forge: Callable[..., Forged]) -> None:
    arena, borrower = forge(), loans.Borrower()
    [storage], filling = borrower.take(arena.refer(WHOLE), 0.0)
    assert filling is not None
    assert filling.wait(lambda: False)
    with mmap.mmap(arena.descriptor, SIZE) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, 0, SIZE)
    assert torch.empty(0, dtype=torch.uint8).set_(storage).sum() == 0
    for cut in (0, SIZE // 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, cut)


def test_one_that_is_never_filled_is_waited_for_no_longer_than_the_limit(
    forge: Callable[..., Forged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "FILL_LIMIT", 0.2)
    _, filling = loans.Borrower().take(forge().refer(WHOLE, late=5), 0.0)
    assert filling is not None
    assert not filling.wait_briefly()
    assert filling.wait(lambda: True) is False
    assert filling.overdue


def test_what_was_never_lent_or_came_back_twice_changes_nothing() -> None:
    lender = Lender(64 * MB)
    try:
        tensor = torch.ones(MB)
        buffers = [raw_memory.view(tensor.data_ptr(), tensor.nbytes)]
        placement = lender.lend(buffers, "b", 0.0)
        assert placement is not None
        [(loan, _, _)] = placement.places
        for _ in range(1000):  # while it is being filled
            lender.take_back([loan, loan + 1, U64, 0, SHORT], "b", 0.0)
        assert placement.returned == [loan]
        assert lender.counts()[1] == 1
        lender.filled(placement, 0.0)
        lender.take_back([loan, loan], "b", 0.0)
        assert lender.counts()[1] == 0
        first, second = lender.lend(buffers, "b", 0.0), lender.lend(buffers, "b", 0.0)
        assert first is not None
        assert second is not None
        assert first.places[0][1] != second.places[0][1], "no segment is lent twice"
    finally:
        lender.close()


def test_threads_that_lend_to_a_new_peer_at_once_make_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender(64 * MB)
    real = lender._ask_system
    buffers = [memoryview(bytes(100_000))]
    first: list[Placement | None] = []

    def late(make: Any, now: float) -> Any:
        """Another thread lends something when this one has seen that there is no arena."""
        monkeypatch.setattr(lender, "_ask_system", real)
        thread = threading.Thread(target=lambda: first.append(lender.lend(buffers, "b", now)))
        thread.start()
        thread.join()
        return real(make, now)

    monkeypatch.setattr(lender, "_ask_system", late)
    try:
        second = lender.lend(buffers, "b", 0.0)
        assert first[0] is not None
        assert second is not None
        assert first[0].arena is second.arena
    finally:
        lender.close()


def test_a_page_of_words_for_devices_is_sealed_and_nothing_else_is_opened_for_one(other_file: int) -> None:
    tally = FlagPage.create()
    _, process, descriptor = tally.name
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        with pytest.raises(ValueError, match="not memory"):
            FlagPage.open(NUMBER, process, other_file)
    finally:
        tally.close()
