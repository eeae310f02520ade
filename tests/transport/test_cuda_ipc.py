"""Memory of devices between processes: ordered by streams, held until copied, bounded, let go of when somebody dies.

With a driver that is not one (`fake_driver`), so without a GPU; `tests/gpu/test_ipc.py` has the real one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from remora.transport import cuda_ipc
from remora.transport.cuda_ipc import availability, deferred_free, driver, importer
from remora.transport.cuda_ipc.reference import Place, Reference
from remora.transport.shm.sealed_memory import identity, seal
from tests.transport.fake_driver import DEVICE, FakeDriver

pytestmark = pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way")

OURS, THEIRS = 1, 2  # streams of the exporter and of the importer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: made)
    return made


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the other process is."""
    state = {"other": True}
    monkeypatch.setattr(deferred_free, "is_running", lambda process: state["other"])
    return state


class Pair:
    """An exporter and the importer of what it exports, on streams that have to be run."""

    def __init__(self, fake: FakeDriver, **bounds: int) -> None:
        self.fake = fake
        self.now = 0.0
        self.exporter = cuda_ipc.Exporter(**bounds)
        self.importer = cuda_ipc.Importer(clock=lambda: self.now)

    def export(self, storage: torch.UntypedStorage, start: int = 0, size: int | None = None) -> bytes | None:
        self.busy()
        return self.exporter.export([(storage, start, storage.nbytes() - start if size is None else size)])

    def busy(self) -> None:
        """Have something to do on the exporter's stream."""
        self.fake.current = OURS
        self.fake.streams[OURS].append(lambda: True)

    def fetch(self, reference: bytes | None) -> torch.UntypedStorage:
        assert reference is not None
        self.fake.current = THEIRS
        (storage,) = self.importer.fetch(reference, DEVICE)
        return storage

    def run(self) -> None:
        self.fake.run(OURS)
        self.fake.run(THEIRS)

    def held(self) -> int:
        self.exporter.collect()
        return self.exporter.outstanding[0]


@pytest.fixture
def pair(fake: FakeDriver, alive: dict[str, bool]) -> Iterator[Pair]:
    made = Pair(fake, limit=1000, count=3)
    yield made
    alive["other"] = False
    fake.run(OURS)
    made.importer.close()
    fake.run(THEIRS)
    made.exporter.forget()
    cuda_ipc.sweep()
    assert deferred_free.count() == 0
    assert not fake.registered
    assert not +fake.open_count


def filled(fake: FakeDriver, size: int, value: int) -> torch.UntypedStorage:
    storage = fake.allocate(size)
    storage.fill_(value)
    return storage


def test_what_is_fetched_is_a_copy_of_what_was_there_when_the_stream_got_there(pair: Pair) -> None:
    storage = filled(pair.fake, 100, 0)
    pair.fake.streams[OURS].append(lambda: storage.fill_(7) is not None)  # a kernel that is still to run
    got = pair.fetch(pair.export(storage, 40, 20))
    got.fill_(1)
    pair.fake.run(THEIRS)
    assert list(got) == [1] * 20, "it waits for the exporter's stream"
    assert pair.held() == 1
    pair.run()
    assert list(got) == [7] * 20
    assert got.data_ptr() != storage.data_ptr() + 40
    assert pair.held() == 0
    assert pair.exporter.outstanding == (0, 0)


def test_a_stream_that_has_nothing_to_do_is_not_given_anything_either(pair: Pair) -> None:
    storage = filled(pair.fake, 100, 7)
    pair.fake.current = OURS
    reference = pair.exporter.export([(storage, 0, 100)])
    got = pair.fetch(reference)
    assert not pair.fake.streams[OURS], "it is ready already, and that is said by the host"
    assert len(pair.fake.streams[THEIRS]) == 2, "it copies and says so, and waits for nothing"
    pair.fake.run(THEIRS)
    assert list(got) == [7] * 100
    assert pair.held() == 0


def test_several_regions_go_by_one_reference(pair: Pair) -> None:
    storages = [filled(pair.fake, 10 + value, value) for value in range(1, 4)]
    pair.busy()
    reference = pair.exporter.export([(storage, 0, storage.nbytes()) for storage in storages])
    assert reference is not None
    assert pair.exporter.outstanding == (1, 36)
    pair.fake.current = THEIRS
    got = pair.importer.fetch(memoryview(reference), DEVICE)
    pair.run()
    assert [list(each) for each in got] == [list(each) for each in storages]
    assert pair.held() == 0


def test_there_is_no_room_beyond_the_bounds_until_something_was_copied(pair: Pair) -> None:
    small, large = filled(pair.fake, 10, 1), filled(pair.fake, 985, 2)
    references = [pair.export(small), pair.export(small), pair.export(small)]
    assert pair.export(small) is None, "only three at a time"
    pair.fetch(references[0])
    pair.run()
    assert pair.export(large) is None, "only 1000 bytes at a time"
    pair.fetch(references[1])
    pair.run()
    last = pair.export(large)
    for reference in (references[2], last):
        pair.fetch(reference)
    pair.run()
    assert pair.held() == 0


