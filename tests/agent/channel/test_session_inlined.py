"""What the hot paths write of a session themselves is what its methods do."""

from __future__ import annotations

from typing import Any, cast

import pytest

from remora.agent.channel.inbox import Handlers, Inbox
from remora.agent.channel.outbox import Kept
from remora.agent.channel.pending_calls import PendingCalls
from remora.protocol.session import OWED_BYTES, OWED_MESSAGES, Session
from remora.wire.frames import Frame
from tests.agent.channel.parts import CALL, FakePool, OutboxAlone


def state(session: Session[Any]) -> dict[str, object]:
    return {name: getattr(session, name) for name in Session.__slots__}


@pytest.fixture
def outbox() -> OutboxAlone:
    return OutboxAlone()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def inbox(outbox: OutboxAlone, pool: FakePool) -> Inbox:
    handlers = Handlers(lambda frame: None, lambda frame: None, lambda frame: None, lambda registration, error: None)
    return Inbox(outbox, PendingCalls(), cast(Any, pool), handlers)


def test_send_does_what_keep_does(outbox: OutboxAlone) -> None:
    twin: Session[Kept] = Session()
    for number, received in enumerate((0, 3, 3, 9), 1):
        for session in (outbox.session, twin):
            session.received, session.owed_bytes = received, 100
        outbox.send(CALL, number, b"x" * number)
        data = outbox.wire.writes[-1][0]
        twin.keep(number, received, len(data), data)
        assert state(outbox.session) == state(twin)
        outbox.session.check()


def request(number: int, size: int) -> Frame:
    return Frame(0x102, 0, number, number, 0, 0.0, b"", size)


def test_handling_a_frame_does_what_accept_does(inbox: Inbox) -> None:
    twin: Session[Kept] = Session()
    for number in (1, 2, 2, 1, 3):  # some come twice
        frame = request(number, 10 * number)
        inbox.frames.append(frame)
        inbox._handle_frames(None, exposed=False)
        twin.accept(number, frame.size)
        assert state(inbox.session) == state(twin)


@pytest.mark.parametrize(("messages", "size"), [(OWED_MESSAGES, 1), (1, OWED_BYTES)])
def test_an_acknowledgement_is_due_when_owes_says_so(inbox: Inbox, pool: FakePool, messages: int, size: int) -> None:
    for number in range(1, messages + 1):
        assert (not inbox.session.owes, pool.tasks) == (True, [])
        inbox.frames.append(request(number, size))
        inbox._handle_frames(None, exposed=False)
    assert inbox.session.owes
    assert pool.tasks == [inbox._acknowledge]
