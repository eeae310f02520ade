"""Who comes at the very moment at which a worker ends: no connection is left open, whichever step it has got to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from remora import rpc
from remora.agent.peers.handshake_client import PeerLeaving
from remora.protocol.handshake import Refused, Why
from remora.testing.world import World
from remora.transport.link import StreamLink


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def world() -> Iterator[World]:
    with World(2, watch=0) as world:
        yield world


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def is_closed(theirs: socket.socket) -> bool:
    """Whether the other end of this connection was closed."""
    theirs.settimeout(5.0)
    return theirs.recv(1) == b""


def test_a_connection_that_was_accepted_when_the_door_closed(
    world: World, ends: tuple[socket.socket, socket.socket]
) -> None:
    door = world[0].agent.listener
    door.close()
    door._let_in(ends[0])
    assert ends[0].fileno() == -1
    assert is_closed(ends[1])
    assert not door.descriptors()


def test_a_caller_that_had_proven_itself_when_the_worker_stopped(
    world: World, ends: tuple[socket.socket, socket.socket]
) -> None:
    peers = world[0].agent.peers
    world[0].stop()
    world[0].agent.admission.attach_incoming(world[1].record, "a session", StreamLink(ends[0], "worker1 (caller)"), 0, b"")
    assert ends[0].fileno() == -1
    assert is_closed(ends[1])
    assert peers.find("worker1").incoming is None


def test_who_dials_while_a_worker_says_goodbye_is_told_that_it_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, whoever missed the goodbye itself would take the worker for dead."""
    leaving = world[1].agent.peers.farewells
    say_goodbye, answers = leaving.say, []

    def say_goodbye_and_look(patience: float) -> None:
        say_goodbye(patience)
        channel = world[0].agent.peers.find("worker1").outgoing
        with pytest.raises(PeerLeaving) as caught:
            world[0].handshake_client.to(world[1].record, channel, world[0].clock.now() + 5.0)
        answers.append(str(caught.value))

    monkeypatch.setattr(leaving, "say", say_goodbye_and_look)
    world[1].stop()
    assert Why.LEAVING.value in answers[0]


@pytest.mark.parametrize(
    ("refused", "state"), [(Refused(Why.LEAVING), "left"), (Refused(Why.ADMISSION, Why.LEAVING.value), "dead")]
)
def test_the_reason_of_a_refusal_decides_and_not_its_text(
    world: World, refused: Refused, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said to people may quote anything."""
    assert world.run(0, rpc.rpc_sync, "worker1", double, args=(2,)) == 4
    monkeypatch.setattr(world[1].agent.admission, "authorize", lambda record, session_id: refused)
    peer = world[0].agent.peers.find("worker1")
    assert peer.outgoing.link is not None
    peer.outgoing.link.sock.shutdown(socket.SHUT_RDWR)
    world.wait_until(lambda: peer.gone)
    assert peer.state == state


def test_until_then_it_is_let_in(world: World) -> None:
    assert world.run(1, rpc.rpc_sync, "worker0", double, args=(2,)) == 4
    incoming = world[0].agent.peers.find("worker1").incoming
    assert incoming is not None
    assert incoming.link is not None
