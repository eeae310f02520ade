"""What strangers leave behind in memory: nothing, and without the help of the collector."""

from __future__ import annotations

import gc
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from remora import rpc
from remora.agent.peers.pending_connections import PendingTable
from remora.protocol.conversation import MAGIC, VERSION
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
    return len(rpc._get_current_rpc_agent().agent.listener._strangers)


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
    rpc._get_current_rpc_agent().agent.listener._strangers = PendingTable(limit)
    with ExitStack() as stack:
        for _ in range(limit + 50):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
        eventually(lambda: strangers() == limit - limit // 4)
    eventually(lambda: not strangers())
