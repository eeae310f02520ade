"""Groups without a head: workers come and go in any order, and everybody knows who is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers.group_membership import Membership
from remora.rpc import all_gather
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

NAMES = ["worker0", "worker1", "worker2"]


def join(workers: Workers, rank: int, **settings: Any) -> None:
    method = settings.pop("init_method", workers.init_method)
    workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, method, **settings)


@pytest.fixture
def trio() -> Iterator[Workers]:
    """Three workers of a dynamic group, all listening."""
    with Workers(3, join=False) as workers:
        for rank in range(3):
            join(workers, rank)
        workers.run_all(witness.listen)
        yield workers


def leave_all(workers: Workers, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    for rank in ranks:
        workers.run(rank, targets.leave)


def test_listeners_hear_who_joins_and_leaves_in_order(trio: Workers) -> None:
    for _ in range(2):
        trio.run(1, targets.leave)
        join(trio, 1)
    for rank in (0, 2):
        eventually(lambda rank=rank: len(trio.run(rank, witness.kinds, "worker1")) == 4)  # type: ignore[misc]
        assert trio.run(rank, witness.kinds, "worker1") == ["Left", "Joined", "Left", "Joined"]
        assert trio.run(rank, witness.names) == NAMES
    leave_all(trio)


def test_a_worker_that_was_killed_and_comes_again_is_a_new_one(trio: Workers) -> None:
    assert trio.run(0, targets.call, "worker1", targets.count, 7) == 1
    trio.kill(1)
    witness.wait_for(trio, 0, "Died", "worker1")
    trio.add(1)
    join(trio, 1)
    assert trio.run(0, targets.call, "worker1", targets.count, 7) == 1, "it remembers nothing"
    for rank in (0, 2):
        witness.wait_for(trio, rank, "Joined", "worker1")
        assert [kind for kind in trio.run(rank, witness.kinds, "worker1") if kind != "Suspected"] == ["Died", "Joined"]
    leave_all(trio)


def test_a_restarted_worker_that_comes_before_its_death_was_noticed(trio: Workers) -> None:
    trio.kill(1)
    trio.add(1)
    join(trio, 1)
    assert trio.run(2, targets.call, "worker1", targets.process_id) == trio.pid(1)
    assert trio.run(2, witness.names) == NAMES
    leave_all(trio)


def listen_and_call() -> None:
    """A listener that calls the worker that joined, and waits for the answer."""
    rpc.on_membership(lambda event: answers.append(rpc.rpc_sync(event.worker.name, targets.double, args=(21,))))


answers: list[int] = []


def heard_answers() -> list[int]:
    return list(answers)


def test_a_listener_may_make_calls_and_stop_listening(trio: Workers) -> None:
    trio.run(2, targets.leave)
    trio.run(0, listen_and_call)
    trio.run(0, listen_badly)
    join(trio, 2)
    eventually(lambda: trio.run(0, heard_answers) == [42])
    assert trio.run(0, times_heard) == 1, "and one that fails disturbs nobody, nor is it called again once cancelled"
    leave_all(trio)


_times = 0


def listen_badly() -> None:
    def fail(event: object) -> None:
        global _times
        _times += 1
        subscription.cancel()
        raise ValueError("what a listener!")

    subscription = rpc.on_membership(fail)


def times_heard() -> int:
    return _times


# Rank 0 is a worker like the others.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_calls_go_on_when_the_host_of_the_store_has_left_and_ended() -> None:
    """Who is known can be called; who is not cannot be found; and nobody new can come."""
    with Workers(4, join=False) as workers:
        method = f"tcp://127.0.0.1:{free_port()}"
        for rank in range(3):
            join(workers, rank, init_method=method)
        workers.run(1, witness.listen)
        workers.run(0, targets.leave)
        workers.kill(0)  # and the store with it
        witness.wait_for(workers, 1, "Left", "worker0")
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        assert workers.run(2, targets.call, "worker1", targets.double, 2) == 4
        seconds, kind, _ = workers.run(1, targets.timed_call, "stranger", targets.double, 2)
        assert (kind, seconds < 5.0) == ("WorkerNotFound", True)
        gather_all(workers, (1, 2))
        _, outcome = workers.run(3, targets.timed, targets.join_dynamic, "worker3", 3, method, rpc_timeout=1.0)
        assert type(outcome).__name__ == "RendezvousError"
        leave_all(workers, (1, 2))


# All together, in a group that changes.


def gather(value: object, names: list[str] | None = None) -> dict[str, object]:
    return rpc._all_gather(value, None if names is None else set(names), timeout=10.0)


def gather_all(workers: Workers, ranks: tuple[int, ...], names: list[str] | None = None) -> None:
    pending = [workers.start(rank, gather, rank, names) for rank in ranks]
    for each in pending:
        assert each.result(timeout=15.0) == {f"worker{rank}": rank for rank in ranks}


def test_gathering_in_a_dynamic_group_that_changes(trio: Workers) -> None:
    for _ in range(2):
        gather_all(trio, (0, 1, 2))
        gather_all(trio, (0, 2), ["worker0", "worker2"])
    trio.run(1, targets.leave)
    gather_all(trio, (0, 2))
    join(trio, 1)
    gather_all(trio, (0, 1, 2))
    trio.kill(1)
    trio.add(1)
    join(trio, 1)  # it counts from the beginning, the others do not
    for _ in range(2):
        gather_all(trio, (0, 1, 2))
    for each in [trio.start(rank, rpc._barrier, NAMES) for rank in range(3)]:
        each.result(timeout=10.0)
    leave_all(trio)


def who_has_come() -> list[str]:
    """Those who have come to the gathering that this worker leads and waits for."""
    states = all_gather.gatherings_of(rpc._get_current_rpc_agent()).states.values()
    return sorted(name for state in states if state.expected for name in state.gathered_objects)


def test_a_gathering_ends_when_one_who_should_come_dies(trio: Workers) -> None:
    waiting = [trio.start(rank, targets.timed, gather, rank) for rank in (0, 2)]
    eventually(lambda: trio.run(1, targets.call, "worker0", who_has_come) == ["worker0", "worker2"])
    trio.kill(1)
    for each in waiting:
        seconds, outcome = each.result(timeout=10.0)
        assert type(outcome).__name__ == "WorkerLost"
        assert "worker1" in str(outcome)
        assert seconds < 5.0
    leave_all(trio, (0, 2))


def test_who_comes_too_late_is_told() -> None:
    """The leader gave up: a follower that comes then does not wait for what will not happen."""
    with Workers(2) as workers:
        _, outcome = workers.run(0, targets.timed, rpc._all_gather, None, timeout=0.3)
        assert "timed out in _all_gather after 0.30 seconds" in str(outcome)
        seconds, outcome = workers.run(1, targets.timed, rpc._all_gather, None, timeout=20.0)
        assert "came too late" in str(outcome)
        assert seconds < 5.0
        gathered = [workers.start(rank, gather, rank) for rank in (0, 1)]
        assert [each.result() for each in gathered] == [{"worker0": 0, "worker1": 1}] * 2


# What is known of one that nobody announced.


def say_nothing() -> None:
    Membership.greet = lambda self, records: None  # type: ignore[method-assign]


def call_back(name: str) -> int:
    return rpc.rpc_sync(name, targets.double, args=(4,))


def test_one_that_is_known_by_its_call_alone_can_be_called_back() -> None:
    with Workers(2, join=False) as workers:
        join(workers, 0)
        workers.run(1, say_nothing)
        join(workers, 1)
        assert workers.run(0, witness.names) == ["worker0"]
        assert workers.run(1, targets.call, "worker0", call_back, "worker1") == 8
        assert workers.run(0, witness.names) == ["worker0", "worker1"]
        leave_all(workers, (0, 1))


# A group that lives long.


def churn(n: int, method: str) -> list[tuple[int, int]]:
    """Workers come and go, one after the other, in this process; how many the one that stays knows of, then and later."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from remora.options import Settings
    from remora.rpc.api import CALLS
    from remora.worker import Worker

    def start(name: str, rank: int) -> Worker:
        store = FileStore(method.removeprefix("file://"), -1)
        worker = Worker(name, rank, None, store, 10.0, 2, Settings(transports=["inproc"]), CALLS)
        worker.start()
        return worker

    stays = start("stays", 0)
    for i in range(n):
        guest = start(f"guest{i}", i + 1)
        if i % 2:
            guest.leave(5.0)
            guest.stop()
        else:
            guest.agent.kill()
        eventually(lambda: len(stays.get_worker_infos()) == 1)
    peers = stays.agent.peers
    found = [(len(peers.all()), len(peers.table._departed))]
    found.append((len(stays.group.members()), len(stays.group._early)))  # type: ignore[attr-defined]
    stays.stop()
    return found


