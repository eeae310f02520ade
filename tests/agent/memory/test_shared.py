"""Memory that is filled when its message has been sent: filled in any case, once, and by whoever sent it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from remora.agent.channel.bulk import send_packed
from remora.agent.memory.late_fill import LateMemory, LateMessages
from remora.agent.memory.shared import PeerSharedMemory
from remora.protocol.session import Session
from remora.transport.shm.arena import LATER, Placement
from remora.transport.shm.lender import PAUSE, Lender
from remora.transport.shm.loan_reference import IN_TURN, PLACE, REFERENCE, loans_in
from remora.transport.shm.sealed_memory import identity
from remora.vocabulary.ids import WorkerKey
from remora.wire.enclosed import Missing, Reason
from remora.wire.frames import SHARED, Frame
from remora.wire.pickler import pack, unpack

pytestmark = [
    pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way"),
    pytest.mark.skipif(not LATER, reason="nothing is filled after it was lent on this machine"),
]

SENT = torch.arange(20_000)
PLENTY = torch.zeros(2 * IN_TURN, dtype=torch.uint8)


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender(1 << 25)
    yield made
    made.close()


def sharing(lender: Lender) -> PeerSharedMemory:
    return sharing_at(lender, lambda: 0.0)


def sharing_at(lender: Lender, now: Callable[[], float]) -> PeerSharedMemory:
    """As one of two workers has it, by a clock."""
    made = PeerSharedMemory(lender, WorkerKey(1, "there"), "there", 0, now, LateMessages(lambda work: None))
    made.willing = True
    return made


def arrive(body: bytes) -> Frame:
    """What the other side has of a message."""
    frame = Frame(0x102, SHARED, 1, 1, 0, 0.0, body, len(body))
    opened = sharing(Lender(0)).borrow(frame, {})
    assert not isinstance(opened.enclosed.buffers, Missing)
    return opened


def filled(frame: Frame) -> bool:
    """Whether its memory is there."""
    assert frame.enclosed.late is not None
    return frame.enclosed.late.wait(0.0) == ""


def is_settled(frame: Frame) -> bool:
    """Whether there is nothing to wait for."""
    late = frame.enclosed.late
    return late is None or (isinstance(late, LateMemory) and late.settled)


def value_of(frame: Frame) -> torch.Tensor:
    assert not isinstance(frame.enclosed.buffers, Missing)
    found: torch.Tensor = unpack(frame.body, frame.enclosed.buffers)
    return found


def first_time(method: Callable[..., Any], error: BaseException, after: bool) -> Callable[..., Any]:
    """It raises this the first time, before it does anything or when it has done it."""
    errors = [error]

    def called(*args: Any) -> Any:
        if errors and not after:
            raise errors.pop()
        result = method(*args)
        if errors:
            raise errors.pop()
        return result

    return called


def lent_late(mine: PeerSharedMemory) -> tuple[bytes, Callable[[], None]]:
    lent = mine.lend(pack(SENT))
    assert lent is not None
    body, fill, _, _ = lent
    assert fill is not None
    return body, fill


def test_a_small_one_is_filled_when_its_message_has_been_sent_and_a_large_one_before(lender: Lender) -> None:
    mine = sharing(lender)
    body, fill = lent_late(mine)
    frame = arrive(body)
    assert frame.enclosed.late is not None
    fill()
    assert filled(frame)
    assert torch.equal(value_of(frame), SENT)
    lent = mine.lend(pack(PLENTY))
    assert lent is not None
    assert lent[1] is None
    assert is_settled(arrive(lent[0]))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["fill", "tell"])
def test_ctrl_c_does_not_leave_it_half_filled(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    body, fill = lent_late(sharing(lender))
    frame = arrive(body)
    monkeypatch.setattr(Placement, method, first_time(getattr(Placement, method), KeyboardInterrupt(), after))
    with pytest.raises(KeyboardInterrupt):
        fill()
    assert filled(frame)
    assert torch.equal(value_of(frame), SENT)


def test_nor_does_it_undo_what_the_receiver_has_done_to_it(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    body, fill = lent_late(sharing(lender))
    frames = [arrive(body)]
    real = lender.filled

    def interrupted(*_: Any) -> None:
        value_of(frames[0]).fill_(7)
        monkeypatch.setattr(lender, "filled", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(lender, "filled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill()
    assert value_of(frames.pop()).eq(7).all()
    lender.take_back(loans_in(body[-8 - REFERENCE.size - PLACE.size : -8]), WorkerKey(1, "there"), 0.0)
    assert lender.counts()[1] == 0, "it can be lent again"


class Failing:
    """An outbox that fails: with a message on its way, or before."""

    peer = "there"
    closed = False
    session: Session[bytes] = Session()

    def __init__(self, shared_memory: PeerSharedMemory, on_its_way: bool) -> None:
        self.shared_memory = shared_memory
        self.sent: list[Frame] = []
        self._on_its_way = on_its_way

    def send(self, kind: int, call: int, body: bytes, flags: int, timeout: float) -> None:
        self.sent.append(arrive(body))
        raise KeyboardInterrupt

    def has_sent(self, call: int, before: int) -> bool:
        return self._on_its_way


def test_it_is_filled_also_if_sending_it_failed_on_the_way(lender: Lender) -> None:
    outbox = Failing(sharing(lender), on_its_way=True)
    with pytest.raises(KeyboardInterrupt):
        send_packed(cast(Any, outbox), 0x102, 1, pack(SENT), 0, 0.0, 0.0)
    assert filled(outbox.sent[0])
    assert torch.equal(value_of(outbox.sent[0]), SENT)
    assert lender.counts()[1] == 1


def test_memory_of_a_message_that_is_not_sent_is_taken_back(lender: Lender) -> None:
    mine = sharing(lender)
    mine.unused.append(77)
    with pytest.raises(KeyboardInterrupt):
        send_packed(cast(Any, Failing(mine, on_its_way=False)), 0x102, 1, pack(SENT), 0, 0.0, 0.0)
    assert lender.counts()[1] == 0
    assert list(mine.unused) == [77], "what it was to give back goes with the next message"
    lender.check()


def test_a_peer_without_descriptors_is_lent_none_for_a_moment(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    mine = sharing_at(lender, lambda: now[0])
    theirs = sharing(Lender(0))
    body, fill = lent_late(mine)
    fill()
    frame = Frame(0x102, SHARED, 1, 1, 0, 0.0, body, len(body))

    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    opened = theirs.borrow(frame, {})
    monkeypatch.undo()
    assert opened.enclosed.buffers == Missing(Reason.NO_MEMORY), "for this one it is too late"
    theirs.give_back(mine.take_back)
    assert lender.counts()[1] == 0
    assert mine.lend(pack(SENT)) is None, "the next one goes over the connection"
    now[0] += PAUSE
    assert mine.lend(pack(SENT)) is not None, "but not for ever"


@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_while_a_large_one_is_copied_leaves_nothing_on_loan(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Its message is not sent, so nobody would give it back."""
    monkeypatch.setattr(Placement, "fill", first_time(Placement.fill, KeyboardInterrupt(), after))
    with pytest.raises(KeyboardInterrupt):
        sharing(lender).lend(pack(PLENTY))
    assert lender.counts()[1] == 0


def test_what_its_sender_was_kept_from_copying_is_copied_soon_and_once(lender: Lender) -> None:
    """An exception in a signal handler may strike between the two. The receiver would wait for ever."""
    now = [100.0]
    mine = sharing_at(lender, lambda: now[0])
    body, fill = lent_late(mine)
    frame = arrive(body)
    mine.trim(now[0])
    assert not is_settled(frame), "its sender may be about to do it"
    mine.trim(now[0] + 1.0)
    assert filled(frame)
    assert torch.equal(value_of(frame), SENT)
    value_of(frame).fill_(7)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill).result(10.0)
    mine.trim(now[0] + 2.0)
    assert value_of(frame).eq(7).all(), "it is the receiver's now"


def test_two_threads_do_not_copy_it_twice(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sharing(lender)
    body, fill = lent_late(mine)
    frame = arrive(body)
    real = Placement.fill
    copies: list[int] = []

    def slowly(self: Placement, *args: Any) -> None:
        copies.append(1)
        if len(copies) == 1:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(mine.trim, 100.0).result(10.0)
        real(self, *args)

    monkeypatch.setattr(Placement, "fill", slowly)
    fill()
    assert copies == [1]
    assert torch.equal(value_of(frame), SENT)
