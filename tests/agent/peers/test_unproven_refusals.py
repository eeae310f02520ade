"""An impostor answers in the place of a peer: what it says without proof changes nothing for the peer that lives."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers import handshake_client
from remora.errors import AuthenticationError, WorkerLost
from remora.protocol.conversation import SEAL_SIZE, Kind, header
from remora.protocol.handshake import Identity, Responder, Why
from remora.testing.world import World
from tests.eventually import eventually

Answer = Callable[[bytes], bytes]

ABOUT_THE_PEER = [Why.ADMISSION, Why.LEAVING, Why.RESTARTED, Why.WORKER]


def double(x: int) -> int:
    return 2 * x


def unsealed(why: Why, detail: str = "") -> Answer:
    """A refusal that a stranger can make up."""
    body = json.dumps({"why": why.name, "detail": detail}).encode()
    return lambda hello: header(Kind.REFUSAL, True, len(body)) + body + bytes(SEAL_SIZE)


def of_another_secret(hello: bytes) -> bytes:
    """The challenge of a listener that lets anybody in and does not know the secret."""
    impostor = Responder(Identity("worker1", 1, "x", "y"), lambda hello: 0, b"guessed, and as long as any")
    impostor._transcript += hello
    return impostor._message(Kind.CHALLENGE, {"name": "worker1", "id": 1, "incarnation": "x", "group": "y"})


def of_a_web_server(hello: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n"


@contextmanager
def impostor(
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    say: Callable[[socket.socket, bytes], None] = socket.socket.sendall,
) -> Iterator[list[int]]:
    """The next connections that any worker of this process dials lead to an impostor; they are counted."""
    real, tries, threads = handshake_client.sockets.connect, [0], []

    def serve(sock: socket.socket) -> None:
        with sock:
            sock.settimeout(10.0)
            say(sock, answer(sock.recv(4096)))
            sock.recv(4096)

    def connect(address: Any, timeout: float, opened: Callable[[socket.socket], None]) -> socket.socket:
        tries[0] += 1
        if tries[0] > times:
            return real(address, timeout, opened)
        ours, theirs = socket.socketpair()
        opened(ours)
        threads.append(threading.Thread(target=serve, args=(theirs,)))
        threads[-1].start()
        return ours

    monkeypatch.setattr(handshake_client.sockets, "connect", connect)
    yield tries
    for thread in threads:
        thread.join(10.0)


def cut(world: World) -> None:
    link = world[0].agent.peers.find("worker1").outgoing.link
    assert link is not None
    link.sock.shutdown(socket.SHUT_RDWR)


FORGED: dict[str, Answer] = {
    "it leaves": unsealed(Why.LEAVING),
    "it gave us up": unsealed(Why.ADMISSION, "worker0 was given up; it must join again as a new worker"),
    "it was restarted": unsealed(Why.RESTARTED),
    "another worker": unsealed(Why.WORKER),
    "another group": unsealed(Why.GROUP),
    "another secret": unsealed(Why.SECRET),
    "another version": unsealed(Why.VERSION),
    "it is insecure": unsealed(Why.INSECURE),
    "a challenge of another secret": of_another_secret,
    "another program": of_a_web_server,
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_refusal_on_a_redial_does_not_end_a_live_peer(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with World(2, watch=0) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
        with impostor(FORGED[what], monkeypatch, times=3) as tries:
            cut(world)
            assert world.run(0, rpc.rpc_sync, "worker1", double, args=(4,)) == 8
        assert tries[0] > 3
        assert [member.state for member in world[0].members()] == ["alive", "alive"]


@pytest.mark.parametrize("why", ABOUT_THE_PEER)
def test_what_a_peer_would_prove_is_not_believed_of_a_stranger_either(
    why: Why, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first connection, too: who has the secret seals such an answer."""
    with World(2, watch=0) as world, impostor(unsealed(why, "so it is"), monkeypatch, times=3) as tries:
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(4,)) == 8
        assert tries[0] > 3


def test_an_impostor_that_stays_is_a_silent_peer_and_the_error_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(2, watch=0, silence_limit=0.6, suspect_after=0.3, heartbeat=0.1) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
        with impostor(FORGED["it leaves"], monkeypatch, times=10_000):
            cut(world)
            with pytest.raises(WorkerLost, match=r"proves nothing.*did not prove itself.*shutting down"):
                world.run(0, rpc.rpc_sync, "worker1", double, args=(4,))
            eventually(lambda: world[0].members()[1].state == "dead")
            assert world[0].members()[1].reason.startswith("it has been silent for")


def test_the_first_connection_names_a_wrong_secret_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That cannot be proven. The call fails, the peer is not given up, and the next call tries again."""
    with World(2, watch=0) as world, impostor(unsealed(Why.SECRET), monkeypatch, times=1):
        with pytest.raises(AuthenticationError, match="same secret"):
            world.run(0, rpc.rpc_sync, "worker1", double, args=(1,))
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(4,)) == 8


def test_an_impostor_that_speaks_slowly_is_a_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no sign of life: a stranger could hold up the calls, and the news of a death, for an hour."""
    heard = []

    def drip(sock: socket.socket, data: bytes) -> None:
        for at in range(len(data)):
            try:
                sock.send(data[at : at + 1])
            except OSError:  # it has hung up
                break
            heard.append(at)
            time.sleep(0.01)

    endless = header(Kind.CHALLENGE, True, 4000) + bytes(4000)
    with World(2, watch=0, silence_limit=0.6, suspect_after=0.3, heartbeat=0.1) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
        with impostor(lambda hello: endless, monkeypatch, times=10_000, say=drip):
            cut(world)
            with pytest.raises(WorkerLost, match="no answer for"):
                world.run(0, rpc.rpc_sync, "worker1", double, args=(4,))
            eventually(lambda: world[0].members()[1].state == "dead")
    assert max(heard) < 500
