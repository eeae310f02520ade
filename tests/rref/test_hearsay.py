"""O2 on real workers: who confirms the loss of another one does so behind all that follows from what came from there.

Worker0 owns values. Worker1 alone holds references to them, hands these on to worker2, and is lost. When worker2 has
confirmed that, worker0 lets go of what worker1 held: if worker2 asked to be counted only then, the values would be gone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers import group_membership
from remora.agent.peers.peer import Peer, State
from remora.testing.world import World
from remora.vocabulary.messages import MessageType
from remora.wire.frames import Body

OWNER, LOST, SURVIVOR = 0, 1, 2
MANY = 10
IN_ORDER = ["count me"] * MANY + ["heard"]
TIMEOUT = 20.0
QUESTIONS = (MessageType.CONFIRM_DEATH, MessageType.CONFIRM_LEAVE)
A_WHILE = 0.2  # seconds; what does not wait for its turn comes sooner

theirs: list[rpc.RRef[Any]] = []  # of the worker that is lost
kept: list[rpc.RRef[Any]] = []


def take(references: list[rpc.RRef[Any]]) -> None:
    theirs.extend(references)


def give() -> list[rpc.RRef[Any]]:
    return theirs


def keep(references: list[rpc.RRef[Any]]) -> None:
    kept.extend(references)


class Scene:
    """The three workers: what worker2 tells worker0, in order, and a way to stop one who reads what came from worker1."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: list[str] = []
        self.reading = threading.Event()  # somebody has read a message of worker1, and has not dealt with it
        self.go_on = threading.Event()  # it may
        self._losing: list[threading.Thread] = []
        self._take_down_what_the_owner_hears()
        with world.acting(OWNER):
            rpc.rpc_sync("worker1", take, ([rpc.RRef([n]) for n in range(MANY)],))

    def _take_down_what_the_owner_hears(self) -> None:
        worker = self.world[OWNER]
        counted, heard = worker.references.table.owned.count, worker.membership.heard
        assert heard is not None

        def count(*args: Any) -> None:
            self.told.append("count me")
            counted(*args)

        def hear(*args: Any) -> None:
            self.told.append("heard")
            heard(*args)

        worker.references.table.owned.count = count  # type: ignore[method-assign]
        worker.membership.heard = hear

    def stop_the_reader(self, who: int) -> None:
        """Have a worker stop before it takes note of the references in what worker1 sends."""
        agent = self.world[who].agent
        arrive = agent.peers.arrive

        def arrive_late(sender: Peer, body: Body) -> Any:
            if sender.id == LOST:
                agent.pool.about_to_block()  # others are on watch then; readers do not wait, as a rule
                self.reading.set()
                assert self.go_on.wait(TIMEOUT)
            return arrive(sender, body)

        agent.peers.arrive = arrive_late

    def lose(self, who: int, state: State = "dead") -> None:
        """Have a worker give worker1 up. Returns when it has begun: it may have to wait for a reader."""
        peers = self.world[who].agent.peers
        peer = peers.find("worker1")
        thread = threading.Thread(target=peers.declare_gone, args=(peer, "for the test", state))
        self._losing.append(thread)
        thread.start()
        self.world.wait_until(lambda: peer.gone)

    def wait_until_asked(self) -> None:
        """Worker2 was asked about the loss, and knows of it. Or it has answered already."""
        agent = self.world[SURVIVOR].agent
        peer = agent.peers.find("worker1")

        def asked() -> bool:
            served = list(agent.dispatch.serving.values())
            return peer.gone and any(each.frame.kind in QUESTIONS for each in served)

        self.world.wait_until(lambda: asked() or "heard" in self.told)

    def let_it_go_on(self) -> None:
        """Not at once: what does not wait for the reader shall come before."""
        threading.Event().wait(A_WHILE)
        self.go_on.set()

    def wait_until_heard(self) -> None:
        self.world.wait_until(lambda: "heard" in self.told)

    def values(self) -> list[list[int]]:
        """What the references that were kept lead to."""
        self.world.wait_until(lambda: len(kept) == MANY)
        with self.world.acting(SURVIVOR):
            return sorted(reference.to_here(TIMEOUT) for reference in kept)

    def nothing_is_left(self) -> None:
        """When all are dropped, no value is kept: neither for worker2 nor for the one that is lost."""
        kept.clear()
        gc.collect()
        self.world.wait_until(lambda: not self.world[OWNER].references.table.counts()["num_owner_rrefs"])

    def close(self) -> None:
        self.go_on.set()
        for thread in self._losing:
            thread.join(TIMEOUT)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(group_membership, "LAST_WORDS", 0.05)
    with World(3) as world:
        found = Scene(world)
        yield found
        found.close()
    theirs.clear()  # when nothing runs any more that could add to it
    kept.clear()


