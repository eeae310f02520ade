"""The parts of the reference table alone: events, state and effects, with an agent that keeps what it is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remora.agent.agent import Agent
from remora.errors import NotInitialized, OwnerDied
from remora.rref.effect_runner import EffectRunner
from remora.rref.held_refs import HeldRefs
from remora.rref.owned_values import OwnedValues
from remora.rref.ref_table import Table
from remora.rref.state import RefState
from remora.rref.value import Value
from remora.vocabulary.effects import AskOwner, Goodbye, TellParent
from remora.vocabulary.ids import GloballyUniqueId, WorkerInfo
from remora.vocabulary.messages import MessageType
from remora.wire.id_codec import pack_id
from remora.wire.packed import Packed
from tests.systematic.tracing import SIGNALS, AtMoment, raising

ME, OTHER, THIRD = cast(Any, "me"), cast(Any, "other"), cast(Any, "third")
VALUE, FORK, CHILD = GloballyUniqueId(1, 1), GloballyUniqueId(1, 2), GloballyUniqueId(1, 3)


class Pool:
    """Keeps tasks until `run`."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []
        self.call_soon = self.submit_system = self.submit_final = self.tasks.append

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Scene:
    """An agent with three workers, whose messages are kept: (worker, type, function to call with the answer)."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.sent: list[tuple[Any, str, Callable[[BaseException | None], None]]] = []
        self.bodies: list[bytes] = []  # of all messages
        workers = {key: SimpleNamespace(key=key, name=str(key), state="alive") for key in (ME, OTHER, THIRD)}
        peers = SimpleNamespace(
            me=workers[ME], by_key=workers.get, known=workers.get, all=lambda: list(workers.values()),
            watch_all=lambda: None, on_gone=[],
        )  # fmt: skip
        self.agent = SimpleNamespace(
            me=WorkerInfo("me", 0), pool=self.pool, peers=peers, retries=SimpleNamespace(send=self._send), ticks=[],
            running=True,
        )  # fmt: skip

    def _send(self, peer: Any, kind: int, packed: Packed, name: str, finish: Any, urgent: bool) -> None:
        self.bodies.append(packed.body)
        self.sent.append((peer.key, name, finish))

    def answer(self, failure: BaseException | None = None) -> str:
        _, name, finish = self.sent.pop(0)
        finish(failure)
        return name

    def table(self) -> Table:
        return Table(cast(Agent, self.agent))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_runner_keeps_the_order_of_steps_that_a_step_posts(scene: Scene) -> None:
    done: list[str] = []
    agent = cast(Agent, scene.agent)
    runner = EffectRunner(agent, RefState(agent), lambda fork, failure: None)

    def second() -> list[Callable[[], None]]:
        return [lambda: done.append("effect of second")]

    def first() -> list[Callable[[], None]]:
        runner.change(second)  # as a destructor would, in the midst of a step
        done.append("first")
        assert runner.in_midst()
        assert runner.has_steps()
        return [lambda: done.append("effect of first")]

    runner.change(first)
    assert done == ["first", "effect of first", "effect of second"]
    assert not runner.is_busy()
    assert not runner.in_midst()


def test_goodbyes_to_one_worker_share_a_message(scene: Scene) -> None:
    runner = scene.table().runner
    runner.perform([Goodbye(OTHER, VALUE, FORK), TellParent(THIRD, CHILD), Goodbye(OTHER, VALUE, CHILD)])
    assert [(to, name) for to, name, _ in scene.sent] == [(THIRD, "RREF_CHILD_ACCEPT"), (OTHER, "RREF_USER_DELETE")]


def test_a_message_to_a_worker_that_is_gone_is_answered_at_once(scene: Scene) -> None:
    answers: list[BaseException | None] = []
    agent = cast(Agent, scene.agent)
    runner = EffectRunner(agent, RefState(agent), lambda fork, failure: answers.append(failure))
    runner.perform([AskOwner(cast(Any, "nowhere"), VALUE, FORK)])
    assert [type(each) for each in answers] == [OwnerDied]


def test_a_reference_from_another_holder_is_confirmed_when_the_owner_answers(scene: Scene) -> None:
    table = scene.table()
    told: list[str] = []
    assert not table.held.adopt(VALUE, FORK, OTHER, THIRD)
    assert table.state.is_pending(FORK)
    table.held.when_all_confirmed([FORK], lambda: told.append("ready"))
    assert scene.answer() == "RREF_FORK_REQUEST"
    assert table.state.is_confirmed(FORK)
    assert told == []  # not on the thread that read the answer
    scene.pool.run()
    assert told == ["ready"]
    assert scene.answer() == "RREF_CHILD_ACCEPT"
    assert table.counts() == dict.fromkeys(table.counts(), 0)


def test_a_reference_that_the_owner_refuses_fails_and_its_parent_is_told(scene: Scene) -> None:
    table = scene.table()
    table.held.adopt(VALUE, FORK, OTHER, THIRD)
    error = OwnerDied("for the test")
    scene.answer(error)
    assert table.state.failures == {FORK: error}
    assert not table.state.holder.forks
    assert scene.answer() == "RREF_CHILD_ACCEPT"


def test_a_dropped_reference_says_goodbye_when_the_pool_runs(scene: Scene) -> None:
    table = scene.table()
    scene.agent.timers = SimpleNamespace(soon=lambda seconds, task: None)
    table.held.hold(VALUE, FORK, OTHER)
    table.held.confirmed(FORK)
    table.held.releases.put(FORK)
    assert scene.sent == []
    scene.pool.run()
    assert scene.answer() == "RREF_USER_DELETE"
    assert table.snapshot().held == []


def test_the_value_of_the_last_fork_is_freed_by_the_pool(scene: Scene) -> None:
    table = scene.table()
    table.owned.share(Value(VALUE, "text"), FORK, OTHER)
    table.owned.count(VALUE, CHILD, THIRD)
    assert table.leaks() == [f"Leaking RRef {VALUE} with fork Id {fork}" for fork in (FORK, CHILD)]
    table.owned.delete(VALUE, FORK)
    assert table.owned.find(VALUE) is not None
    table.owned.delete(VALUE, CHILD)
    assert table.owned.find(VALUE) is None
    assert len(scene.pool.tasks) == 1
    scene.pool.run()


def test_values_whose_holder_drops_them_together_are_destroyed_by_one_task(scene: Scene) -> None:
    table, ids, destroyed = share_many(scene, 5)
    table.owned.delete_all(ids)
    assert not table.state.values
    assert destroyed == []  # their destructors are code of the program: no thread runs them in a step
    assert len(scene.pool.tasks) == 1
    scene.pool.run()
    assert len(destroyed) == 5


def test_a_strike_while_values_are_freed_leaves_their_destructors_to_the_pool() -> None:
    def free(scene: Scene, n: int) -> bool:
        table, ids, destroyed = share_many(scene, 3)
        struck = strike_at(n, lambda: table.owned.delete_all(ids))
        if struck:
            table.owned.delete_all(ids)  # as the inbox would, in which the message is left
        # But for one that had left the table, and had not come to the list, at that moment.
        assert len(destroyed) <= (1 if struck else 0)
        scene.pool.run()
        assert len(destroyed) == 3
        assert not table.state.values
        assert not table.runner.is_busy()
        return struck

    assert moments_tried(free) > 20


def test_a_strike_while_the_queue_is_emptied_loses_no_reference() -> None:
    def release(scene: Scene, n: int) -> bool:
        scene.agent.timers = SimpleNamespace(soon=lambda seconds, task: None)
        table, forks = scene.table(), [GloballyUniqueId(1, 10 + k) for k in range(4)]
        for fork in forks:
            table.held.hold(VALUE, fork, OTHER)
            table.held.confirmed(fork)
            table.held.releases.put(fork)
        struck = strike_at(n, table.held.releases.empty)
        table.held.releases.check()  # at the next tick
        scene.pool.run()
        said = b"".join(scene.bodies)
        assert [fork for fork in forks if pack_id(fork) not in said] == []
        assert not table.state.holder.forks
        return struck

    assert moments_tried(release) > 20


def test_a_strike_while_a_dropped_reference_is_confirmed_loses_no_goodbye() -> None:
    def confirm(scene: Scene, n: int) -> bool:
        table = scene.table()
        scene.agent.timers = SimpleNamespace(soon=lambda seconds, task: None)
        table.held.hold(VALUE, FORK, OTHER)
        table.held.releases.put(FORK)
        scene.pool.run()
        struck = strike_at(n, lambda: table.held.confirmed(FORK))
        if struck:
            table.held.confirmed(FORK)  # as the inbox would, in which the answer is left
        scene.pool.run()
        assert any(pack_id(FORK) in body for body in scene.bodies), n
        assert not table.state.holder.forks
        return struck

    assert moments_tried(confirm) > 10


def test_a_strike_while_a_child_is_accepted_loses_no_goodbye() -> None:
    def accept(scene: Scene, n: int) -> bool:
        table = scene.table()
        scene.agent.timers = SimpleNamespace(soon=lambda seconds, task: None)
        table.held.hold(VALUE, FORK, OTHER)
        table.held.confirmed(FORK)
        table.held.share(FORK, CHILD, THIRD)
        table.held.releases.put(FORK)
        scene.pool.run()
        struck = strike_at(n, lambda: table.held.accepted(CHILD))
        if struck:
            table.held.accepted(CHILD)
        scene.pool.run()
        assert any(pack_id(FORK) in body for body in scene.bodies), n
        assert not table.state.holder.forks
        assert not table.state.holder.parents
        return struck

    assert moments_tried(accept) > 10


def test_a_strike_while_a_reference_of_another_holder_is_confirmed_leaves_its_parent_told() -> None:
    def confirm(scene: Scene, n: int) -> bool:
        table = scene.table()
        assert not table.held.adopt(VALUE, FORK, OTHER, THIRD)
        struck = strike_at(n, lambda: table.held.confirmed(FORK))
        if struck:
            table.held.confirmed(FORK)
        scene.pool.run()
        assert "RREF_CHILD_ACCEPT" in [name for _, name, _ in scene.sent], n
        return struck

    assert moments_tried(confirm) > 10


def share_many(scene: Scene, n: int) -> tuple[Table, list[GloballyUniqueId], list[int]]:
    """A table with values that another worker holds, the ids of its goodbyes, and the list of values that were destroyed."""
    table, destroyed = scene.table(), []

    class Thing:
        def __del__(self) -> None:
            destroyed.append(1)

    ids = []
    for k in range(n):
        rref, fork = GloballyUniqueId(1, 10 + k), GloballyUniqueId(2, 10 + k)
        table.owned.share(Value(rref, Thing()), fork, OTHER)
        ids += [rref, fork]
    return table, ids, destroyed


class Struck(BaseException):
    """What a signal handler raises."""


def strike_at(n: int, work: Callable[[], object]) -> bool:
    """Do some work, with an exception at the n-th point where the interpreter looks for signals. Return True if it came
    that far."""
    strike = AtMoment(n, raising(Struck), SIGNALS)
    try:
        with strike:
            work()
    except Struck:
        pass
    return strike.place is not None


def moments_tried(attempt: Callable[[Scene, int], bool]) -> int:
    """Attempt it at each such point, each time in a new scene. Return their number."""
    n = 0
    while attempt(Scene(), n):
        n += 1
    return n


def test_the_owner_and_the_holders_are_told_of_a_loss(scene: Scene) -> None:
    table = scene.table()
    table.held.hold(VALUE, FORK, OTHER)
    told: list[str] = []
    table.held.when_confirmed(FORK, lambda: told.append("lost"))
    table.owned.share(Value(CHILD, "text"), CHILD, OTHER)
    scene.agent.peers.by_key(OTHER).state = "dead"
    table.lost(cast(Any, SimpleNamespace(key=OTHER, info="other", reason="for the test")))
    scene.pool.run()
    assert told == ["lost"]
    assert isinstance(table.state.failures[FORK], OwnerDied)
    assert [to for to, _, _ in scene.sent] == [THIRD]  # it has to confirm the loss before the fork goes
    table.heard(THIRD, OTHER)
    assert table.owned.find(CHILD) is None


def test_values_that_are_not_made_fail_at_the_end_and_so_do_those_that_come_later(scene: Scene) -> None:
    agent = cast(Agent, scene.agent)
    state = RefState(agent)
    owned = OwnedValues(state, EffectRunner(agent, state, lambda fork, failure: None))
    early = owned.create(VALUE, FORK, OTHER, script=False)
    owned.end()
    late = owned.create(CHILD, CHILD, OTHER, script=False)
    for value in (early, late):
        with pytest.raises(NotInitialized, match="no longer running"):
            value.get()


def test_a_broken_reference_still_says_goodbye(scene: Scene) -> None:
    agent = cast(Agent, scene.agent)
    state = RefState(agent)
    held = HeldRefs(state, EffectRunner(agent, state, lambda fork, failure: None))
    held.hold(VALUE, FORK, OTHER)
    held.mark_broken(FORK, OwnerDied("for the test"))
    assert [each.state for each in state.snapshot().held] == ["unusable"]
    held.drop_all()
    assert [name for _, name, _ in scene.sent] == [MessageType.RREF_USER_DELETE.name]
