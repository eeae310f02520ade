"""Control messages that could not be sent are tried again, on PyTorch's schedule, in order, as long as it makes sense."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from remora.agent import retries
from remora.agent.serving.dispatch import Request
from remora.errors import CallError
from remora.testing.world import World
from remora.vocabulary.messages import MessageType
from remora.wire.pickler import pack

KIND = MessageType.RREF_CHILD_ACCEPT


def acknowledge(request: Request) -> None:
    request.reply(int(MessageType.RREF_ACK), None)


def test_the_schedule_is_pytorchs() -> None:
    assert retries.gaps() == [1.0, 1.0, 1.5, 2.25, 3.375]
    assert retries.gaps(2, 0.1, 1.0) == [0.1, 0.1]


@pytest.fixture
def world() -> Iterator[World]:
    with World(2, faults="") as world:
        for worker in world.workers:
            worker.agent.retries.gaps = retries.gaps(first=0.02)
            worker.agent.dispatch.on(KIND, acknowledge, inline=True)
        yield world


class Post:
    """Sends letters from worker0 to worker1, and notes what comes of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcomes: dict[int, BaseException | None] = {}
        self.order: list[int] = []

    def send(self, n: int) -> None:
        agent = self.world[0].agent
        peer = agent.peers.find("worker1")
        agent.retries.send(peer, int(KIND), pack(n), f"message {n}", lambda error: self.done(n, error))

    def done(self, n: int, error: BaseException | None) -> None:
        assert n not in self.outcomes, "told twice"
        self.order.append(n)
        self.outcomes[n] = error

    def wait(self, n: int) -> dict[int, Any]:
        self.world.wait_until(lambda: len(self.outcomes) >= n)
        return self.outcomes


def attempts(world: World) -> list[float]:
    return [record.at for record in world.faults.report().records if record.deed == "fail"]


def test_what_can_be_sent_is_sent_once(world: World) -> None:
    post = Post(world)
    post.send(1)
    assert post.wait(1) == {1: None}
    assert world.faults.messages()["worker0", "worker1", KIND] == 1


def test_a_failure_to_send_is_followed_by_another_try(world: World) -> None:
    world.faults.set(f"fail {KIND.name} * 3 each")
    post = Post(world)
    post.send(1)
    assert post.wait(1) == {1: None}
    assert len(attempts(world)) == 3
    assert world.faults.messages()["worker0", "worker1", KIND] == 1
    first, second, third = attempts(world)
    assert second - first >= 0.02
    assert third - second >= 0.02


def test_after_six_attempts_it_is_given_up(world: World) -> None:
    world.faults.set(f"fail {KIND.name} *")
    post = Post(world)
    post.send(1)
    error = post.wait(1)[1]
    assert isinstance(error, CallError)
    assert "has not succeeded after the specified number of max retries (5)" in str(error)
    assert len(attempts(world)) == 6
    assert world.faults.messages()["worker0", "worker1", KIND] == 0
    world.faults.set("")
    post.send(2)  # and the way is free again
    assert post.wait(2)[2] is None


def test_what_was_sent_is_never_sent_again(world: World) -> None:
    world.faults.set(f"drop {KIND.name} * 1; cut worker0-worker1 after 2 for 20ms")
    post = Post(world)
    post.send(1)
    post.send(2)
    assert post.wait(2) == {1: None, 2: None}
    assert not attempts(world)


def test_letters_to_one_worker_keep_their_order(world: World) -> None:
    world.faults.set(f"fail {KIND.name} * 2")
    post = Post(world)
    for n in range(5):
        post.send(n)
    assert post.wait(5) == dict.fromkeys(range(5))
    assert post.order == [0, 1, 2, 3, 4]


def test_nobody_waits_for_a_worker_that_died_meanwhile(world: World) -> None:
    world.faults.set(f"fail {KIND.name} *")
    post = Post(world)
    post.send(1)
    post.send(2)
    world.kill(1)
    agent = world[0].agent
    agent.peers.probe(["worker1"])
    outcomes = post.wait(2)
    assert all(isinstance(error, CallError) for error in outcomes.values())
    assert len(attempts(world)) < 12


def test_without_a_plan_a_worker_that_is_gone_is_told_at_once() -> None:
    with World(2) as world:
        agent = world[0].agent
        peer = agent.peers.find("worker1")
        agent.peers.declare_gone(peer, "for the test")
        told: list[BaseException | None] = []
        agent.retries.send(peer, int(KIND), pack(1), "message", told.append)
        assert len(told) == 1
        assert isinstance(told[0], CallError)


def test_a_try_comes_no_earlier_than_the_schedule_says(world: World) -> None:
    world[0].agent.retries.gaps = [0.2, 0.2]
    world.faults.set(f"fail {KIND.name} * 1")
    post = Post(world)
    started = time.monotonic()
    post.send(1)
    assert post.wait(1) == {1: None}
    assert time.monotonic() - started >= 0.2


def test_what_wants_no_answer_arrives_too_and_nobody_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[object] = []

    def take(request: Request) -> None:
        arrived.append(request.unpack())
        request.drop()

    with World(2) as world:
        world[1].agent.dispatch.on(KIND, take, service=True)
        agent, awaited = world[0].agent, []
        peer = agent.peers.find("worker1")
        expect = agent.delayed_flush.expect
        monkeypatch.setattr(agent.delayed_flush, "expect", lambda channel: (awaited.append(channel), expect(channel)))
        agent.retries.send(peer, int(KIND), pack(1), "message 1")
        world.wait_until(lambda: arrived == [1])
        assert not peer.outgoing.pending
        peer.outgoing.outbox._followed = True  # so the next one is held back, to go with another message,
        awaited.clear()
        agent.retries.send(peer, int(KIND), pack(2), "message 2")
        assert awaited == [peer.outgoing], "and somebody sees to it if there is none"
        world.wait_until(lambda: arrived == [1, 2])
        assert world[1].agent.dispatch.counts() == 0
