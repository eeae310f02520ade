"""Sessions keep their promises (S1 to S4 in `remora.protocol.session`) over links that break at any moment."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import ProtocolError
from remora.protocol import session
from remora.protocol.session import OWED_BYTES, OWED_MESSAGES, Session

SOURCE = Path(session.__file__).parents[1]
CHANGING = ("append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove")


class End:
    """One end of a session on a fake link: what it sends is in `wire` until it is delivered or lost."""

    def __init__(self) -> None:
        self.session: Session[str] = Session()
        self.wire: deque[tuple[int, int, str]] = deque()
        self.sent: list[str] = []
        self.delivered: list[str] = []

    def send(self, text: str) -> None:
        number, ack = self.session.sent + 1, self.session.received
        self.session.keep(number, ack, len(text), text)
        self.sent.append(text)
        self.wire.append((number, ack, text))

    def take(self, number: int, ack: int, text: str) -> None:
        self.session.acknowledged(ack)
        if not self.session.is_repeated(number):
            self.delivered.append(text)
            self.session.accept(number, len(text))

    def again(self, arrived: int) -> None:
        for number, text in self.session.resume(arrived):
            self.wire.append((number, 0, text))


def reconnect(a: End, b: End) -> None:
    """The link broke: what was on it is lost, both ends tell how much they have and say the rest again."""
    a.wire.clear()
    b.wire.clear()
    have_a, have_b = a.session.received, b.session.received
    a.again(have_b)
    b.again(have_a)


steps = st.lists(st.sampled_from(["a sends", "b sends", "a->b", "b->a", "cut"]), max_size=120)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_everything_arrives_once_and_in_order_however_often_the_link_breaks(plan: list[str]) -> None:
    a, b = End(), End()
    for i, step in enumerate(plan):
        match step:
            case "a sends":
                a.send(f"a{i}")
            case "b sends":
                b.send(f"b{i}")
            case "a->b" if a.wire:
                b.take(*a.wire.popleft())
            case "b->a" if b.wire:
                a.take(*b.wire.popleft())
            case "cut":
                reconnect(a, b)
        a.session.check()
        b.session.check()
        assert b.delivered == a.sent[: len(b.delivered)]
        assert a.delivered == b.sent[: len(a.delivered)]
    reconnect(a, b)
    while a.wire or b.wire:
        for here, there in ((a, b), (b, a)):
            if here.wire:
                there.take(*here.wire.popleft())
    assert b.delivered == a.sent
    assert a.delivered == b.sent


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 10))
def test_a_message_delivered_twice_by_the_link_is_delivered_once(plan: list[str], which: int) -> None:
    a, b = End(), End()
    copies: list[tuple[int, int, str]] = []
    for i, step in enumerate(plan):
        if step in ("a sends", "b sends"):
            a.send(str(i))
            copies.append(a.wire[-1])
        elif a.wire:
            b.take(*a.wire.popleft())
            if copies:
                old = copies[which % len(copies)]
                if old[0] <= b.session.received:
                    b.take(*old)
    assert b.delivered == a.sent[: len(b.delivered)]


def test_a_gap_is_refused_and_changes_nothing() -> None:
    session: Session[str] = Session()
    session.accept(1, 10)
    with pytest.raises(ProtocolError, match="one is missing"):
        session.is_repeated(3)
    assert session.received == 1
    assert not session.is_repeated(2)
    assert session.is_repeated(1)


def test_a_message_is_sent_as_soon_as_it_is_kept() -> None:
    """A sender that is struck by an exception right after that leaves counts behind that `recover` puts right."""
    session: Session[str] = Session()
    session.keep(1, 0, 10, "x")
    assert not session.recover(), "nothing to put right"
    session.kept.append((2, 25, "y"))  # what `keep` does first
    assert session.recover()
    session.check()
    assert (session.sent, session.kept_bytes) == (2, 25)
    session.acknowledged(2)
    session.check()


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    session: Session[str] = Session()
    session.keep(session.sent + 1, 0, 1, "x")
    with pytest.raises(ProtocolError, match="acknowledges"):
        session.acknowledged(2)
    assert session.kept_bytes == 1


def test_a_peer_cannot_resume_what_it_cannot_have() -> None:
    session: Session[str] = Session()
    for _ in range(3):
        session.keep(session.sent + 1, 0, 1, "x")
    with pytest.raises(ProtocolError, match="claims"):
        session.resume(4)


def test_stale_news_of_what_arrived_is_no_lie() -> None:
    session: Session[str] = Session()
    for text in ("x", "y", "z"):
        session.keep(session.sent + 1, 0, 1, text)
    session.acknowledged(2)
    assert session.resume(1) == [(3, "z")]


def test_a_sender_is_told_to_wait_until_the_peer_has_taken_enough() -> None:
    session: Session[str] = Session(limit=100)
    session.keep(session.sent + 1, 0, 60, "x")
    assert session.kept_bytes <= session.limit
    session.keep(session.sent + 1, 0, 60, "x")
    assert session.kept_bytes > session.limit
    session.acknowledged(1)
    assert session.kept_bytes <= session.limit
    assert session.kept_bytes == 60


def test_a_receiver_tells_by_itself_after_many_messages_or_many_bytes() -> None:
    session: Session[str] = Session()
    for number in range(1, OWED_MESSAGES + 1):
        assert not session.owes
        assert session.accept(number, 1) is session.owes
    assert session.owes
    assert session.telling() == OWED_MESSAGES
    assert not session.owes
    assert session.accept(OWED_MESSAGES + 1, OWED_BYTES)
    assert session.owes


def test_no_other_part_changes_a_session() -> None:
    """Its promises rest on the order of the writes in each method."""
    changes: list[str] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "session.py" or not isinstance(node, ast.Attribute):
                continue
            is_written = isinstance(node.ctx, ast.Store) and node.attr in Session.__slots__ and _is_session(node.value)
            kept = node.value
            is_called = isinstance(kept, ast.Attribute) and kept.attr == "kept" and _is_session(kept.value)
            if is_written or (is_called and node.attr in CHANGING):
                changes.append(f"{path.name}:{node.lineno}")
    assert changes == []


def _is_session(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "session"
