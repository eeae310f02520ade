"""When is a worker known to be dead, when only suspected, and when is neither said of one that is merely busy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pytest
import torch

from remora import rpc
from tests import hosts
from tests.eventually import eventually
from tests.hosts import Hosts
from tests.processes import targets, witness
from tests.workers import Workers

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there are hosts")
TRANSPORTS = ["unix", "tcp"]


def links() -> int:
    """How many other workers this one has a link with."""
    peers = rpc._get_current_rpc_agent().agent.peers
    return sum(any(channel.link for channel in peer.channels()) for peer in peers.all() if peer is not peers.me)


# Killed: under a second.


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_process_is_known_within_a_second_to_all_who_never_talked_to_it(transport: str) -> None:
    with Workers(4, options={"transports": [transport], "watch": 1}) as workers:
        workers.run_all(witness.listen)
        eventually(lambda: all(workers.run_all(links)))
        killed = time.monotonic()
        workers.kill(2)
        for rank in (0, 1, 3):
            assert witness.wait_for(workers, rank, "Died", "worker2") - killed < 1.0
            assert workers.run(rank, witness.names) == ["worker0", "worker1", "worker3"]
            assert workers.run(rank, witness.states)["worker2"] == "dead"
        assert workers.run(0, witness.kinds, "worker2") == ["Died"], "once, and suspected before only if it was slow"
        assert workers.run(0, targets.timed_call, "worker2", targets.double, 1)[1] == "CallNotSent"


def test_one_that_leaves_has_left_and_not_died() -> None:
    with Workers(3, join=False) as workers:
        for rank in range(3):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        workers.run_all(witness.listen)
        workers.run(1, targets.leave)
        for rank in (0, 2):
            witness.wait_for(workers, rank, "Left", "worker1")
            assert workers.run(rank, witness.kinds, "worker1") == ["Left"]
            assert workers.run(rank, witness.states)["worker1"] == "left"
        for rank in (0, 2):
            workers.run(rank, targets.leave)


# Cut off: under five seconds.


@pytest.fixture
def three() -> Iterator[tuple[Workers, Hosts]]:
    """Three workers on three hosts, who have talked to each other."""
    with Hosts(3) as where, Workers(3, join=False) as workers:
        witness.join_all_on_hosts(workers, where, 3)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        workers.run_all(witness.listen)
        yield workers, where
        workers.run_all(targets.leave, False)


@needs_hosts
def test_a_host_that_is_cut_off_is_known_within_five_seconds(three: tuple[Workers, Hosts]) -> None:
    workers, where = three
    waiting = workers.start(0, targets.timed_call, "worker1", targets.block, timeout=0)
    eventually(lambda: workers.run(1, targets.serving) == 1)
    cut = time.monotonic()
    where.cut(1)
    _, kind, words = waiting.result(timeout=8.0)
    assert time.monotonic() - cut < 5.0
    assert kind == "WorkerLost", words
    assert "cannot be reached" in words
    for rank in (0, 2):  # worker2 has only heard from it, and never called it
        assert witness.wait_for(workers, rank, "Died", "worker1") - cut < 5.0
        assert workers.run(rank, witness.kinds, "worker1") == ["Suspected", "Died"]
    for other in ("worker0", "worker2"):  # and it is alone, as it sees it
        assert witness.wait_for(workers, 1, "Died", other) - cut < 5.0
    assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8
    where.heal(1)
    _, kind, words = workers.run(1, targets.timed_call, "worker0", targets.double, 1)
    assert kind == "CallNotSent"
    assert workers.run(0, witness.names) == ["worker0", "worker2"], "it must join again as a new worker"


def count_up(to: str, n: int, size: int) -> list[int]:
    tensor = torch.zeros(size)
    futures = [rpc.rpc_async(to, count_with, args=(i, tensor), timeout=30) for i in range(n)]
    return list(torch.futures.wait_all(futures))


def count_with(key: int, tensor: torch.Tensor) -> int:
    return targets.count(key)


@needs_hosts
def test_a_short_cut_loses_nothing_and_repeats_nothing(three: tuple[Workers, Hosts]) -> None:
    """Half of the time a host has to answer is on the link it has, the other half on a new one: both are tried."""
    workers, where = three
    for seconds in (1.0, 2.6):
        where.cut(1)
        counting = workers.start(0, count_up, "worker1", 50, 30_000)
        time.sleep(seconds)
        assert not counting.done()
        where.heal(1)
        assert len(set(counting.result(timeout=10.0))) == 1
    assert workers.run(1, targets.counted) == dict.fromkeys(range(50), 2)
    assert "Died" not in workers.run(0, witness.kinds, "worker1")


@needs_hosts
def test_the_time_a_host_may_be_away_can_be_changed() -> None:
    with Hosts(2) as where, Workers(2, join=False) as workers:
        witness.join_all_on_hosts(workers, where, 2, reconnect_timeout=1.5, heartbeat=0.3)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        workers.run(0, witness.listen)
        cut = time.monotonic()
        where.cut(1)
        assert witness.wait_for(workers, 0, "Died", "worker1") - cut < 3.0
        workers.run_all(targets.leave, False)


# Silent, but there: suspected within five seconds, and not dead.


def hold_the_interpreter(seconds: float) -> None:
    """As C code does that does not let go of it: no other thread of this process runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frozen_and_a_busy_worker_are_suspected_and_then_well(transport: str) -> None:
    with Workers(4, options={"transports": [transport]}) as workers:
        for name in ("worker1", "worker2"):
            assert workers.run(3, targets.call, name, targets.double, 2) == 4
        workers.run_all(witness.listen)
        targets.freeze(workers, 1)
        began = time.monotonic()
        sending = workers.start(0, count_up, "worker1", 30, 1_000_000)  # more than its kernel has room for
        busy = workers.start(2, hold_the_interpreter, 6.0)
        for name in ("worker1", "worker2"):
            assert witness.wait_for(workers, 3, "Suspected", name) - began < 5.0
            assert workers.run(3, witness.states)[name] == "suspected"
        _, kind, words = workers.run(3, targets.timed_call, "worker1", targets.double, 1, timeout=0.2)
        assert kind == "CallTimeout"
        assert "worker1 is suspected: it has been silent" in words
        assert busy.result(timeout=10.0) is None
        workers.cont(1)
        assert sending.result(timeout=20.0) == [1] * 30
        for name in ("worker1", "worker2"):
            witness.wait_for(workers, 3, "Recovered", name)
            assert workers.run(3, witness.kinds, name) == ["Suspected", "Recovered"]
        for rank in (1, 2):
            assert workers.run(rank, witness.heard) == [], "who slept does not blame others for what it did not hear"
        assert set(workers.run(3, witness.states).values()) == {"alive"}


def test_a_silent_worker_is_given_up_after_a_limit_of_its_own() -> None:
    with Workers(2, options={"heartbeat": 0.2, "suspect_after": 0.6, "silence_limit": 2.5}) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        workers.run(0, witness.listen)
        targets.freeze(workers, 1)
        stopped = time.monotonic()
        assert witness.wait_for(workers, 0, "Suspected", "worker1") - stopped < 1.7
        assert 2.0 < witness.wait_for(workers, 0, "Died", "worker1") - stopped < 4.0
        assert workers.run(0, witness.kinds, "worker1") == ["Suspected", "Died"]


def test_one_that_is_frozen_before_anybody_talked_to_it_is_suspected_too() -> None:
    with Workers(2, options={"suspect_after": 1.0, "watch": 0}) as workers:
        workers.run(0, witness.listen)
        targets.freeze(workers, 1)
        waiting = workers.start(0, targets.timed_call, "worker1", targets.double, 2, timeout=8.0)
        time.sleep(1.8)
        workers.cont(1)
        assert waiting.result(timeout=8.0)[1:] == ("", "4")
        witness.wait_for(workers, 0, "Recovered", "worker1")
        assert workers.run(0, witness.kinds, "worker1") == ["Suspected", "Recovered"]
