"""Payloads as bodies of frames: they come back, and what is no payload is refused with sender and type."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from remora.errors import ProtocolError
from remora.vocabulary import messages
from remora.vocabulary.ids import GloballyUniqueId, WorkerKey
from remora.vocabulary.messages import MESSAGES, Layout, Message
from remora.wire.message_codec import decode, encode, from_value, to_value
from remora.wire.pickler import unpack

ID, FORK, KEY = GloballyUniqueId(3, 2**63), GloballyUniqueId(4, 5), WorkerKey(1, "abc")
PASS = (1, 2, 3, True, False)
FAILED = messages.PassFailure(1, "worker1", b"failure")
CALL = (len, ([1, 2],), {"key": None})

SAMPLES: list[Message] = [
    messages.PythonCall(*CALL),
    messages.PythonRemoteCall(7, *CALL[1:]),
    messages.ScriptCall("operator", "add", (1, 2), {}),
    messages.ScriptRemoteCall("function", "f", (), {}),
    messages.PythonRet([1]),
    messages.ScriptRet(None),
    messages.Failure("worker1", "ValueError()", "On worker1:", ("a note",), (b"recipe", (b"buffer",))),
    messages.Failure("worker1", "ValueError()", "On worker1:", (), None),
    messages.RemoteRet(),
    messages.PythonRRefFetchCall(ID),
    messages.ScriptRRefFetchCall(ID),
    messages.PythonRRefFetchRet({"a": 1}),
    messages.ScriptRRefFetchRet(1.5),
    messages.RRefForkRequest(ID, FORK),
    messages.RRefChildAccept(FORK),
    messages.RRefUserDelete(False, (ID, FORK, ID, FORK)),
    messages.RRefUserDelete(True, (ID, FORK)),
    messages.RRefAck(),
    messages.BackwardPartReq(PASS, {7: [0, 1]}),
    messages.BackwardPartResp(),
    messages.BackwardPartResp(FAILED),
    messages.BackwardAutogradReq(PASS, None, {7: [1.0]}),
    messages.BackwardAutogradReq(PASS, {7: [0]}, {}),
    messages.BackwardAutogradResp(),
    messages.BackwardAutogradResp(None, {1: (2, ["a message"])}),
    messages.BackwardEndReq(PASS, FAILED),
    messages.BackwardEndResp(),
    messages.RRefBackwardReq(ID, 1, True),
    messages.RRefBackwardResp(),
    messages.CleanupAutogradContextReq(1 << 48),
    messages.AutogradContextHeldReq(1 << 48),
    messages.AutogradContextHeldResp(False),
    messages.Greeting(),
    messages.Joined(b"{}"),
    messages.Leaving(),
    messages.Lost(KEY, 2.5),
    messages.ConfirmDeath(KEY),
    messages.ConfirmLeave(KEY),
    messages.LossConfirmed(KEY),
    messages.MembershipAck(),
    messages.Progress(True),
    messages.Progress(False),
    messages.Function("module", "Class.name"),
    messages.GiveBack((1, 2**64 - 1)),
    messages.GiveBack(()),
]
PICKLED = (Layout.VALUE, Layout.FIELDS, Layout.FIELDS_OR_NONE)


def name(message: Message) -> str:
    return message.type.name


def test_every_payload_has_a_sample() -> None:
    assert {sample.type for sample in SAMPLES} == {
        kind.type for kind in MESSAGES.values() if kind.layout is not Layout.EMPTY
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=name)
def test_a_payload_comes_back(sample: Message) -> None:
    body = encode(sample).body
    for form in (body, bytearray(body), memoryview(body)):
        found = decode(type(sample), form, "worker1")
        assert found == sample
        assert type(found) is type(sample)


@pytest.mark.parametrize("sample", [each for each in SAMPLES if each.layout in PICKLED], ids=name)
def test_no_class_of_ours_names_itself_in_what_is_pickled(sample: Message) -> None:
    """The types stand for tuples and values: to name them in each message would make it longer."""
    body = encode(sample).body
    assert type(sample).__name__.encode() not in body
    assert from_value(type(sample), unpack(body), "worker1") == sample


@pytest.mark.parametrize("sample", [each for each in SAMPLES if not each.of_program], ids=name)
@pytest.mark.parametrize("body", [b"\xff" * 9, b"\x80\5N", b"\x80\5cno.such\nthing\n."])
def test_a_damaged_body_names_sender_and_type(sample: Message, body: bytes) -> None:
    if sample.type is messages.MessageType.FUNCTION:
        return  # any text is a name; the call that says its number fails
    with pytest.raises(ProtocolError, match=f"{sample.type.name} from worker1 makes no sense"):
        decode(type(sample), body, "worker1")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (messages.Lost, None, "None in the place of 2 fields"),
        (messages.Lost, (KEY,), "a tuple in the place of 2 fields"),
        (messages.Lost, (KEY, 1.0, 2), "a tuple in the place of 2 fields"),
        (messages.Lost, [KEY, 1.0], "a list in the place of 2 fields"),
        (messages.Lost, ("worker1", 1.0), "its worker is 'worker1'"),
        (messages.Lost, (KEY, "long"), "its silent_for is 'long'"),
        (messages.Joined, "{}", "its record is '{}'"),
        (messages.ConfirmDeath, "nonsense", "its worker is 'nonsense'"),
        (messages.BackwardPartReq, (PASS, 1), "its part is 1"),
        (messages.BackwardPartReq, (PASS[:4], {}), "its key is a tuple"),
        (messages.BackwardPartReq, ((1, 2, "3", True, True), {}), "its key is a tuple"),
        (messages.BackwardAutogradReq, (PASS, None, None), "its gradients is None"),
        (messages.BackwardAutogradResp, (ValueError(), {}), "its failure is a ValueError"),
        (messages.AutogradContextHeldResp, None, "its held is None"),
    ],
)
def test_a_payload_of_other_fields_is_refused(kind: type[Message], value: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=f"a {kind.type.name} from worker1 makes no sense: {why}"):
        from_value(kind, value, "worker1")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (messages.PythonRRefFetchCall, bytes(15)),
        (messages.RRefChildAccept, bytes(32)),
        (messages.RRefForkRequest, bytes(16)),
        (messages.RRefForkRequest, bytes(31)),
        (messages.RRefUserDelete, b""),
        (messages.RRefUserDelete, b"\2" + bytes(32)),
        (messages.RRefUserDelete, b"\0" + bytes(16)),
        (messages.RRefUserDelete, b"\0" + bytes(33)),
        (messages.Progress, b"2"),
        (messages.GiveBack, bytes(9)),
        (messages.Ping, b"x"),
    ],
)
def test_bytes_of_another_length_are_refused(kind: type[Message], body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{kind.type.name} from worker1 makes no sense"):
        decode(kind, body, "worker1")


def test_what_fails_in_a_value_of_the_program_is_not_taken_for_damage() -> None:
    with pytest.raises(ModuleNotFoundError):
        decode(messages.PythonRet, b"\x80\5cno.such\nthing\n.", "worker1")


def test_an_answer_without_news_is_none() -> None:
    assert to_value(messages.BackwardAutogradResp()) is None
    assert encode(messages.BackwardAutogradResp()).body == pickle.dumps(None, 5)
