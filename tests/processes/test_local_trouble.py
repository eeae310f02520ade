"""A worker that lacks descriptors says so where it needs one. Its peers are not to blame, and it recovers."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import pytest

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

_held: list[int] = []


def use_up_descriptors() -> None:
    """From now on this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _held.append(soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        while True:
            _held.append(os.dup(0))
    except OSError:
        pass


def give_descriptors_back() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_held[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while len(_held) > 1:
        os.close(_held.pop())
    _held.clear()


def call_without_descriptors(to: str) -> tuple[float, str, str]:
    """Call a worker that was never called, then all of them."""
    use_up_descriptors()
    try:
        return targets.timed_call(to, targets.double, 1, timeout=20.0)
    finally:
        give_descriptors_back()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_call_that_needs_a_descriptor_fails_and_nobody_dies(transport: str) -> None:
    with Workers(3, options={"transports": [transport], "watch": 0}) as workers:
        workers.run(0, witness.listen)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        seconds, kind, words = workers.run(0, call_without_descriptors, "worker2")
        assert kind == "CallNotSent", words
        assert "no file descriptors left" in words
        assert "ulimit -n" in words
        assert "worker2 is not to blame" in words
        assert seconds < 10.0
        assert workers.run(0, witness.heard) == []
        for name in ("worker1", "worker2"):
            assert workers.run(0, targets.call, name, targets.double, 2) == 4


def processor_seconds() -> float:
    used = os.times()
    return used.user + used.system


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_who_cannot_accept_a_connection_lets_it_wait(transport: str) -> None:
    """Worker 3 is no neighbour of worker 1: they have no connection from the start."""
    with Workers(4, options={"transports": [transport], "watch": 0}) as workers:
        workers.run(3, witness.listen)
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        workers.run(1, use_up_descriptors)
        calling = workers.start(3, targets.timed_call, "worker1", targets.double, 2, timeout=20.0)
        eventually(lambda: "cannot accept connections" in workers.output(1))
        before = workers.run(1, processor_seconds)
        time.sleep(1.0)
        assert workers.run(1, processor_seconds) - before < 0.3, "it does not try again and again"
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        assert not calling.done()
        workers.run(1, give_descriptors_back)
        assert calling.result(10.0)[1:] == ("", "4")
        assert workers.output(1).count("cannot accept connections") == 1
        assert "Died" not in workers.run(3, witness.kinds, "worker1")


def is_gone_without_descriptors(name: str) -> bool:
    worker: Any = rpc._get_current_rpc_agent()
    use_up_descriptors()
    try:
        gone: bool = worker.handshake_client.is_gone(worker.agent.peers.find(name).record)
        return gone
    finally:
        give_descriptors_back()


def test_nor_is_a_place_taken_from_one_that_cannot_be_looked_for() -> None:
    with Workers(2, options={"transports": ["tcp"], "watch": 0}) as workers:
        assert workers.run(0, is_gone_without_descriptors, "worker1") is False
