"""Who leaves a dynamic group takes nobody with it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from remora import rpc
from remora.agent.agent import Agent
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

A_WHILE = 0.5  # seconds; to dial takes less

held: list[rpc.RRef[Any]] = []


def hold() -> None:
    held.append(rpc.remote("worker1", targets.process_id))
    held[0].to_here()


@pytest.mark.timeout(60)
def test_who_has_heard_a_farewell_is_not_taken_for_dead_while_others_have_not() -> None:
    """It hangs up. Who leaves did not lose it, and must not tell those who stay that it did."""
    with Workers(3, join=False) as workers:
        for rank in range(3):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        workers.run_all(witness.listen)
        workers.run(0, hold)  # so that worker1, if it lost worker0, would ask the others about it
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        targets.freeze(workers, 2)
        leaving = workers.start(1, targets.leave)
        witness.wait_for(workers, 0, "Left", "worker1")
        targets.nap(A_WHILE)
        workers.cont(2)
        leaving.result(10.0)
        witness.wait_for(workers, 2, "Left", "worker1")
        assert workers.run(2, targets.call, "worker0", targets.double, 2) == 4
        assert workers.run(0, targets.call, "worker2", targets.double, 2) == 4
        for rank, other in ((0, "worker2"), (1, "worker0"), (2, "worker0")):
            assert "Died" not in workers.run(rank, witness.kinds, other)
        assert "lost" not in workers.output(1)
        for rank in (0, 2):
            workers.run(rank, targets.leave)


def leave_and_call(to: str) -> tuple[float, str, str]:
    """Leave, and when the other has hung up call it from another thread."""
    peers, found = rpc._get_current_rpc_agent().agent.peers, []

    def call() -> None:
        eventually(lambda: peers.connector.parting and peers.find(to).outgoing.link is None)
        found.append(targets.timed_call(to, targets.double, 1))

    thread = threading.Thread(target=call)
    thread.start()
    rpc.shutdown()
    thread.join(10.0)
    outcome: tuple[float, str, str] = found[0]
    return outcome


@pytest.mark.timeout(60)
def test_a_call_to_one_that_has_heard_the_farewell_does_not_make_it_dead() -> None:
    """It refuses who has left. That call fails, and nobody is told that the other died."""
    with Workers(3, join=False) as workers:
        for rank in range(3):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        workers.run_all(witness.listen)
        workers.run(0, hold)
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        targets.freeze(workers, 2)
        leaving = workers.start(1, leave_and_call, "worker0")
        eventually(lambda: "this session was given up" in workers.output(0))
        workers.cont(2)
        _, kind, words = leaving.result(10.0)
        assert kind == "CallOutcomeUnknown"
        assert "is leaving" in words
        witness.wait_for(workers, 2, "Left", "worker1")
        assert workers.run(2, targets.call, "worker0", targets.double, 2) == 4
        for rank, other in ((0, "worker2"), (1, "worker0"), (2, "worker0")):
            assert "Died" not in workers.run(rank, witness.kinds, other)
        for rank in (0, 2):
            workers.run(rank, targets.leave)


def join_slowly(name: str, rank: int, method: str, leaver: str) -> None:
    """Join, and begin to serve when one that was on the list then has left it, and has ended, if it does not wait."""
    start = Agent.start

    def late(agent: Agent) -> None:
        Agent.start = start  # type: ignore[method-assign]
        worker: Any = agent.pool.worker
        record, patience = agent.peers.find(leaver).record, time.monotonic() + A_WHILE
        eventually(lambda: all(each.name != leaver for each in worker.group.members()))
        while not worker.handshake_client.is_gone(record) and time.monotonic() < patience:
            time.sleep(0.005)
        witness.listen()
        start(agent)

    Agent.start = late  # type: ignore[method-assign,assignment]
    targets.join_dynamic(name, rank, method)


def is_listed(name: str) -> bool:
    return any(each.name == name for each in rpc._get_current_rpc_agent().group.members())


@pytest.mark.timeout(60)
def test_who_joins_while_another_leaves_is_told_so() -> None:
    """The one has the other on its list, and the other has never heard of it."""
    with Workers(3, join=False) as workers:
        for rank in (0, 1):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        joining = workers.start(2, join_slowly, "worker2", 2, workers.init_method, "worker1")
        eventually(lambda: workers.run(0, is_listed, "worker2"))
        workers.run(1, targets.leave)
        joining.result(10.0)
        witness.wait_for(workers, 2, "Left", "worker1")
        assert workers.run(2, witness.kinds, "worker1") == ["Left"]
        for rank in (2, 0):
            workers.run(rank, targets.leave)
