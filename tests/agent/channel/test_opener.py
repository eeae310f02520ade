"""A message gets what its body refers to. What cannot be read fails its call alone, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remora.agent.calls.call import Call
from remora.agent.channel import opener as module
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.opener import Opener
from remora.agent.channel.pending_calls import PendingCalls
from remora.agent.channel.registration import Registration
from remora.errors import RemoraError, SerializationError, WorkerLost
from remora.protocol.reader import Reader
from remora.wire import raw_memory
from remora.wire.enclosed import NOTHING_ENCLOSED, Enclosed, Missing, Reason
from remora.wire.frames import DEVICE_BUFFERS, REFERENCES, SHARED, Body, Frame
from tests.agent.channel.parts import REPLY, FakeLink, FakePool, OutboxAlone

BUFFERS = [raw_memory.from_bytes(b"memory")]


class Struck(Exception):
    """An exception of a signal handler."""


class Sharing:
    """The shared memory of a peer. It lends each time what it is told."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)
        self.borrowed: list[dict[int, Any]] = []
        self.device_exchange = self

    def borrow(self, frame: Frame, borrowed: dict[int, Any]) -> Frame:
        self.borrowed.append(dict(borrowed))
        borrowed[len(self.borrowed)] = "a loan"
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return frame.opened(b"rest", frame.size + 100, Enclosed(BUFFERS))

    def land(self, frame: Frame) -> tuple[bytes, object]:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return b"rest", outcome


def message(flags: int, enclosed: Enclosed = NOTHING_ENCLOSED) -> Frame:
    return Frame(REPLY, flags, 1, 1, 0, 0.0, b"body", 4, enclosed)


def opener(sharing: Sharing | None, arrived: Callable[[Body], Any] | None = None) -> Opener:
    return Opener("worker1", cast(Any, sharing), cast(Any, arrived))


def reason(frame: Frame) -> Reason | None:
    return frame.enclosed.buffers.reason if isinstance(frame.enclosed.buffers, Missing) else None


def test_a_message_gets_shared_memory_and_the_one_that_came_does_not_change() -> None:
    came = message(SHARED)
    opened = opener(Sharing(None)).borrow(came)
    assert (opened.body, opened.size, opened.enclosed.buffers) == (b"rest", 104, BUFFERS)
    assert (came.body, came.size, came.enclosed) == (b"body", 4, NOTHING_ENCLOSED)


def test_without_shared_memory_the_buffers_are_missing() -> None:
    assert reason(opener(None).borrow(message(SHARED))) is Reason.NOT_MAPPED


@pytest.mark.parametrize("flags", [SHARED, DEVICE_BUFFERS, REFERENCES])
def test_what_makes_no_sense_is_said_in_the_message(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "may_be_struck", lambda: False)

    def arrived(body: Body) -> Any:
        raise ValueError("nonsense")

    subject = opener(Sharing(ValueError("nonsense")), arrived)
    opened = subject.borrow(message(flags)) if flags == SHARED else subject.open(message(flags))
    assert reason(opened) is Reason.DAMAGED
    assert "nonsense" in cast(Missing, opened.enclosed.buffers).details


def test_device_memory_and_references_join_what_came() -> None:
    arrival = SimpleNamespace(pending=[])
    seen: list[Body] = []

    def arrived(body: Body) -> Any:
        seen.append(body)
        return b"value", arrival

    opened = opener(Sharing("landing"), arrived).open(message(DEVICE_BUFFERS | REFERENCES, Enclosed(BUFFERS)))
    assert (opened.body, seen) == (b"value", [b"rest"])
    assert opened.enclosed == Enclosed(BUFFERS, landing=cast(Any, "landing"), arrival=cast(Any, arrival))


def inbox_of(sharing: Sharing) -> tuple[Inbox, Call]:
    peer: Any = SimpleNamespace(name="worker1", me="worker0", gone=False, now=lambda: 0.0)
    call, calls = Call(peer, "asked"), PendingCalls(Reader())
    calls.waiting[call.id] = call
    handlers: Any = (lambda frame: None, lambda frame: None, lambda registration, error: None)
    inbox = Inbox(OutboxAlone(), calls, opener(sharing), cast(Any, FakePool()), *handlers)
    return inbox, call


def reply_to(call: Call) -> Frame:
    return Frame(REPLY, SHARED, call.id, 1, 0, 0.0, b"body", 4)


def receive(inbox: Inbox, *frames: Frame) -> None:
    registration = Registration(cast(Any, FakeLink()), lambda registration, events: None)
    inbox.receive(registration, lambda: list(frames))


def test_a_thread_that_is_struck_leaves_what_it_borrowed_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same memory would be on loan twice, or go back to its lender while the message refers to it."""
    monkeypatch.setattr(module, "may_be_struck", lambda: True)
    sharing = Sharing(Struck(), None)
    inbox, call = inbox_of(sharing)
    with pytest.raises(Struck):
        receive(inbox, reply_to(call))
    assert call.reply is None
    inbox.go_on()
    assert sharing.borrowed == [{}, {1: "a loan"}]
    assert call.reply is not None
    assert call.reply.enclosed.buffers == BUFFERS
    assert inbox._opener._borrowed == {}, "the message holds it"
    assert inbox.session.owed_bytes == 104, "what is lent counts"


def test_a_message_that_has_its_memory_is_not_given_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is struck behind the borrowing, before the message has left the inbox."""
    sharing = Sharing(None)
    inbox, call = inbox_of(sharing)

    def struck() -> None:
        monkeypatch.undo()
        raise Struck

    monkeypatch.setattr(Opener, "kept", lambda self: struck())
    with pytest.raises(Struck):
        receive(inbox, reply_to(call))
    inbox.go_on()
    assert sharing.borrowed == [{}]
    assert call.reply is not None
    assert inbox._opener._borrowed == {}


@pytest.mark.parametrize(
    ("missing", "error", "words"),
    [
        (Missing(Reason.NO_MEMORY), SerializationError, "does not fit into the memory of worker0"),
        (Missing(Reason.NOT_MAPPED), WorkerLost, "shared memory of worker1 that worker0 could not map"),
        (Missing(Reason.DAMAGED, "its references make no sense"), SerializationError, "its references make no sense"),
    ],
)
def test_the_error_of_a_call_says_why_its_reply_cannot_be_unpacked(
    missing: Missing, error: type[RemoraError], words: str
) -> None:
    _, call = inbox_of(Sharing())
    call.reply = message(0, Enclosed(missing))
    assert isinstance(call.error(), error)
    with pytest.raises(error, match=words):
        call.value()
