"""Overload is not death: a worker that is slow, or that was not run itself, gives nobody up and is not given up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.peers import listener
from tests import hosts
from tests.eventually import eventually
from tests.hosts import Hosts
from tests.processes import targets, witness
from tests.workers import Workers

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there are hosts")
IMPATIENT = {"heartbeat": 0.2, "suspect_after": 0.6, "reconnect_timeout": 0.8, "silence_limit": 1.5, "connect_timeout": 0.4}


def shake_hands_slowly(seconds: float) -> None:
    """As on a host with much else to do: each step of a handshake takes long."""
    ready = listener._PendingConnection.ready

    def late(stranger: Any, events: int) -> None:
        time.sleep(seconds)
        ready(stranger, events)

    listener._PendingConnection.ready = late  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_handshake_may_take_longer_than_a_connection_has_time_to_answer(transport: str) -> None:
    with Workers(2, options={**IMPATIENT, "silence_limit": 4.0, "transports": [transport]}) as workers:
        workers.run(0, witness.listen)
        workers.run(1, shake_hands_slowly, 0.9)
        assert workers.run(0, targets.timed_call, "worker1", targets.double, 2)[1:] == ("", "4")
        assert "Died" not in workers.run(0, witness.kinds, "worker1")


def test_who_was_stopped_gives_up_nobody() -> None:
    """Worker 0 is stopped for longer than a peer may be silent, while it waits for an answer, has a link at rest, and
    dials one that is stopped as well and goes on a little later."""
    impatient = {**IMPATIENT, "silence_limit": 2.5}
    with Workers(4, options=lambda rank: impatient if rank == 0 else {}) as workers:
        workers.run(0, witness.listen)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        assert workers.run(0, targets.call, "worker2", targets.double, 2) == 4
        targets.freeze(workers, 3)  # it takes the connection, and does not answer
        waiting = workers.start(0, call_both, "worker1", "worker3")
        eventually(lambda: workers.run(1, targets.serving) == 1)
        time.sleep(0.2)
        targets.freeze(workers, 0)
        workers.run(1, targets.unblock)
        time.sleep(3.0)
        workers.cont(0)
        time.sleep(0.3)
        workers.cont(3)
        assert waiting.result(15.0) == ["unblocked", 4]
        assert workers.run(0, targets.call, "worker2", targets.double, 2) == 4
        # A peer may be suspected until the next tick (twice a second; these workers suspect after 0.6 s), and none may die.
        eventually(lambda: set(workers.run(0, witness.states).values()) == {"alive"})
        assert "Died" not in [kind for _, kind, _ in workers.run(0, witness.heard)]


def call_both(blocked: str, slow: str) -> list[Any]:
    """One call waits for its answer; the other one needs a connection that is not there yet."""
    second = rpc.rpc_async(slow, targets.double, args=(2,), timeout=0)
    first = rpc.rpc_async(blocked, targets.block, timeout=0)
    return list(torch.futures.wait_all([first, second]))


def call_everybody(n: int) -> None:
    futures = [rpc.rpc_async(to, targets.double, args=(to,), timeout=30) for to in range(n)]
    assert torch.futures.wait_all(futures) == [2 * to for to in range(n)]


@needs_hosts
def test_a_host_that_is_cut_off_is_known_in_time_to_all_whose_links_rest_and_to_all_who_have_none() -> None:
    """Each watches one other. Workers 0 and 1 have talked with everybody; worker 5 has only been watched."""
    n, lost = 6, 3
    with Hosts(n) as where, Workers(n, join=False) as workers:
        witness.join_all_on_hosts(workers, where, n, watch=1)
        for rank in (0, 1):
            workers.run(rank, call_everybody, n)
        workers.run_all(witness.listen)
        eventually(lambda: workers.run(2, asks, f"worker{lost}"), what="(its watcher has begun)")
        eventually(lambda: workers.run(5, resting, f"worker{lost}") is None, what="(no link)")
        eventually(lambda: workers.run(0, resting, f"worker{lost}") is True, what="(a link at rest)")
        cut = time.monotonic()
        where.cut(lost)
        for rank in range(n):
            if rank != lost:
                assert witness.wait_for(workers, rank, "Died", f"worker{lost}") - cut < 5.5, f"worker {rank}"
                assert {kind for _, kind, name in workers.run(rank, witness.heard) if name != f"worker{lost}"} == set()
        workers.run_all(targets.leave, False)


def asks(name: str) -> bool:
    """Whether a sign of life of a peer is expected on a link that has been quiet: the next question is due."""
    peer = rpc._get_current_rpc_agent().agent.peers.find(name)
    return peer.outgoing.link is not None and time.monotonic() - peer.outgoing.link.last_heard > 0.9


def resting(name: str) -> bool | None:
    """Whether nothing is expected of a peer; None without a link."""
    peer = rpc._get_current_rpc_agent().agent.peers.find(name)
    if all(channel.link is None for channel in peer.channels()):
        return None
    return not peer.expected


@needs_hosts
def test_a_short_cut_of_a_link_at_rest_is_not_noticed() -> None:
    with Hosts(2) as where, Workers(2, join=False) as workers:
        witness.join_all_on_hosts(workers, where, 2, watch=0)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        eventually(lambda: workers.run(0, resting, "worker1") is True)
        workers.run_all(witness.listen)
        where.cut(1)
        time.sleep(2.4)
        where.heal(1)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        assert "Died" not in workers.run(0, witness.kinds, "worker1")
        workers.run_all(targets.leave, False)