def test_those_who_are_gone_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers(1, join=False) as workers:
        workers.run(0, remember_only, 6)
        known, listed = workers.run(0, churn, 30, workers.init_method)
        assert known == (7, 6), "itself and the last few"
        assert listed == (1, 0), "and the list of the group holds nobody who is dead"


def remember_only(n: int) -> None:
    from remora.agent.peers import peer_table

    peer_table.MOST_DEPARTED = n


def test_the_list_of_a_group_may_be_read_by_many_threads(trio: Workers) -> None:
    assert trio.run(0, read_list_at_once, 8) == [NAMES] * 8
    leave_all(trio)


def read_list_at_once(n: int) -> list[list[str]]:
    group = rpc._get_current_rpc_agent().group
    group._read, group._present = 0, {}  # as if nothing had been read yet
    found: list[list[str]] = []
    start = threading.Barrier(n)

    def read() -> None:
        start.wait()
        found.append([record.name for record in group.members()])

    threads = [threading.Thread(target=read) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return found


def test_leaving_does_not_wait_for_a_frozen_worker(trio: Workers) -> None:
    targets.freeze(trio, 1)
    witness.wait_for(trio, 0, "Suspected", "worker1")
    start = time.monotonic()
    trio.run(0, targets.leave)
    assert time.monotonic() - start < 3.0
    trio.cont(1)
    witness.wait_for(trio, 1, "Left", "worker0")
    leave_all(trio, (1, 2))
