"""An inbox that belongs to no channel: what it does with the frames that are read."""

from __future__ import annotations

from typing import Any, cast

import pytest

from remora.agent.channel.inbox import ACK, DAMAGE_LIMIT, PING, Inbox, LinkDamaged
from remora.agent.channel.pending_calls import PendingCalls
from remora.agent.channel.registration import Registration
from remora.errors import ProtocolError
from remora.protocol.session import OWED_BYTES, OWED_MESSAGES
from remora.wire.frames import Frame
from tests.agent.channel.parts import CALL, REPLY, FakeLink, FakePool, OutboxAlone, opener


class Noted:
    """An inbox, and what it told."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.said: list[int] = []
        self.errors: list[BaseException] = []
        self.pool = FakePool()
        self.outbox = OutboxAlone()
        self.calls = PendingCalls(self.outbox.reader)
        handlers: Any = (
            lambda frame: self.requests.append(frame.number),
            lambda frame: self.said.append(frame.number),
            lambda registration, error: self.errors.append(error),
        )
        self.inbox = Inbox(self.outbox, self.calls, opener(), cast(Any, self.pool), *handlers)
        self.registration = Registration(cast(Any, FakeLink()), lambda registration, events: None)
        self.inbox.registration = self.registration

    def receive(self, *frames: Frame) -> None:
        """As a thread of the pool does."""
        self.inbox.receive(self.registration, lambda: list(frames), exposed=False)


@pytest.fixture
def noted() -> Noted:
    return Noted()


class FakeCall:
    """A synchronous call that waits."""

    asynchronous = False

    def __init__(self, number: int) -> None:
        self.id = number
        self.reply: Frame | None = None
        self.signal = object()
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def frame(number: int, kind: int = CALL, call: int = 0, ack: int = 0) -> Frame:
    return Frame(kind, 0, call, number, ack, 0.0, b"", 10)


def test_requests_are_handled_in_the_order_of_arrival_and_once(noted: Noted) -> None:
    noted.receive(frame(1), frame(2))
    noted.receive(frame(2), frame(3))
    assert noted.requests == [1, 2, 3]
    assert not noted.inbox.frames


def test_a_reply_is_given_to_its_call_and_wakes_the_thread(noted: Noted) -> None:
    call: Any = FakeCall(7)
    noted.calls.waiting[7] = call
    noted.receive(frame(1, REPLY, call=7))
    assert call.reply is not None
    assert (call.woken, noted.calls.waiting) == (1, {})


def test_a_late_reply_counts_as_arrived(noted: Noted) -> None:
    noted.receive(frame(1, REPLY, call=7))
    assert noted.inbox.session.received == 1


def test_an_acknowledgement_lets_go_what_was_kept(noted: Noted) -> None:
    noted.outbox.send(CALL, 1, b"")
    noted.receive(frame(1, ack=1))
    assert not noted.outbox.session.kept


def test_a_ping_is_answered_by_the_pool(noted: Noted) -> None:
    noted.receive(frame(0, PING))
    assert len(noted.pool.tasks) == 1


def test_a_message_that_is_missing_costs_the_link(noted: Noted) -> None:
    noted.receive(frame(1), frame(3))
    assert noted.requests == [1]
    assert [type(error) for error in noted.errors] == [LinkDamaged]
    assert not noted.inbox.frames, "it comes again"


def test_links_that_bring_nothing_but_damage_end_with_an_error_of_the_peer(noted: Noted) -> None:
    for _ in range(DAMAGE_LIMIT + 1):
        noted.receive(frame(2))
    assert [type(error) for error in noted.errors] == [LinkDamaged] * DAMAGE_LIMIT + [ProtocolError]


def test_a_frame_without_number_that_is_no_word_costs_the_link(noted: Noted) -> None:
    noted.receive(frame(0, ACK), frame(0, CALL))
    assert len(noted.errors) == 1


def test_a_thread_that_finds_another_one_sorting_leaves_it_to_that_one(noted: Noted) -> None:
    with noted.inbox.sorting:
        noted.receive(frame(1))
    assert (noted.requests, noted.registration.again) == ([], True)


@pytest.mark.parametrize(("messages", "size"), [(OWED_MESSAGES, 1), (1, OWED_BYTES)])
def test_an_acknowledgement_travels_alone_after_many_messages_or_many_bytes(
    noted: Noted, messages: int, size: int
) -> None:
    for number in range(1, messages + 1):
        assert (noted.inbox.session.owes, noted.pool.tasks) == (False, [])
        noted.receive(Frame(CALL, 0, number, number, 0, 0.0, b"", size))
    assert noted.inbox.session.owes
    [task] = noted.pool.tasks
    assert (task.func, task.args) == (noted.outbox.send_unsequenced, (ACK,))


def test_a_message_that_comes_twice_is_handled_once(noted: Noted) -> None:
    for number in (1, 2, 2, 1, 3):
        noted.receive(frame(number))
        noted.inbox.session.check()
    assert noted.requests == [1, 2, 3]
    assert noted.inbox.session.owed_bytes == 30