def test_memory_that_cannot_be_shared_is_refused_with_one_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remora")
    pair.fake.refuses = True
    storage = filled(pair.fake, 10, 1)
    assert pair.export(storage) is None
    assert pair.export(storage) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert pair.exporter.outstanding == (0, 0)
    pair.fake.refuses = False
    pair.fetch(pair.export(storage))
    pair.run()


def test_a_fence_keeps_later_work_of_the_exporter_behind_the_copy(pair: Pair) -> None:
    storage = filled(pair.fake, 10, 7)
    reference = pair.export(storage)
    assert reference is not None
    got = pair.fetch(reference)
    pair.fake.current = OURS
    pair.exporter.fence(cuda_ipc.number_of(reference))
    pair.fake.streams[OURS].append(lambda: storage.fill_(9) is not None)
    pair.fake.run(OURS)
    assert list(storage) == [7] * 10, "it waits for the copy"
    pair.fake.run(THEIRS)
    assert pair.held() == 1, "the exporter's stream still has to look at the words"
    pair.fake.run(OURS)
    assert list(got) == [7] * 10
    assert list(storage) == [9] * 10
    assert pair.held() == 0


def test_a_fence_is_none_where_there_is_nothing_to_wait_for(pair: Pair) -> None:
    reference = pair.export(filled(pair.fake, 10, 7))
    assert reference is not None
    pair.fetch(reference)
    pair.run()
    pair.exporter.fence(cuda_ipc.number_of(reference))
    pair.exporter.fence(12345)
    assert not pair.fake.streams[OURS]
    assert pair.held() == 0


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_what_nobody_fetches_is_let_go_of(pair: Pair, who: str) -> None:
    reference = pair.export(filled(pair.fake, 10, 1))
    assert reference is not None
    if who == "receiver":
        pair.importer.discard(reference)
    else:
        pair.exporter.give_back([cuda_ipc.number_of(reference), 12345])
    assert pair.held() == 1, "its stream has not written its word yet: the slot cannot be used again"
    pair.fake.run(OURS)
    assert pair.held() == 0


def test_allocations_are_opened_once_and_closed_when_they_were_not_used_for_a_while(pair: Pair) -> None:
    storage = filled(pair.fake, 100, 1)
    for _ in range(5):
        pair.fetch(pair.export(storage, 50))
        pair.run()
    assert pair.fake.times_opened == 1
    pair.fetch(pair.export(storage))
    pair.importer.trim(importer.IDLE + 1)
    assert pair.importer.opened == 1, "it is being copied from"
    pair.run()
    pair.importer.trim(importer.IDLE - 1)
    assert pair.importer.opened == 1, "it was used lately"
    pair.importer.trim(importer.IDLE + 1)
    assert pair.importer.opened == 0
    assert not +pair.fake.open_count


def test_those_that_were_not_used_for_the_longest_time_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "OPEN", 2)
    storages = [filled(pair.fake, 10, value) for value in range(3)]
    for storage in (storages[0], storages[1], storages[0], storages[2]):
        pair.fetch(pair.export(storage))
        pair.run()
    assert [pair.fake.open_count[each.data_ptr()] for each in storages] == [1, 0, 1]


def test_an_importer_goes_on_when_the_exporter_dies_before_it_was_ready(pair: Pair, alive: dict[str, bool]) -> None:
    got = pair.fetch(pair.export(filled(pair.fake, 10, 5)))
    pair.fake.run(THEIRS)
    assert pair.fake.streams[THEIRS], "it waits"
    pair.importer.close()
    pair.fake.run(THEIRS)
    assert pair.fake.streams[THEIRS], "the other is slow, but there"
    alive["other"] = False
    cuda_ipc.sweep()
    pair.fake.run(THEIRS)
    assert not pair.fake.streams[THEIRS]
    assert list(got) == [5] * 10
    assert pair.importer.opened == 1, "closed when the copy is seen to be done"
    cuda_ipc.sweep()
    assert pair.importer.opened == 0


def test_an_exporter_lets_go_when_the_importer_dies(pair: Pair, alive: dict[str, bool]) -> None:
    storage = filled(pair.fake, 10, 1)
    references = [pair.export(storage), pair.export(storage)]
    pair.fake.run(OURS)
    pair.fetch(references[0])
    pair.exporter.forget()
    assert pair.held() == 2, "the other may be copying"
    assert pair.export(storage) is None
    pair.fake.run(THEIRS)
    cuda_ipc.sweep()
    assert pair.held() == 1
    alive["other"] = False
    cuda_ipc.sweep()
    assert pair.exporter.outstanding == (0, 0)


def test_an_exporter_that_nobody_has_heard_of_lets_go_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # no process has the number 0
    monkeypatch.setattr(driver, "load", lambda: pair.fake)
    pair.export(filled(pair.fake, 10, 1))
    pair.fake.run(OURS)
    pair.exporter.forget()
    assert pair.exporter.outstanding == (0, 0)


