"""Faults on real links: the session survives what happens on the wire, and what it cannot survive is told, by name."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.errors import CallNotSent, CallOutcomeUnknown, CallTimeout, RemoraError, WorkerLost
from remora.faults.injector import Injector, Stage
from remora.faults.plan_runner import PlanRunner
from remora.faults.worker_faults import WorkerFaults
from remora.testing import faults
from remora.testing.world import World
from remora.transport.link import StreamLink
from remora.vocabulary.messages import MessageType
from tests.faults.trials import QUICK, quick_time
from tests.workers import Workers

CALL, RET = MessageType.PYTHON_CALL, MessageType.PYTHON_RET

ran: Counter[Any] = Counter()


def run(key: Any) -> Any:
    ran[key] += 1
    return key


def how_often() -> dict[Any, int]:
    return dict(ran)


@pytest.fixture
def world() -> Iterator[World]:
    ran.clear()
    with quick_time(), World(3, faults="", **QUICK) as world:
        yield world


def call(world: World, key: Any, to: str = "worker1", timeout: float = 5.0) -> Any:
    return world.run(0, rpc.rpc_sync, to, run, args=(key,), timeout=timeout)


# What happens on the wire.


@pytest.mark.parametrize("where", ["PYTHON_CALL worker0->worker1", "PYTHON_RET worker1->worker0"])
@pytest.mark.parametrize("deed", ["drop", "duplicate", "reorder", "corrupt"])
def test_the_session_survives_every_fault_of_the_wire(world: World, deed: str, where: str) -> None:
    world.faults.set(f"{deed} {where} #2; {deed} {where} #4")
    assert [call(world, i) for i in range(6)] == list(range(6))
    assert how_often() == dict.fromkeys(range(6), 1)
    assert [record.deed for record in world.faults.report().records] == [deed] * 2


@pytest.mark.parametrize("deed", ["drop", "duplicate", "reorder", "corrupt"])
def test_so_it_does_when_much_goes_wrong_at_once(world: World, deed: str) -> None:
    world.faults.set(f"{deed} * * p=0.2; seed 11")
    futures = [world.run(0, rpc.rpc_async, f"worker{1 + i % 2}", run, args=(i,), timeout=20) for i in range(100)]
    assert torch.futures.wait_all(futures) == list(range(100))
    assert how_often() == dict.fromkeys(range(100), 1)
    assert len(world.faults.report()) > 5


@pytest.mark.parametrize("kind", ["PYTHON_CALL", "PYTHON_RET"])
def test_what_a_worker_loses_on_the_way_to_itself_is_said_again(kind: str) -> None:
    ran.clear()
    with World(1, clock="auto", faults=f"drop {kind} * 1") as world:
        assert call(world, "own", to="worker0", timeout=60) == "own"
        assert how_often() == {"own": 1}
        assert world.clock.now() < 3  # a heartbeat, and not the call's deadline


def test_what_is_late_and_out_of_order_is_late() -> None:
    with World(2, clock="auto", faults="delay PYTHON_CALL * 5s; reorder PYTHON_CALL *") as world:
        assert call(world, 1, timeout=60) == 1
        assert world.clock.now() == 5.0
        assert [record.deed for record in world.faults.report().records] == ["delay", "reorder"]


@pytest.mark.parametrize("shared_memory", [0, 1 << 30])
def test_a_large_tensor_that_is_lost_is_sent_again(shared_memory: int) -> None:
    tensor = torch.arange(100_000.0)
    plan = "drop PYTHON_CALL * #1; corrupt PYTHON_CALL * #3; drop PYTHON_RET * #2; corrupt PYTHON_RET * #4"
    with quick_time(), World(2, faults=plan, shared_memory=shared_memory, **QUICK) as world:
        for _ in range(4):
            assert torch.equal(world.run(0, rpc.rpc_sync, "worker1", echo, args=(tensor,), timeout=5), tensor)
        assert len(world.faults.report()) == 4


def echo(value: Any) -> Any:
    return value


def test_a_link_on_which_nothing_arrives_whole_is_given_up_at_last(world: World) -> None:
    world.faults.set("corrupt PYTHON_CALL worker0->worker1")
    with pytest.raises(CallOutcomeUnknown):
        call(world, 1)
    assert call(world, 2, "worker2") == 2
    assert how_often() == {2: 1}


def test_a_message_that_is_lost_for_good_times_out(world: World) -> None:
    world.faults.set("drop PYTHON_CALL worker0->worker1")
    started = time.monotonic()
    with pytest.raises(CallOutcomeUnknown):
        call(world, 1, timeout=0.3)
    assert time.monotonic() - started < 3
    assert how_often() == {}


def test_a_late_message_delays_its_call_and_counts_against_its_timeout(world: World) -> None:
    world.faults.set("delay PYTHON_CALL worker0->worker1 200ms")
    started = time.monotonic()
    assert call(world, 1) == 1
    assert time.monotonic() - started >= 0.2
    with pytest.raises(CallTimeout):
        call(world, 2, timeout=0.05)


# Attempts that fail.


def test_an_attempt_to_send_fails_with_pytorchs_words(world: World) -> None:
    world.faults.set("fail PYTHON_CALL * 2")
    with pytest.raises(CallNotSent, match=r"^RPCErr:2:Send attempt failed intentionally for the call of .*run on worker1"):
        call(world, 1)
    future = world.run(0, rpc.rpc_async, "worker1", run, args=(2,))
    with pytest.raises(CallNotSent, match="RPCErr:2:"):
        future.wait()
    assert call(world, 3) == 3
    assert how_often() == {3: 1}


def test_a_reference_whose_making_was_not_sent_says_so_and_leaves_nothing_behind(world: World) -> None:
    for to in ("worker1", "worker0"):
        world.faults.set("fail PYTHON_REMOTE_CALL * 1")
        reference = world.run(0, rpc.remote, to, run, args=(1,))
        with pytest.raises(RemoraError, match=r"RRef creation via rpc\.remote\(\) failed"):
            reference.to_here()
        with pytest.raises(RemoraError, match="RRef creation"):
            world.run(0, rpc.rpc_sync, "worker2", echo, args=(reference,))
        del reference
        world.wait_until(lambda: not world.unrest())
    assert how_often() == {}


def test_a_reference_in_a_call_that_was_not_sent_is_not_handed_out(world: World) -> None:
    reference = world.run(0, rpc.remote, "worker1", run, args=(1,))
    assert reference.to_here() == 1
    world.faults.set("fail PYTHON_CALL * 1")
    with pytest.raises(CallNotSent):
        world.run(0, rpc.rpc_sync, "worker2", echo, args=(reference,))
    del reference
    world.wait_until(lambda: not world.unrest())


# Links and workers.


def test_a_call_waits_out_a_cut_that_heals(world: World) -> None:
    world.faults.set("cut worker0-worker1 after 2 for 150ms")
    started = time.monotonic()
    assert [call(world, i) for i in range(3)] == [0, 1, 2]
    assert 0.1 < time.monotonic() - started < 3
    assert how_often() == {0: 1, 1: 1, 2: 1}


def test_a_cut_that_stays_costs_the_peer_and_nobody_else(world: World) -> None:
    assert call(world, 1) == 1
    world.faults.set("cut worker0-worker1")
    with pytest.raises((WorkerLost, CallNotSent), match="worker1"):
        call(world, 2)
    assert call(world, 3, "worker2") == 3
    world.run(2, rpc.rpc_sync, "worker0", run, args=(4,))


def test_a_plan_is_at_work_when_set_returns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that holds the pipes may run late. A message that is sent right after `set` must not be faster than it."""
    assert call(world, "before") == "before"
    look = Injector.look

    def look_late(injector: Injector, course: PlanRunner) -> None:
        time.sleep(0.05)
        look(injector, course)

    monkeypatch.setattr(Injector, "look", look_late)
    pipes = world.faults.pump.pipes
    world.faults.set("freeze worker1")
    assert any(pipe.held for pipe in pipes)
    world.faults.heal()
    assert not any(pipe.held for pipe in pipes)


