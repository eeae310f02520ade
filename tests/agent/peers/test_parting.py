"""Who left is not taken for dead because others have heard of it first; and its last answers count."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers import group_membership
from remora.rref.effect_runner import EffectRunner
from remora.testing.world import World
from remora.vocabulary.effects import AskSurvivors
from remora.vocabulary.messages import ConfirmDeath, ConfirmLeave
from remora.wire.message_codec import encode

TIMEOUT = 20.0

begun, released = threading.Event(), threading.Event()


def late() -> int:
    begun.set()
    assert released.wait(TIMEOUT)
    return 7


def tell(world: World, teller: int, hearer: int, news: type[ConfirmDeath], about: int) -> Any:
    """Have one worker ask another to confirm the loss of a third; a future of the answer."""
    agent = world[teller].agent
    body = encode(news(world[hearer].agent.peers.find(f"worker{about}").key))
    return agent.caller.call_async(agent.peers.find(f"worker{hearer}"), int(news.type), body, 0, TIMEOUT, "membership")


@pytest.fixture(autouse=True)
def fresh() -> None:
    begun.clear()
    released.clear()


def test_the_last_answer_of_one_that_left_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_membership, "LAST_WORDS", TIMEOUT)
    with World(3) as world:
        call = world.run(0, rpc.rpc_async, "worker1", late)
        assert begun.wait(TIMEOUT)
        told = tell(world, 2, 0, ConfirmLeave, 1)
        assert not threading.Event().wait(0.1)
        assert not call.done()
        released.set()
        assert call.wait(TIMEOUT) == 7
        world[0].agent.peers.declare_gone(world[0].agent.peers.find("worker1"), "it said goodbye", "left")
        told.wait(TIMEOUT)


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_membership, "LAST_WORDS", 0.05)
    with World(3) as world:
        call = world.run(0, rpc.rpc_async, "worker1", late)
        assert begun.wait(TIMEOUT)
        tell(world, 2, 0, ConfirmLeave, 1).wait(TIMEOUT)
        assert world[0].agent.peers.find("worker1").state == "left"
        with pytest.raises(RuntimeError, match="has left"):
            call.wait(TIMEOUT)
        released.set()


def test_nor_while_time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is one by the worker's clock, which passes over it."""
    monkeypatch.setattr(group_membership, "LAST_WORDS", 0.05)
    with World(3, clock="auto") as world:
        world.run(0, rpc.rpc_sync, "worker1", int)
        tell(world, 2, 0, ConfirmLeave, 1).wait(TIMEOUT)
        assert world[0].agent.peers.find("worker1").state == "left"


def test_one_that_died_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_membership, "LAST_WORDS", TIMEOUT)
    with World(3) as world:
        call = world.run(0, rpc.rpc_async, "worker1", late)
        assert begun.wait(TIMEOUT)
        tell(world, 2, 0, ConfirmDeath, 1).wait(TIMEOUT)
        assert world[0].agent.peers.find("worker1").state == "dead"
        with pytest.raises(RuntimeError, match="worker2 lost it"):
            call.wait(TIMEOUT)
        released.set()


@pytest.mark.parametrize(("state", "news"), [("left", ConfirmLeave), ("dead", ConfirmDeath)])
def test_an_owner_says_what_became_of_it(
    state: Any, news: type[ConfirmDeath], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    with World(3) as world:
        peers, table = world[0].agent.peers, world[0].references.table
        lost, survivor = peers.find("worker1"), peers.find("worker2")
        peers.declare_gone(lost, "for the test", state)
        monkeypatch.setattr(EffectRunner, "_tell", lambda self, *args: told.append(args))
        table.runner.perform([AskSurvivors(lost.key, frozenset({survivor.key}))])
        monkeypatch.undo()
    assert told == [(survivor.key, news(lost.key))]
