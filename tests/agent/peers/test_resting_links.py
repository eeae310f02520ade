"""Heartbeats are for neighbours, and for links on which something is expected. All other links rest, and cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from remora import rpc
from remora.agent.channel.outbox import Outbox
from remora.protocol.member_rules import Died, Suspected
from remora.testing.world import World

N = 7
FAR = "worker3"  # no neighbour of worker0, where each watches the next one


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def world() -> Iterator[World]:
    """Workers that have all talked with each other, and rest."""
    with World(N, watch=1, clock="virtual") as world:
        for rank in range(N):
            calls = [world.run(rank, rpc.rpc_async, f"worker{to}", double, args=(to,)) for to in range(N)]
            assert torch.futures.wait_all(calls) == [2 * to for to in range(N)]
        world.clock.advance(5.0)  # the last answers are confirmed
        yield world


def test_only_neighbours_are_asked_for_a_sign_of_life(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[tuple[str, str]] = Counter()
    flush = Outbox.flush
    peers = [(agent.pool.name, peer) for agent in world.agents() for peer in agent.peers.all()]
    workers = {channel.outbox: name for name, peer in peers for channel in peer.channels()}

    def count(outbox: Outbox) -> None:
        said[workers[outbox], outbox.peer] += len(outbox.control_frames)
        flush(outbox)

    monkeypatch.setattr(Outbox, "flush", count)
    world.clock.advance(10.0)
    assert said, "neighbours are"
    for rank in range(N):
        around = {f"worker{(rank + 1) % N}", f"worker{(rank - 1) % N}"}
        assert {peer for name, peer in said if name == f"worker{rank}"} <= around
    assert sum(said.values()) < 10 * 6 * N  # the old rule: for each of N * (N - 1) links, every second, and an answer


def test_nobody_is_suspected_for_a_link_at_rest(world: World) -> None:
    events: list[object] = []
    for worker in world.workers:
        worker.agent.peers.events.subscribe(events.append)
    world.clock.advance(100.0)
    for rank in range(N):
        assert world.run(rank, rpc.rpc_sync, f"worker{(rank + 3) % N}", double, args=(4,)) == 8
    world.clock.advance(5.0)
    assert events == []


def test_a_peer_at_rest_that_is_called_has_its_full_time_to_answer(world: World) -> None:
    """It was last heard long ago: what counts is from when on something was expected of it."""
    events: list[tuple[float, object]] = []
    world[0].agent.peers.events.subscribe(lambda event: events.append((world.clock.now(), event)))
    world.clock.advance(100.0)
    world.faults.set("freeze worker3")
    called = world.clock.now()
    call = world.run(0, rpc.rpc_async, FAR, double, args=(4,), timeout=0)
    world.clock.advance(2.9)
    assert events == []
    world.clock.advance(1.2)
    assert [type(event) for _, event in events] == [Suspected]
    world.clock.advance(25.0)
    assert not call.done()
    world.clock.advance(3.0)
    assert [type(event) for _, event in events if FAR in repr(event)] == [Suspected, Died]
    assert 30.0 < events[-1][0] - called < 32.0
    with pytest.raises(RuntimeError, match="it has been silent for 30 s"):
        call.wait()


def test_what_another_worker_says_of_one_that_lives_is_not_believed(world: World) -> None:
    """A slow worker may be taken for dead by another. Those that have a link with it ask, and hear that it lives."""
    peers = world[0].agent.peers
    peers.failure_detector.verify(peers.find(FAR), 0.0)
    peers.failure_detector.verify(peers.find(FAR), 3.0)
    world.clock.advance(60.0)
    assert {member.state for member in world[0].members()} == {"alive"}
    assert not peers.find(FAR).expected, "again"


def test_but_one_at_rest_that_is_silent_is_found_out(world: World) -> None:
    world.faults.set("")  # the links are made anew, under a plan
    world.clock.advance(10.0)
    world.faults.set("freeze worker3")
    peers = world[0].agent.peers
    peers.failure_detector.verify(peers.find(FAR), 0.0)
    world.clock.advance(4.0)
    assert peers.find(FAR).condition == "suspected"
    world.clock.advance(30.0)
    assert peers.find(FAR).condition == "dead"


def test_a_call_over_the_resting_link_of_a_neighbour_does_not_break_it(world: World) -> None:
    """One link of a pair is enough for heartbeats. The other one has been silent for long when it is used again."""
    peers = world[0].agent.peers
    links = [channel.link for channel in peers.find("worker1").channels()]
    assert all(links)
    world.clock.advance(100.0)
    for caller, callee in ((0, 1), (1, 0)):
        call = world.run(caller, rpc.rpc_async, f"worker{callee}", sleep_for, args=(3.0,), timeout=0)
        world.clock.advance(10.0)
        assert call.wait() == 3.0
    assert [channel.link for channel in peers.find("worker1").channels()] == links


async def sleep_for(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