def test_no_link_escapes_a_plan_that_comes_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the links made anew that it finds. It does not find one that a channel is about to use."""
    ran.clear()
    with World(2, **QUICK) as world:
        assert call(world, "before") == "before"
        in_between, injected = threading.Event(), threading.Event()

        to_worker1 = world[0].agent.peers.find("worker1")
        interpose = WorkerFaults.interpose

        def interpose_and_wait(faults: WorkerFaults, peer: str, link: StreamLink, leftover: bytes) -> StreamLink:
            link = interpose(faults, peer, link, leftover)
            if (faults, peer) == (to_worker1.faults, "worker1") and not in_between.is_set():
                in_between.set()
                assert injected.wait(20)
            return link

        monkeypatch.setattr(WorkerFaults, "interpose", interpose_and_wait)
        to_worker1.outgoing.cut(ConnectionError("a new link is made"))
        assert in_between.wait(20)
        stage = Stage("world", shared=True)
        world[0].agent.inject(stage.join("worker0", world[0].agent.kill))
        injected.set()
        world.wait_until(lambda: call(world, "it passes") and stage.messages()["worker0", "worker1", CALL] > 0)


def test_a_cut_can_be_healed_by_hand(world: World) -> None:
    world.faults.set("cut worker0-worker1")
    future = world.run(0, rpc.rpc_async, "worker1", run, args=(1,))
    world.wait_until(lambda: world.faults.runner.severed("worker0", "worker1"))
    assert not future.done()
    world.faults.heal()
    assert future.wait() == 1


def test_a_partition_separates_the_groups_and_leaves_each_whole(world: World) -> None:
    world.faults.set("partition worker0|worker1,worker2")
    with pytest.raises(RemoraError):
        call(world, 1)
    assert world.run(1, rpc.rpc_sync, "worker2", run, args=(2,)) == 2


def test_a_frozen_worker_is_silent_and_then_goes_on(world: World) -> None:
    assert call(world, 1) == 1
    world.faults.set("freeze worker1 for 200ms")
    started = time.monotonic()
    assert call(world, 2) == 2
    assert time.monotonic() - started > 0.1
    assert how_often() == {1: 1, 2: 1}


def test_a_killed_worker_dies(world: World) -> None:
    world.faults.set("kill worker1 after 4")
    assert call(world, 1) == 1  # the name of the function, the request, the answer
    with pytest.raises(WorkerLost, match="worker1"):
        call(world, 2)  # the fourth message is its request
    assert [str(record).split()[2:] for record in world.faults.report().records] == [["kill", "worker1"]]


# Setting plans, and what they tell.


def test_a_plan_may_be_set_while_the_program_runs() -> None:
    ran.clear()
    with World(2) as world:
        assert call(world, 1) == 1
        assert world[0].agent.faults is None  # without a plan there is nothing in the way
        world.faults.set("corrupt PYTHON_CALL worker0->worker1 1")
        assert call(world, 2) == 2
        assert len(world.faults.report()) == 1
        world.faults.set("")
        assert call(world, 3) == 3
    assert how_often() == {1: 1, 2: 1, 3: 1}


def test_a_plan_that_makes_no_sense_changes_nothing(world: World) -> None:
    world.faults.set("drop PYTHON_CALL * #2")
    with pytest.raises(ValueError):
        world.run(0, faults.set, "drop everything")
    assert str(world.run(0, faults.stage).plan) == "drop PYTHON_CALL * #2"


def test_the_messages_of_a_program_are_counted(world: World) -> None:
    call(world, 1)
    call(world, 2)
    names = ("worker0", "worker1", MessageType.FUNCTION)
    assert world.faults.messages() == {names: 1, ("worker0", "worker1", CALL): 2, ("worker1", "worker0", RET): 2}


def test_the_environment_sets_the_plan_of_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_FAULTS", "fail PYTHON_CALL * 1")
    with World(2) as world:
        with pytest.raises(CallNotSent):
            call(world, 1)
        assert call(world, 2) == 2


def test_what_was_done_prints(world: World) -> None:
    assert str(world.faults.report()) == "nothing was done"
    world.faults.set("duplicate PYTHON_CALL * #1")
    call(world, 1)
    line = str(world.faults.report())
    assert line.endswith("s  duplicate PYTHON_CALL worker0->worker1 #1")


# In processes of their own.


def call_many(to: str, n: int) -> list[Any]:
    return list(torch.futures.wait_all([rpc.rpc_async(to, run, args=(i,), timeout=20) for i in range(n)]))


def done() -> list[str]:
    return [record.deed for record in faults.report().records]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_real_workers_survive_a_plan_given_as_an_option(transport: str) -> None:
    plan = "drop * * p=0.05; duplicate * * p=0.05; corrupt * * p=0.02; cut worker0-worker1 after 50 for 100ms; seed 5"
    options = {"faults": plan, "transports": [transport], "heartbeat": 0.3}
    with Workers(2, options=options) as workers:
        assert workers.run(0, call_many, "worker1", 200) == list(range(200))
        assert workers.run(1, how_often) == dict.fromkeys(range(200), 1)
        assert "cut" in workers.run(0, done)
        assert {"drop", "duplicate"} <= set(workers.run(0, done) + workers.run(1, done))


def set_and_call(plan: str, to: str) -> tuple[list[Any], list[str]]:
    values = call_many(to, 3)
    faults.set(plan)
    values += call_many(to, 20)
    report = done()
    faults.clear()
    return values + call_many(to, 3), report


def test_a_real_worker_changes_its_plan_while_it_runs() -> None:
    with Workers(2, options={"heartbeat": 0.3}) as workers:
        values, report = workers.run(0, set_and_call, "drop PYTHON_CALL * #5; corrupt PYTHON_CALL * #9", "worker1")
        assert values == [*range(3), *range(20), *range(3)]
        assert report == ["drop", "corrupt"]


def test_a_real_worker_kills_itself() -> None:
    with Workers(2, options={"faults": "kill worker1 after 6"}) as workers:
        with pytest.raises(RemoraError, match="worker1"):
            workers.run(0, call_one_by_one, "worker1", 10)
        workers.kill(1)  # it is dead already: nothing happens, but its exit code is not looked at


def call_one_by_one(to: str, n: int) -> list[Any]:
    return [rpc.rpc_sync(to, run, args=(i,), timeout=20) for i in range(n)]


def test_a_real_worker_freezes_itself_and_wakes_up() -> None:
    # (The greetings of the two when they start are four messages.)
    with Workers(2, options={"faults": "freeze worker1 after 8 for 600ms"}) as workers:
        started = time.monotonic()
        assert workers.run(0, call_one_by_one, "worker1", 5) == list(range(5))
        assert time.monotonic() - started > 0.5
        assert workers.run(1, done) == ["freeze", "thaw"]


def set_environment(name: str, value: str) -> None:
    os.environ[name] = value


def test_the_environment_sets_the_plan_of_a_real_worker() -> None:
    with Workers(2, join=False) as workers:
        for rank in range(2):
            workers.run(rank, set_environment, "REMORA_FAULTS", "fail PYTHON_CALL worker0->worker1 1")
        for pending in [workers.join(rank) for rank in range(2)]:
            pending.result()
        with pytest.raises(CallNotSent):
            workers.run(0, call_one_by_one, "worker1", 1)
        assert workers.run(0, call_one_by_one, "worker1", 2) == [0, 1]


def test_a_forked_child_holds_no_connection_of_its_parents_plan(world: World) -> None:
    assert call(world, 1) == 1
    pump = world.faults.pump
    descriptors = [flow.source.fileno() for pipe in pump.pipes for flow in pipe.flows]
    assert descriptors
    child = os.fork()
    if child == 0:
        os._exit(sum(_is_open(descriptor) for descriptor in descriptors))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert call(world, 2) == 2


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
