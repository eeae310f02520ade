"""The conversation of observers: what proves what, which door a proof opens, and texts behind it."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from remora.errors import AuthenticationError, ProtocolError
from remora.protocol.conversation import Why
from remora.protocol.handshake import Identity, Initiator, Responder
from remora.protocol.observing import MAX_QUESTION, Observed, Observer, Reader, frame, observer_key

SECRET = b"a secret that is long enough"
KEY = observer_key(SECRET)
WORKER = Identity("worker1", 1, "incarnation", "group")


def converse(one: Observer | Initiator, other: Observed | Responder) -> None:
    """Carry what is said, both ways, until it is over or an end refuses."""
    said = one.start()
    while said:
        answer = other.receive(said)
        said = one.receive(answer) if answer else b""


def test_both_ends_come_to_know_each_other() -> None:
    observer, observed = Observer(KEY, group="group", incarnation="incarnation"), Observed(WORKER, KEY)
    converse(observer, observed)
    assert observer.result == WORKER
    assert observed.welcomed


def test_an_observer_need_not_know_whom_it_meets() -> None:
    observer, observed = Observer(KEY), Observed(WORKER, KEY)
    converse(observer, observed)
    assert observer.result == WORKER


@pytest.mark.parametrize(
    ("wanted", "why"), [({"group": "another"}, Why.GROUP), ({"incarnation": "an earlier one"}, Why.RESTARTED)]
)
def test_another_worker_is_told_apart(wanted: dict[str, Any], why: Why) -> None:
    observer, observed = Observer(KEY, **wanted), Observed(WORKER, KEY)
    with pytest.raises(ProtocolError):
        converse(observer, observed)
    assert observed.why is why
    assert not observed.welcomed


class Confused(Observed):
    """A worker that does not look whom an observer means."""

    def _on_message(self, body: dict[str, object]) -> bytes:
        return super()._on_message({**body, "group": "", "incarnation": ""})


@pytest.mark.parametrize(("group", "incarnation"), [("another", ""), ("", "an earlier one")])
def test_an_observer_looks_itself_whether_it_meets_whom_it_means(group: str, incarnation: str) -> None:
    observer, observed = Observer(KEY, group=group, incarnation=incarnation), Confused(WORKER, KEY)
    with pytest.raises(ProtocolError):
        converse(observer, observed)
    assert observer.result is None


def test_without_the_key_no_end_accepts() -> None:
    for ours, theirs in ((KEY, observer_key(b"another secret, also long")), (b"", KEY), (KEY, b"")):
        observer, observed = Observer(ours), Observed(WORKER, theirs)
        with pytest.raises(AuthenticationError):
            converse(observer, observed)
        assert not observed.welcomed
        assert observer.result is None


def test_the_secret_does_not_follow_from_the_key_and_is_none() -> None:
    assert SECRET not in KEY
    assert observer_key(SECRET) == KEY != SECRET
    assert observer_key(b"") == b""


@pytest.mark.parametrize("held", [KEY, SECRET])
def test_an_observer_opens_no_door_of_a_member(held: bytes) -> None:
    """Not even if it had the secret: it speaks in another role."""
    admitted: list[object] = []
    member = Responder(WORKER, lambda hello: admitted.append(hello) or 0, SECRET)  # type: ignore[func-returns-value]
    with pytest.raises(AuthenticationError):
        converse(Observer(held), member)
    assert not admitted


@pytest.mark.parametrize("held", [KEY, SECRET])
def test_a_key_of_observers_makes_no_member(held: bytes) -> None:
    caller = Initiator(Identity("w", 0, "i", "group"), "session", 0, held)
    observed = Observed(WORKER, KEY)
    with pytest.raises(AuthenticationError):
        converse(caller, observed)
    assert not observed.welcomed
    member = Responder(WORKER, lambda hello: 0, SECRET)
    with pytest.raises(AuthenticationError):
        converse(Initiator(Identity("w", 0, "i", "group"), "session", 0, KEY), member)


def test_a_replayed_conversation_fails() -> None:
    observer, first, second = Observer(KEY), Observed(WORKER, KEY), Observed(WORKER, KEY)
    hello = observer.start()
    proof = observer.receive(first.receive(hello))
    second.receive(hello)
    with pytest.raises(AuthenticationError):
        second.receive(proof)
    assert not second.welcomed


@pytest.mark.parametrize("which", range(4))
def test_no_changed_byte_is_accepted_by_both(which: int) -> None:
    """In any of the four messages, at any place."""
    at = 0
    while True:
        observer, observed = Observer(KEY), Observed(WORKER, KEY)
        said, turn = observer.start(), 0
        try:
            while said:
                if turn == which:
                    if at >= len(said):
                        return
                    said = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
                said = (observed if turn % 2 == 0 else observer).receive(said)
                turn += 1
        except (ProtocolError, AuthenticationError):
            pass
        assert not (observed.welcomed and observer.result)
        at += 5


# Texts.


def test_texts_come_whole_however_they_are_cut() -> None:
    values = [{"a": [1, 2.5, None, "ä"]}, [], "x" * 5000, 7]
    sent = b"".join(map(frame, values))
    for size in (1, 3, 1000, len(sent)):
        reader, found = Reader(MAX_QUESTION), []
        for start in range(0, len(sent), size):
            reader.feed(sent[start : start + size])
            while (text := reader.next()) is not None:
                found += text
        assert found == values


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_QUESTION + 1),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 2) + b"\xff\xfe",
        struct.pack(">I", 20000) + b"[" * 20000,
        struct.pack(">I", 0),
    ],
)
def test_what_is_no_text_is_refused(data: bytes) -> None:
    reader = Reader(MAX_QUESTION)
    reader.feed(data)
    with pytest.raises(ProtocolError):
        reader.next()


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(TypeError, match="cannot be told"):
        frame({"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        frame(float("nan"))
    assert json.loads(frame([1])[4:]) == [1]
