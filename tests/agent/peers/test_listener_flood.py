"""What strangers leave behind in memory: nothing, and without the help of the collector."""

from __future__ import annotations

import gc
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers.pending_connections import BEGUN, GREETED, PendingTable
from remora.protocol.conversation import MAGIC, VERSION
from remora.protocol.handshake import Identity, Initiator
from tests.agent.alone import worker_alone
from tests.eventually import eventually

KNOCKS = 600
SAID = {"nothing": b"", "garbage": b"GET / HTTP/1.1\r\n\r\n", "half a hello": MAGIC + bytes([VERSION])}


@pytest.fixture
def port() -> Iterator[int]:
    with worker_alone(transports=["tcp"], connect_timeout=60.0):
        (address,) = rpc._get_current_rpc_agent().record.addresses
        yield int(address.rsplit(":", 1)[1])


def strangers() -> int:
    return len(rpc._get_current_rpc_agent().agent.listener._pending)


def census() -> Counter[str]:
    """Objects of ours, and of what they are made of, by type."""
    found = Counter(type(each).__qualname__ for each in gc.get_objects())
    return Counter({name: n for name, n in found.items() if n > 50})


@pytest.mark.parametrize("what", SAID)
def test_nothing_is_left_of_strangers(port: int, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "remora")  # what is logged is kept by the test run

    def knock(times: int) -> None:
        for _ in range(times):
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
                if SAID[what]:
                    connection.sendall(SAID[what])

    knock(20)
    eventually(lambda: not strangers())
    gc.collect()
    gc.disable()
    try:
        before = census()
        knock(KNOCKS)
        eventually(lambda: not strangers())

        def grown() -> dict[str, int]:
            return {name: n - before[name] for name, n in census().items() if n - before[name] > KNOCKS / 4}

        eventually(lambda: not grown())  # (what the pool has to do for the last of them takes a moment)
    finally:
        gc.enable()


def test_those_who_stay_are_bounded(port: int) -> None:
    limit = 64
    rpc._get_current_rpc_agent().agent.listener._pending = PendingTable(limit)
    with ExitStack() as stack:
        for _ in range(limit + 50):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
        eventually(lambda: strangers() == limit - limit // 4)
    eventually(lambda: not strangers())


def table() -> PendingTable[Any]:
    found: PendingTable[Any] = rpc._get_current_rpc_agent().agent.listener._pending
    return found


def stages() -> list[int]:
    return [each.stage for each in table()]


def test_a_greeting_that_is_said_again_does_not_keep_its_place(port: int) -> None:
    """A stranger who has heard a caller's HELLO can repeat it, and not go on: that is no reason to spare it."""
    ours = rpc._get_current_rpc_agent().agent.listener.handshake_client
    caller = Identity("caller", 1, "c" * 32, ours.identity.group)

    def hello() -> bytes:
        return Initiator(caller, "s" * 32, 0, ours.secret, insecure=ours.insecure).start()

    heard = hello()
    with ExitStack() as stack:
        for said in (heard, heard, heard, hello()):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
            connection.sendall(said)
            assert connection.recv(1)  # the challenge is under way: it has been sorted
        assert sorted(stages()) == [BEGUN, BEGUN, GREETED, GREETED]
        connection.sendall(MAGIC)  # the last one goes on, in pieces: it keeps what it has
        eventually(lambda: not any(each.has_spoken() for each in table()))
        assert sorted(stages()) == [BEGUN, BEGUN, GREETED, GREETED]
    eventually(lambda: not strangers())
