"""The handshake, both ends driven over a link made of two lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import AuthenticationError, ProtocolError, RemoraError
from remora.protocol import conversation
from remora.protocol.conversation import HEADER, LENGTH_AT, MAGIC, MAX_BODY, SEAL_SIZE, VERSION, Kind, header
from remora.protocol.handshake import Accepted, Hello, Identity, Initiator, Refused, Responder, Why

SECRET = b"0123456789abcdef0123456789abcdef"
ALICE = Identity("alice", 0, "a" * 16, "group-1")
BOB = Identity("bob", 1, "b" * 16, "group-1")

End = Initiator | Responder
Tamper = Callable[[int, bytes], bytes]


def caller(**changes: object) -> Initiator:
    arguments: dict[str, object] = {"secret": SECRET, "expected": BOB, **changes}
    me = arguments.pop("me", ALICE)
    return Initiator(me, "session-1", 3, **arguments)  # type: ignore[arg-type]


def listener(**changes: object) -> Responder:
    arguments: dict[str, object] = {"authorize": lambda hello: 5, "secret": SECRET, **changes}
    me = arguments.pop("me", BOB)
    return Responder(me, arguments.pop("authorize"), **arguments)  # type: ignore[arg-type]


def chunks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def deliver(end: End, data: bytes, size: int) -> tuple[bytes, RemoraError | None]:
    """Feed `data` in pieces. What is sent after an error is the refusal."""
    reply = b""
    try:
        for piece in chunks(data, size):
            if end.result is None:
                reply += end.receive(piece)
    except RemoraError as error:
        return end.refusal, error
    return reply, None


def converse(
    a: Initiator, b: Responder, tamper: Tamper = lambda turn, data: data, size: int = 10**6
) -> tuple[RemoraError | None, RemoraError | None]:
    """Let the ends talk until one falls silent, then close the link on whoever still waits. Returns their errors."""
    errors: list[RemoraError | None] = [None, None]
    ends: list[End] = [a, b]
    data, to = tamper(0, a.start()), 1
    for turn in range(1, 6):
        if not data:
            break
        if errors[to] is None and ends[to].result is None:
            data, errors[to] = deliver(ends[to], data, size)
            data = tamper(turn, data) if data else b""
        else:
            data = b""
        to = 1 - to
    for index, end in enumerate(ends):
        if end.result is None and errors[index] is None:
            with pytest.raises(ProtocolError) as caught:
                end.receive(b"")
            errors[index] = caught.value
    return errors[0], errors[1]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10**6])
def test_both_ends_learn_who_the_other_is_and_where_the_session_stood(size: int) -> None:
    a, b = caller(), listener()
    assert converse(a, b, size=size) == (None, None)
    assert a.result == Accepted(BOB, "session-1", 5)
    assert b.result == Accepted(ALICE, "session-1", 3)


def test_the_first_frames_are_left_over() -> None:
    a, b = caller(), listener()
    proof = a.receive(b.receive(a.start()))
    attach_incoming = b.receive(proof + b"early")
    assert b.leftover == b"early"
    a.receive(attach_incoming + b"first frame")
    assert a.leftover == b"first frame"


def test_authorize_is_asked_once_and_only_after_the_proof() -> None:
    asked: list[Hello] = []
    a, b = caller(), listener(authorize=lambda hello: asked.append(hello) or 0)
    proof = a.receive(b.receive(a.start()))
    assert asked == []
    b.receive(proof)
    assert asked == [Hello(ALICE, "session-1", 3)]


def test_an_error_in_authorize_is_not_blamed_on_the_peer() -> None:
    def authorize(hello: Hello) -> int:
        raise ValueError("our own bug")

    a, b = caller(), listener(authorize=authorize)
    with pytest.raises(ValueError, match="our own bug"):
        b.receive(a.receive(b.receive(a.start())))


@pytest.mark.parametrize("why", [Why.ADMISSION, Why.LEAVING])
def test_the_reason_not_to_authorize_reaches_the_caller(why: Why) -> None:
    a, b = caller(), listener(authorize=lambda hello: Refused(why, "so it is"))
    for error in converse(a, b):
        assert isinstance(error, ProtocolError)
        assert "so it is" in str(error)
    assert a.why is b.why is why
    assert a.proven


def test_a_wrong_secret_is_named_at_both_ends() -> None:
    a, b = caller(secret=b"another secret, as long"), listener()
    for error in converse(a, b):
        assert isinstance(error, AuthenticationError)
        assert "same secret" in str(error)
        assert "REMORA_SECRET" in str(error)
    assert b.why is a.why is Why.SECRET
    assert not a.proven


NOT_OURS = [
    caller(secret=b"another secret, as long").start(),
    caller(secret=b"", insecure=True).start(),
    MAGIC + bytes([VERSION + 1]) + caller().start()[5:],
    header(Kind.HELLO, True, MAX_BODY + 1),
    header(Kind.REFUSAL, True, 0) + bytes(SEAL_SIZE),
]


@pytest.mark.parametrize("said", NOT_OURS, ids=["secret", "insecure", "version", "oversize", "refusal"])
@pytest.mark.parametrize("proven_before", [False, True])
def test_a_stranger_gets_no_seal_that_was_made_with_our_secret(said: bytes, proven_before: bool) -> None:
    """Nor does one that replays the first message of a member."""
    b = listener()
    if proven_before:
        b.receive(caller().start())
    with pytest.raises(RemoraError):
        b.receive(said)
    assert not b.proven
    assert b.refusal[-SEAL_SIZE:] in (b"", bytes(SEAL_SIZE))


@pytest.mark.parametrize("why", [Why.GROUP, Why.RESTARTED, Why.WORKER, Why.ADMISSION, Why.LEAVING])
def test_what_a_peer_says_of_itself_is_proven(why: Why) -> None:
    me = {Why.GROUP: Identity("bob", 1, "b" * 16, "group-2"), Why.RESTARTED: Identity("bob", 1, "c" * 16, "group-1")}
    authorize = (lambda hello: Refused(why, "no")) if why in (Why.ADMISSION, Why.LEAVING) else (lambda hello: 0)
    b = listener(me=me.get(why, BOB), authorize=authorize)
    a = caller(expected=Identity("carol", 2, "b" * 16, "group-1")) if why is Why.WORKER else caller()
    converse(a, b)
    assert a.why is b.why is why
    assert a.proven
    assert b.proven


def test_an_impostor_that_listens_is_found_out_by_the_caller() -> None:
    """It lets anyone in, and has no secret to seal its challenge with."""
    a, impostor = caller(), listener(secret=b"guessed")
    impostor._transcript += a.start()
    challenge = impostor._message(Kind.CHALLENGE, {"name": "bob", "id": 1, "incarnation": "b" * 16, "group": "group-1"})
    with pytest.raises(AuthenticationError, match="same secret"):
        a.receive(challenge)


def test_insecure_ends_need_no_secret() -> None:
    a, b = caller(secret=b"", insecure=True), listener(secret=b"", insecure=True)
    assert converse(a, b) == (None, None)


@pytest.mark.parametrize("insecure_end", ["caller", "listener"])
def test_an_end_with_a_secret_refuses_one_without(insecure_end: str) -> None:
    bare = {"secret": b"", "insecure": True}
    a, b = caller(**bare if insecure_end == "caller" else {}), listener(**bare if insecure_end == "listener" else {})
    for error in converse(a, b):
        assert isinstance(error, AuthenticationError)
        assert "started insecure" in str(error)
    assert a.why is b.why is Why.INSECURE


def test_saying_insecure_does_not_drop_a_secret_that_was_given() -> None:
    a, b = caller(insecure=True), listener(secret=b"", insecure=True)
    assert all(isinstance(error, AuthenticationError) for error in converse(a, b))


def test_no_secret_and_not_insecure_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(AuthenticationError, match="no secret"):
        caller(secret=b"")


@pytest.mark.parametrize(
    ("me", "expected", "why", "text"),
    [
        (Identity("bob", 1, "b" * 16, "group-2"), None, Why.GROUP, "another group"),
        (Identity("bob", 1, "c" * 16, "group-1"), BOB, Why.RESTARTED, "has been restarted"),
        (Identity("carol", 2, "b" * 16, "group-1"), BOB, Why.WORKER, "it is carol, id 2, and not bob, id 1"),
    ],
)
def test_the_wrong_peer_is_told_apart(me: Identity, expected: Identity | None, why: Why, text: str) -> None:
    a, b = caller(expected=expected), listener(me=me)
    for error in converse(a, b):
        assert isinstance(error, ProtocolError)
        assert text in str(error)
    assert a.why is b.why is why
    assert a.proven or b.proven


class TrustingCaller(Initiator):
    def _check(self, peer: Identity) -> None:
        pass


class TrustingListener(Responder):
    def _read_hello(self, body: dict[str, object]) -> Hello:
        return Hello(ALICE, "session-1", 3)


STRANGERS = [(Identity("bob", 1, "b" * 16, "group-2"), Why.GROUP), (Identity("bob", 1, "c" * 16, "group-1"), Why.RESTARTED)]


@pytest.mark.parametrize(("me", "why"), STRANGERS)
def test_the_caller_checks_for_itself(me: Identity, why: Why) -> None:
    a, b = caller(), TrustingListener(me, lambda hello: 0, SECRET)
    converse(a, b)
    assert a.why is why


@pytest.mark.parametrize(("me", "why"), STRANGERS)
def test_the_listener_checks_for_itself(me: Identity, why: Why) -> None:
    a, b = TrustingCaller(ALICE, "session-1", 3, SECRET, expected=BOB), listener(me=me)
    converse(a, b)
    assert b.why is why


def test_a_caller_that_expects_nobody_takes_any_worker_of_its_group() -> None:
    a, b = caller(expected=None), listener()
    assert converse(a, b) == (None, None)


def test_another_version_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = caller(), listener()
    hello = bytearray(a.start())
    hello[4] = VERSION + 1
    with pytest.raises(ProtocolError, match=f"the peer {VERSION + 1}, this end {VERSION}"):
        b.receive(bytes(hello))
    monkeypatch.setattr(conversation, "VERSION", VERSION + 1)
    with pytest.raises(ProtocolError, match=f"the peer {VERSION}, this end {VERSION + 1}"):
        a.receive(b.refusal)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "it looks like HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "it looks like TLS"),
        (b"\x80\x04\x95\x10\x00\x00\x00", "its first bytes are"),
    ],
)
def test_strangers_are_refused_and_told_nothing(data: bytes, text: str) -> None:
    b = listener()
    with pytest.raises(ProtocolError, match=text):
        b.receive(data)
    assert b.refusal == b""


@pytest.mark.parametrize("data", [b"", b"R", MAGIC, MAGIC + bytes([VERSION])])
def test_a_link_closed_early_is_named(data: bytes) -> None:
    b = listener()
    assert deliver(b, data, 1) == (b"", None)
    with pytest.raises(ProtocolError, match="closed the connection"):
        b.receive(b"")


def test_an_announcement_of_too_much_is_refused_before_it_is_read() -> None:
    b = listener()
    with pytest.raises(ProtocolError, match="more than 4096 bytes"):
        b.receive(header(Kind.HELLO, True, MAX_BODY + 1))


def test_bytes_of_a_header_that_changed_places_are_noticed() -> None:
    """A length and what guards it, too: so a longer message is not waited for."""
    for length in (2, 0x15C, 0x1A3, MAX_BODY):
        good = header(Kind.HELLO, True, length)
        for i, j in combinations(range(LENGTH_AT, HEADER.size), 2):
            swapped = bytearray(good)
            swapped[i], swapped[j] = good[j], good[i]
            if swapped != good:
                with pytest.raises(ProtocolError, match="arrived damaged"):
                    listener().receive(bytes(swapped))


@pytest.mark.parametrize("bit", range(8 * LENGTH_AT, 8 * HEADER.size))
def test_a_damaged_length_is_refused_before_anything_is_waited_for(bit: int) -> None:
    b, hello = listener(), bytearray(caller().start())
    hello[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="arrived damaged"):
        b.receive(bytes(hello[: HEADER.size]))
    assert not b.proven


@given(st.binary(min_size=4, max_size=8192), st.integers(1, 64))
def test_random_bytes_are_refused(data: bytes, size: int) -> None:
    b = listener()
    reply, error = deliver(b, data, size)
    if error is None:
        assert data.startswith(MAGIC)
        assert reply == b""
    assert b.result is None


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"name":1}', b'{"name":"a b","id":0,"incarnation":"i","group":"g"}'],
)
def test_sealed_nonsense_is_malformed(body: bytes) -> None:
    """Even a peer that knows the secret must make sense: it may be a buggy one."""
    a, b = caller(), listener()
    message = header(Kind.HELLO, True, len(body)) + body
    a._transcript += message
    with pytest.raises(ProtocolError, match="makes no sense"):
        b.receive(message + a._seal(a.role))
    assert b.why is Why.MALFORMED


@pytest.mark.parametrize("kind", [Kind.PROOF, Kind.WELCOME, 77])
def test_a_sealed_message_out_of_turn_is_malformed(kind: Kind) -> None:
    a, b = caller(), listener()
    with pytest.raises(ProtocolError, match=f"kind {int(kind)} instead of HELLO"):
        b.receive(a._message(kind, {}))


@pytest.mark.parametrize("size", [HEADER.size, HEADER.size + 40])
def test_another_message_than_the_awaited_one_is_refused_before_its_end_is_waited_for(size: int) -> None:
    """A longer one in its place: its sender has sent all that it has, and waits for an answer."""
    a, b = caller(), listener()
    hello = a.start()
    b.receive(hello)
    for end in (a, b):
        with pytest.raises(ProtocolError, match=f"kind 1 instead of {end.awaits.name}"):
            end.receive(hello[:size])
        assert end.why is Why.MALFORMED
        assert not end.proven
        assert end.refusal[-SEAL_SIZE:] == bytes(SEAL_SIZE)


@pytest.mark.parametrize("change", [{"received": -1}, {"received": True}, {"id": 1 << 15}, {"session": "s" * 201}])
def test_fields_out_of_range_are_malformed(change: dict[str, object]) -> None:
    a, b = caller(), listener()
    body = {"name": "a", "id": 0, "incarnation": "i", "group": "group-1", "session": "s", "received": 0} | change
    with pytest.raises(ProtocolError, match="makes no sense"):
        b.receive(a._message(Kind.HELLO, body))


def test_the_words_of_a_stranger_cannot_forge_log_lines() -> None:
    a, b = caller(), listener()
    a.start()
    refusal = b._message(Kind.REFUSAL, {"why": "ADMISSION", "detail": "no\n\x1b[2JERROR root: all is lost" + "x" * 999})
    with pytest.raises(ProtocolError) as caught:
        a.receive(refusal)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"why":7,"detail":8}', b'{"why":"NEW REASON"}'])
def test_a_garbled_refusal_is_still_a_refusal(body: bytes) -> None:
    a = caller()
    a.start()
    with pytest.raises(ProtocolError, match="refused the connection"):
        a.receive(header(Kind.REFUSAL, True, len(body)) + body + bytes(SEAL_SIZE))
    assert not a.proven


def test_a_finished_handshake_takes_no_more() -> None:
    a, b = caller(), listener()
    converse(a, b)
    with pytest.raises(ProtocolError, match="is over"):
        b.receive(b"more")
    assert b.result is not None


def recorded() -> list[bytes]:
    """The four messages of one successful conversation."""
    messages: list[bytes] = []
    converse(caller(), listener(), tamper=lambda turn, data: messages.append(data) or data)
    assert len(messages) == 4
    return messages


def test_a_replayed_caller_is_refused() -> None:
    hello, _, proof, _ = recorded()
    asked: list[Hello] = []
    b = listener(authorize=lambda hello: asked.append(hello) or 0)
    b.receive(hello)
    with pytest.raises(AuthenticationError):
        b.receive(proof)
    assert asked == []


def test_a_replayed_listener_is_refused() -> None:
    _, challenge, _, _ = recorded()
    a = caller()
    a.start()
    with pytest.raises(AuthenticationError):
        a.receive(challenge)


def test_a_replayed_welcome_is_refused() -> None:
    _, _, _, attach_incoming = recorded()
    a, b = caller(), listener()
    a.receive(b.receive(a.start()))
    with pytest.raises(AuthenticationError):
        a.receive(attach_incoming)


def test_what_makes_a_conversation_unique_is_the_nonce() -> None:
    """With fixed nonces the replay works: it is the nonce, and nothing else by chance, that stops it."""
    a, b = caller(nonce=b"n" * 16), listener(nonce=b"m" * 16)
    proof = a.receive(b.receive(a.start()))
    again = listener(nonce=b"m" * 16)
    again.receive(caller(nonce=b"n" * 16).start())
    again.receive(proof)
    assert again.result is not None


@pytest.mark.parametrize("relabelled", [False, True])
def test_a_reflected_message_is_refused(relabelled: bool) -> None:
    """An attacker without the secret sends each end its own seals back."""
    a, b = caller(), listener()
    hello = a.start()
    challenge = b.receive(hello)
    for end, own, kind in ((a, hello, Kind.CHALLENGE), (b, challenge, Kind.PROOF)):
        echo = bytearray(own)
        if relabelled:
            echo[: HEADER.size] = header(kind, True, len(own) - HEADER.size - SEAL_SIZE)
        with pytest.raises(AuthenticationError):
            end.receive(bytes(echo))


def test_the_role_is_what_stops_a_reflection() -> None:
    a = caller()
    hello = a.start()
    assert hello[-SEAL_SIZE:] != listener()._seal(b"") != caller()._seal(b"x")
    twin = caller()
    twin._transcript += hello[:-SEAL_SIZE]
    assert twin._seal(twin.role) == hello[-SEAL_SIZE:] != twin._seal(twin.peer_role)


@settings(max_examples=400)
@given(st.data(), st.integers(0, 3), st.sampled_from([1, 13, 10**6]), st.booleans())
def test_no_tampered_conversation_is_accepted_by_both(data: st.DataObject, turn: int, size: int, secured: bool) -> None:
    def tamper(now: int, message: bytes) -> bytes:
        if now != turn:
            return message
        at = data.draw(st.integers(0, len(message) - 1))
        action = data.draw(st.sampled_from(["flip", "drop", "insert", "cut"]))
        if action == "flip":
            return message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]
        if action == "drop":
            return message[:at] + message[at + 1 :]
        if action == "insert":
            return message[:at] + data.draw(st.binary(min_size=1, max_size=8)) + message[at:]
        return message[:at]

    mode = {} if secured else {"secret": b"", "insecure": True}
    a, b = caller(**mode), listener(**mode)
    sent: list[bytes] = []
    errors = converse(a, b, lambda now, m: sent.append(t := tamper(now, m)) or t, size)
    intact = a.result is not None and b.result is not None
    if intact:  # only an insertion that repeats the byte it pushes along, or trailing bytes, leave a message as it was
        assert a.result == Accepted(BOB, "session-1", 5)
        assert b.result == Accepted(ALICE, "session-1", 3)
        assert a.leftover or b.leftover
    else:
        assert any(errors)


def test_every_single_bit_of_every_message_counts() -> None:
    for turn, message in enumerate(recorded()):
        for bit in range(len(message) * 8):

            def flip(now: int, data: bytes, turn: int = turn, bit: int = bit) -> bytes:
                if now != turn:
                    return data
                at = bit // 8 % len(data)
                return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]

            a, b = caller(), listener()
            converse(a, b, flip)
            assert a.result is None or b.result is None, (turn, bit)


@given(st.text(max_size=300))
def test_any_reason_not_to_authorize_fits_into_a_refusal(reason: str) -> None:
    a, b = caller(), listener(authorize=lambda hello: Refused(Why.ADMISSION, reason))
    errors = converse(a, b)
    assert all(errors)
    assert a.why is Why.ADMISSION


def test_messages_are_plain_json() -> None:
    hello = caller().start()
    body = json.loads(hello[HEADER.size : -SEAL_SIZE])
    assert body["name"] == "alice"
    assert body["expected"] == BOB.incarnation
    assert len(bytes.fromhex(body["nonce"])) == 16


def test_repr_shows_the_state_and_not_the_secret() -> None:
    a, b = caller(), listener()
    assert "awaits CHALLENGE" in repr(a)
    converse(a, b)
    assert "Accepted" in repr(a)
    assert SECRET.decode() not in repr(a) + repr(b)
