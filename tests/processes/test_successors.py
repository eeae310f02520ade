"""A worker that was given up makes room for another one of its name, and does not take the place back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from remora import rpc
from remora.rendezvous.record import WorkerRecord
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers


def join(workers: Workers, process: int, name: str, rank: int) -> None:
    workers.run(process, targets.join_dynamic, name, rank, workers.init_method)


def give_up(name: str) -> None:
    """As if its host had been cut off from ours for long."""
    peers = rpc._get_current_rpc_agent().agent.peers
    peers.declare_gone(peers.find(name), "it is cut off, for the test")


def is_free(name: str, rank: int) -> bool:
    """Whether nobody has that name or that id at the store."""
    return not rpc._get_current_rpc_agent().group.holders(WorkerRecord(name, rank, "nobody", "nowhere", ()))


def make_room(workers: Workers, process: int, name: str, rank: int) -> None:
    workers.run(process, give_up, name)
    eventually(lambda: workers.run(process, is_free, name, rank), 2.0, f"({name} is struck off)")


def shares_memory_with(name: str) -> bool:
    sharing = rpc._get_current_rpc_agent().agent.peers.find(name).shared_memory
    assert sharing is not None
    return sharing.willing


@pytest.mark.timeout(60)
def test_the_place_of_a_newcomer_that_was_given_up_is_free() -> None:
    """Those who were there before it knew it by its call first. They must strike off what the store holds."""
    with Workers(3, join=False) as workers:
        join(workers, 0, "worker0", 0)
        join(workers, 1, "worker1", 1)
        make_room(workers, 0, "worker1", 1)  # it lives: nobody can tell by its address that it is gone
        join(workers, 2, "worker1", 1)
        assert workers.run(0, targets.call, "worker1", targets.process_id) == workers.pid(2)
        for process in (2, 0):
            workers.run(process, targets.leave)
        workers.run(1, targets.leave, False)


@pytest.mark.timeout(60)
def test_the_place_of_one_that_is_known_by_its_call_alone_is_free_too() -> None:
    with Workers(2, join=False) as workers:
        join(workers, 0, "worker0", 0)
        join(workers, 1, "worker1", 1)
        workers.run(0, forget_what_it_said, "worker1")
        make_room(workers, 0, "worker1", 1)
        workers.run(0, targets.leave)
        workers.run(1, targets.leave, False)


def forget_what_it_said(name: str) -> None:
    peer = rpc._get_current_rpc_agent().agent.peers.find(name)
    said = peer.record
    peer.record = WorkerRecord(said.name, said.id, said.incarnation, said.host, said.addresses, {})


@pytest.mark.skipif(os.environ.get("REMORA_SHARED_MEMORY") == "0", reason="what it says is what it shares")
@pytest.mark.timeout(60)
def test_what_a_newcomer_says_of_itself_is_heard_by_those_who_were_there() -> None:
    with Workers(2, join=False) as workers:
        join(workers, 0, "worker0", 0)
        join(workers, 1, "worker1", 1)
        assert workers.run(1, targets.call, "worker0", targets.sum_of, torch.ones(1 << 16)) == 1 << 16
        assert workers.run(0, targets.call, "worker1", targets.sum_of, torch.ones(1 << 16)) == 1 << 16
        assert workers.run(1, shares_memory_with, "worker0")
        assert workers.run(0, shares_memory_with, "worker1")
        for process in (1, 0):
            workers.run(process, targets.leave)


@pytest.mark.timeout(60)
def test_one_that_was_given_up_does_not_take_its_place_back() -> None:
    """It lives and does not know. A newcomer that it calls has never heard of it, and knows its successor."""
    with Workers(4, join=False) as workers:
        join(workers, 1, "worker1", 1)
        join(workers, 0, "worker0", 0)
        make_room(workers, 0, "worker1", 1)
        join(workers, 2, "worker1", 1)
        join(workers, 3, "worker3", 3)
        workers.run(3, witness.listen)
        _, kind, words = workers.run(1, targets.timed_call, "worker3", targets.double, 2)
        assert kind == "CallNotSent"
        assert "must join again" in words
        assert workers.run(3, targets.call, "worker1", targets.process_id) == workers.pid(2)
        assert workers.run(3, targets.call, 1, targets.process_id) == workers.pid(2)
        assert workers.run(2, targets.call, "worker3", targets.double, 2) == 4
        assert workers.run(3, witness.heard) == []
        for process in (3, 2, 0):
            workers.run(process, targets.leave)
        workers.run(1, targets.leave, False)


def look_with_an_old_list(name: str) -> str:
    """`refresh` with a list that was read before a worker was replaced; who has its name then."""
    worker: Any = rpc._get_current_rpc_agent()
    now, former = worker.group.members, WorkerRecord(name, 1, "former", "nowhere", ("unix://@nowhere",))
    lists = iter([[former]])
    worker.group.members = lambda: next(lists, None) or now()
    worker.membership.refresh()
    del worker.group.members
    incarnation: str = worker.agent.peers.find(name).key.incarnation
    return incarnation


def incarnation() -> str:
    return rpc._get_current_rpc_agent().handshake_client.incarnation


@pytest.mark.timeout(60)
def test_an_old_list_of_the_group_replaces_nobody() -> None:
    with Workers(2, join=False) as workers:
        join(workers, 0, "worker0", 0)
        join(workers, 1, "worker1", 1)
        assert workers.run(0, look_with_an_old_list, "worker1") == workers.run(1, incarnation)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        for process in (1, 0):
            workers.run(process, targets.leave)
