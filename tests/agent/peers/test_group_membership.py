"""The messages of membership: each has a type of its own, which fault plans can name; nonsense is an error of its sender."""

from __future__ import annotations

from typing import Any

import pytest

from remora import rpc
from remora.agent.peers.greeting import greet_neighbours
from remora.errors import ProtocolError, RemoraError
from remora.testing.world import World
from remora.vocabulary import messages
from remora.vocabulary.messages import Message, MessageType
from remora.wire.message_codec import encode
from remora.wire.packed import Packed

TIMEOUT = 20.0
EVENTS: list[type[Message]] = [
    messages.Greeting,
    messages.Joined,
    messages.Leaving,
    messages.Lost,
    messages.ConfirmDeath,
    messages.ConfirmLeave,
    messages.LossConfirmed,
]


def send(world: World, kind: int, body: bytes) -> Any:
    """Worker0 sends worker1 a request; a future of the answer."""
    agent = world[0].agent
    return agent.caller.call_async(agent.peers.find("worker1"), kind, Packed(body, [], [], []), 0, TIMEOUT, "membership")


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.type.name)
@pytest.mark.parametrize("body", [b"", b"\x80\5K\7.", b"\x80\5X\3\0\0\0abc."], ids=["empty", "a number", "a text"])
def test_nonsense_is_an_error_of_its_sender_by_type_and_name(kind: type[Message], body: bytes) -> None:
    with World(2, watch=0) as world:
        with pytest.raises(ProtocolError, match=f"a {kind.type.name} from worker0 makes no sense"):
            send(world, kind.type, body).wait(TIMEOUT)
        assert [member.state for member in world[1].members()] == ["alive", "alive"]


def test_a_record_that_is_none_is_refused() -> None:
    with World(2, watch=0) as world, pytest.raises(ProtocolError, match="a JOINED from worker0 makes no sense"):
        send(world, MessageType.JOINED, encode(messages.Joined(b'{"name": "evil"}')).body).wait(TIMEOUT)


@pytest.mark.parametrize("kind", [MessageType.FORWARD_AUTOGRAD_REQ, 0x1FF])
def test_a_request_of_an_unknown_type_names_sender_and_type(kind: int) -> None:
    with World(2, watch=0) as world, pytest.raises(ProtocolError, match=f"worker0 sent a message of .*{kind:#x}"):
        send(world, kind, b"").wait(TIMEOUT)


def test_what_cannot_be_acted_on_is_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(2, watch=0) as world:
        key = world[1].agent.peers.find("worker0").key

        def stumble(*args: object) -> None:
            raise ZeroDivisionError("for the test")

        monkeypatch.setattr(world[1].agent.peers.failure_detector, "verify", stumble)
        with pytest.raises(ZeroDivisionError):
            send(world, MessageType.LOST, encode(messages.Lost(key, 0.0)).body).wait(TIMEOUT)


def test_a_fault_plan_names_one_event_and_spares_the_others() -> None:
    with World(3, watch=0) as world:
        world.set_faults("fail GREETING worker0->worker1 every; fail LOST worker0->worker1 every")
        with pytest.raises(RemoraError, match="failed intentionally"):
            greet_neighbours(world[0].agent, world[0].record, TIMEOUT)
        key = world[1].agent.peers.find("worker2").key
        with pytest.raises(RemoraError, match="failed intentionally"):
            send(world, MessageType.LOST, encode(messages.Lost(key, 0.0)).body).wait(TIMEOUT)
        send(world, MessageType.LOSS_CONFIRMED, encode(messages.LossConfirmed(key)).body).wait(TIMEOUT)


@pytest.mark.parametrize(
    ("kind", "body", "what"),
    [
        (MessageType.GIVE_BACK, bytes(9), "a GIVE_BACK from worker0 makes no sense: 9 bytes"),
        (0x7F, b"", "worker0 sent a message of the unknown type 0x7f"),
    ],
)
def test_a_word_that_makes_no_sense_is_logged_and_costs_nothing(
    kind: int, body: bytes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with World(2, watch=0) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", int) == 0
        link = world[0].agent.peers.find("worker1").outgoing.link
        world[0].agent.peers.find("worker1").outgoing.send(kind, 0, body)
        assert world.run(0, rpc.rpc_sync, "worker1", int) == 0
        assert world[0].agent.peers.find("worker1").outgoing.link is link
    assert what in caplog.text


@pytest.mark.parametrize(
    "kind",
    [
        messages.RRefForkRequest,
        messages.PythonRRefFetchCall,
        messages.ScriptRRefFetchCall,
        messages.RRefUserDelete,
        messages.RRefChildAccept,
    ],
    ids=lambda kind: kind.type.name,
)
def test_so_is_nonsense_about_references(kind: type[Message]) -> None:
    with World(2, watch=0) as world:
        with pytest.raises(ProtocolError, match=f"a {kind.type.name} from worker0 makes no sense"):
            send(world, kind.type, bytes(7)).wait(TIMEOUT)
        assert world.run(0, rpc.remote, "worker1", int).to_here() == 0