def in_a_call(world: World) -> None:
    world.run(LOST, rpc.remote, "worker2", keep, (theirs,))


def in_a_reply(world: World) -> None:
    world.run(SURVIVOR, rpc.rpc_async, "worker1", give).then(lambda done: done.exception())


@pytest.mark.parametrize("state", ["dead", "left"])
@pytest.mark.parametrize("hand_on", [in_a_call, in_a_reply])
def test_who_is_told_of_a_loss_confirms_it_behind_all_that_came_before(
    scene: Scene, hand_on: Callable[[World], None], state: State
) -> None:
    """It learns of the loss from the owner, while one of its threads reads what the lost one said."""
    scene.stop_the_reader(SURVIVOR)
    hand_on(scene.world)
    assert scene.reading.wait(TIMEOUT)
    scene.lose(OWNER, state)
    scene.wait_until_asked()
    scene.let_it_go_on()
    scene.wait_until_heard()
    assert scene.told == IN_ORDER
    if hand_on is in_a_call:  # (the answer to a call has failed with its worker)
        assert scene.values() == [[n] for n in range(MANY)]
    scene.nothing_is_left()


@pytest.mark.parametrize("hand_on", [in_a_call, in_a_reply])
def test_who_knows_of_a_loss_confirms_it_when_it_is_through_with_it(
    scene: Scene, hand_on: Callable[[World], None]
) -> None:
    """It has noticed by itself, and another thread is about to give the lost one up when the owner asks."""
    scene.stop_the_reader(SURVIVOR)
    hand_on(scene.world)
    assert scene.reading.wait(TIMEOUT)
    scene.lose(SURVIVOR)
    scene.lose(OWNER)
    scene.wait_until_asked()
    scene.let_it_go_on()
    scene.wait_until_heard()
    assert scene.told == IN_ORDER
    if hand_on is in_a_call:
        assert scene.values() == [[n] for n in range(MANY)]
    scene.nothing_is_left()


def test_a_confirmation_does_not_overtake_a_request_that_has_to_be_repeated(scene: Scene) -> None:
    """Nothing has to be read any more, but not all that follows from it has been sent."""
    scene.world.set_faults("fail RREF_FORK_REQUEST worker2->worker0 1")
    scene.world[SURVIVOR].agent.retries.gaps = [2 * A_WHILE]
    in_a_call(scene.world)
    scene.world.wait_until(lambda: len(scene.world.faults.report()) == 1)
    scene.lose(OWNER)
    scene.wait_until_heard()
    assert scene.told == IN_ORDER
    assert scene.values() == [[n] for n in range(MANY)]
    scene.nothing_is_left()


def test_the_owner_itself_mourns_when_it_is_through_with_what_came(scene: Scene) -> None:
    """The last holder sent the references home before it was lost: the values are not gone when they come."""
    scene.stop_the_reader(OWNER)
    scene.world.run(LOST, rpc.remote, "worker0", keep, (theirs,))
    assert scene.reading.wait(TIMEOUT)
    scene.lose(OWNER)
    scene.let_it_go_on()
    scene.world.wait_until(lambda: len(kept) == MANY)
    assert sorted(reference.local_value() for reference in kept) == [[n] for n in range(MANY)]
    scene.nothing_is_left()