def test_what_cannot_be_had_is_an_error_and_not_held(pair: Pair) -> None:
    storage = filled(pair.fake, 10, 1)
    good = pair.export(storage)
    assert good is not None
    pair.fetch(good)
    for change in (
        {"device": b"another device.."},
        {"places": [Place(storage.data_ptr().to_bytes(64, "little"), storage.data_ptr(), 5, 6)]},
    ):
        reference = pair.export(storage)
        assert reference is not None
        fields = Reference.parse(reference)
        bad = fields._replace(**change)
        if "device" in change:
            pair.run()
            pair.importer.trim(importer.IDLE + 1)  # or it would be there already
        with pytest.raises(cuda_ipc.Unreachable):
            pair.importer.fetch(bad.pack(), DEVICE)
    pair.run()
    assert pair.held() == 0


def test_a_tally_that_is_gone_or_another_is_an_error(fake: FakeDriver) -> None:
    def reference(tally: tuple[int, int, int]) -> bytes:
        return Reference(1, 0, 1, tally, b"the only device.", []).pack()

    number, size = os.memfd_create("not-a-tally", os.MFD_ALLOW_SEALING), 4096
    try:
        for tally in ((1, 2**31 - 1, 5), (1, os.getpid(), number)):
            with pytest.raises(cuda_ipc.Unreachable, match="the flags of process"):
                cuda_ipc.Importer().fetch(reference(tally), DEVICE)
        seal(number, size)
        with pytest.raises(cuda_ipc.Unreachable, match="does not have the number"):
            cuda_ipc.Importer().fetch(reference((1, os.getpid(), number)), DEVICE)
    finally:
        os.close(number)
    with pytest.raises(cuda_ipc.Unreachable, match="cut short"):
        cuda_ipc.Importer().fetch(reference((1, 1, 1))[:20], DEVICE)


def test_memory_of_another_process_and_a_slot_that_there_is_not_are_errors(pair: Pair) -> None:
    reference = pair.export(filled(pair.fake, 10, 1))
    assert reference is not None
    with pytest.raises(cuda_ipc.Unreachable, match="not the lender's"):
        cuda_ipc.Importer(process=os.getpid() + 1).fetch(reference, DEVICE)
    for slot in (256, 2**32 - 1):
        with pytest.raises(cuda_ipc.Unreachable, match="slot"):
            pair.importer.fetch(Reference.parse(reference)._replace(slot=slot).pack(), DEVICE)


def test_words_count_on_from_the_beginning(pair: Pair) -> None:
    storage = filled(pair.fake, 10, 3)
    pair.fetch(pair.export(storage))
    pair.run()
    tally = pair.exporter._flags
    assert tally is not None
    top = 2**32 - 2
    pair.exporter.collect()
    pair.exporter._uses = [top] * len(pair.exporter._uses)
    tally._words[:] = [top] * len(tally._words)
    for _ in range(4):
        got = pair.fetch(pair.export(storage))
        pair.fake.run(THEIRS)
        assert pair.fake.streams[THEIRS], "not ready yet"
        assert pair.held() == 1
        pair.run()
        assert list(got) == [3] * 10
        assert pair.held() == 0


def test_who_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_ipc.identity() == ""
    assert "one of the two" in cuda_ipc.reachable("somewhere 12")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    ours = cuda_ipc.identity()
    place = ours.rpartition(" ")[0]
    assert cuda_ipc.reachable(f"{place} {os.getpid() + 1}") == ""
    assert "one process" in cuda_ipc.reachable(ours)
    assert "different hosts" in cuda_ipc.reachable(f"elsewhere {os.getpid() + 1}")
    assert "one of the two" in cuda_ipc.reachable("")


def test_a_device_that_is_not_cuda_says_so() -> None:
    assert "only CUDA" in cuda_ipc.available(torch.device("cpu"))


def test_without_cuda_there_is_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    assert cuda_ipc.available(torch.device("cuda", 0))


def test_memory_that_cannot_be_shared_says_so(fake: FakeDriver) -> None:
    fake.refuses = True
    sample = torch.empty(0, dtype=torch.uint8).set_(filled(fake, 1, 0))
    assert "expandable" in availability._try(sample)


@pytest.mark.parametrize("works", [True, False])
def test_words_are_tried_out(fake: FakeDriver, works: bool) -> None:
    class Stream:
        cuda_stream = 5

        def synchronize(self) -> None:
            if works:
                fake.run(5)

    assert bool(availability._try_words(fake, DEVICE, Stream())) is not works
    assert not fake.registered


def test_a_process_that_has_ended_is_not_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert deferred_free.is_running(os.getpid())
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not deferred_free.is_running(child.pid), "ended, but nobody has waited for it yet"
    child.wait()
    assert not deferred_free.is_running(child.pid)
