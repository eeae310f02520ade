"""Virtual time: it stands still until it is moved, everything that is due happens in order at its own time, and quickly."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel.pool_reads import PoolReads
from remora.agent.runtime.timers import Timers
from remora.clock import NEVER, SYSTEM, Clock, SystemClock
from remora.errors import CallTimeout, WorkerLost
from remora.protocol.member_rules import Died, Suspected
from remora.testing.virtual_clock import VirtualClock
from remora.testing.world import World
from remora.transport.shm.lender import IDLE
from remora.vocabulary.messages import MessageType
from tests.eventually import eventually


@pytest.fixture(autouse=True)
def in_no_time() -> Iterator[None]:
    """Virtual time takes hardly any real time: less than any time limit of a worker that is waited for here."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 25.0


# The clocks alone.


def test_the_systems_clock_is_the_systems() -> None:
    assert SystemClock.now is time.monotonic  # nothing in between: it is asked on the way of every call
    clock: Clock = SYSTEM
    assert clock.block(threading.Event().wait, clock.now() + 0.01) is False
    assert clock.block(threading.Event().wait, clock.now() - 1.0) is False


def test_it_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock()
    assert clock.now() == 0.0
    clock.advance(2.5)
    clock.advance(0.0)
    assert clock.now() == 2.5
    with pytest.raises(ValueError, match="not negative"):
        clock.advance(-1)
    for nowhere in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"finite number of seconds, got {nowhere}"):
            clock.advance(nowhere)
    assert clock.now() == 2.5


@pytest.fixture
def timers() -> Iterator[tuple[VirtualClock, Timers]]:
    clock = VirtualClock()
    timers = Timers("test", clock)
    timers.start()
    clock.still = _OnlyTimers(timers)
    yield clock, timers
    timers.stop()


class _OnlyTimers:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def under_way(self) -> str:
        return "" if self._timers.idle else "a timer is due"

    def at_work(self, asleep: set[threading.Thread]) -> dict[str, int]:
        return {}


def test_what_is_due_runs_in_order_at_its_own_time(timers: tuple[VirtualClock, Timers]) -> None:
    clock, ahead = timers
    ran: list[tuple[str, float]] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: ran.append((what, clock.now()))

    def note_and_go_on() -> None:
        note("second")()
        ahead.at(clock.now() + 0.5, note("between"))

    ahead.at(3.0, note("third"))
    ahead.at(1.0, note("first"))
    ahead.at(2.0, note_and_go_on)
    ahead.at(4.5, note("too late"))
    clock.advance(4.0)
    assert ran == [("first", 1.0), ("second", 2.0), ("between", 2.5), ("third", 3.0)]
    assert clock.now() == 4.0


def test_a_moment_of_patience_takes_no_time(timers: tuple[VirtualClock, Timers]) -> None:
    clock, ahead = timers
    ran = threading.Event()
    ahead.soon(0.002, ran.set)
    assert ran.wait(5.0)
    assert clock.now() == 0.0


def waiting(clock: VirtualClock, event: threading.Event, deadline: float) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append((clock.block(event.wait, deadline), clock.now())))
    thread.start()
    return thread, found


def test_who_waits_wakes_when_its_deadline_has_passed_and_not_before() -> None:
    clock = VirtualClock()
    thread, found = waiting(clock, threading.Event(), 10.0)
    eventually(lambda: "1 threads wait" in repr(clock))
    clock.advance(9.9)
    assert not found
    clock.advance(5.0)
    thread.join(5.0)
    assert found == [(False, 10.0)]


def test_who_waits_for_something_gets_it_though_no_time_passes() -> None:
    clock, event = VirtualClock(), threading.Event()
    thread, found = waiting(clock, event, NEVER)
    event.set()
    thread.join(5.0)
    assert found == [(True, 0.0)]


# A world whose time stands still.


def double(x: int) -> int:
    return 2 * x


class Gate:
    """Keeps functions inside until it is opened."""

    opened = threading.Event()


def wait_at_the_gate() -> None:
    Gate.opened.wait(20.0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    Gate.opened = threading.Event()
    yield Gate.opened
    Gate.opened.set()


@pytest.fixture
def world() -> Iterator[World]:
    with World(3, clock="virtual") as world:
        yield world


def states(world: World, i: int = 0) -> list[str]:
    return [member.state for member in world[i].members()]


def test_calls_need_no_time(world: World) -> None:
    assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
    assert world.run(0, lambda: rpc.rpc_async("worker2", double, args=(2,)).wait()) == 4
    rref = world.run(1, rpc.remote, "worker2", double, args=(3,))
    assert world.run(1, rref.to_here) == 6
    world.run(1, rref._get_future().wait)
    del rref
    world.wait_until(lambda: not world.unrest())
    assert world.clock.now() == 0.0


def test_a_reply_that_may_wait_for_the_next_tick_is_read_without_one(world: World) -> None:
    """No thread waits until an owner has noted that a reference is dropped: its worker may not even look for the reply."""
    rref = world.run(1, rpc.remote, "worker2", double, args=(3,))
    assert world.run(1, rref.to_here) == 6
    world.wait_until(lambda: not world[1].agent.peers.find("worker2").outgoing.pending)
    world[1].agent.peers.find("worker2").outgoing.pool_reads.unwatch()
    del rref
    world.wait_until(lambda: not world.unrest())


def test_a_call_ends_at_its_deadline(world: World, gate: threading.Event) -> None:
    future = world.run(0, rpc.rpc_async, "worker1", wait_at_the_gate, timeout=60)
    world.clock.advance(59.99)
    assert not future.done()
    world.clock.advance(0.01)
    with pytest.raises(CallTimeout, match=r"set timeout \(60000 ms\)"):
        future.wait()


def test_so_does_one_that_a_thread_waits_for(world: World, gate: threading.Event) -> None:
    ended: list[tuple[type[BaseException], float]] = []

    def program() -> None:
        try:
            rpc.rpc_sync("worker1", wait_at_the_gate, timeout=60)
        except CallTimeout as error:
            ended.append((type(error), world.clock.now()))

    thread = threading.Thread(target=world.run, args=(0, program))
    thread.start()
    eventually(lambda: world[1].agent.dispatch.counts() == 1)
    world.clock.advance(100)
    thread.join(5.0)
    assert ended == [(CallTimeout, 60.0)]


def test_a_program_that_tries_again_does_so_at_its_own_times(world: World, gate: threading.Event) -> None:
    tries: list[float] = []

    def program() -> None:
        for _ in range(4):
            tries.append(world.clock.now())
            with pytest.raises(CallTimeout):
                rpc.rpc_sync("worker1", wait_at_the_gate, timeout=2.5)

    thread = threading.Thread(target=world.run, args=(0, program))
    thread.start()
    eventually(lambda: world[1].agent.dispatch.counts() == 1)
    world.clock.advance(20)
    thread.join(5.0)
    assert tries == [0.0, 2.5, 5.0, 7.5]


def test_to_wait_for_a_future_goes_by_the_clock_of_its_call(world: World, gate: threading.Event) -> None:
    future = world.run(0, rpc.rpc_async, "worker1", wait_at_the_gate, timeout=0)
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(TimeoutError, match="not done after waiting for 30 s"):
            future.wait(30)
        found.append(f"{world.clock.now():g} s")

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: "4 threads wait" in repr(world.clock))
    world.clock.advance(31)
    thread.join(5.0)
    assert found == ["30 s"]


def test_idle_workers_go_on_trusting_each_other(world: World) -> None:
    assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
    world.clock.advance(300)
    assert [states(world, i) for i in range(3)] == [["alive"] * 3] * 3


def test_a_silent_worker_is_suspected_and_then_given_up(world: World) -> None:
    news: list[tuple[str, float]] = []

    def listen(event: object) -> None:
        if isinstance(event, Suspected | Died):
            news.append((type(event).__name__, world.clock.now()))

    world.run(0, rpc.on_membership, listen)
    assert world.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
    world.set_faults("freeze worker1")
    future = world.run(0, rpc.rpc_async, "worker1", double, args=(2,), timeout=0)
    world.clock.advance(2.9)
    assert states(world) == ["alive", "alive", "alive"]
    world.clock.advance(1.0)
    assert states(world) == ["alive", "suspected", "alive"]
    world.clock.advance(25.0)
    assert states(world) == ["alive", "suspected", "alive"]
    assert not future.done()
    world.clock.advance(2.0)
    assert states(world) == ["alive", "dead", "alive"]
    with pytest.raises(WorkerLost, match="silent for 30 s"):
        future.wait()
    world.wait_until(lambda: len(news) == 2)
    assert [what for what, _ in news] == ["Suspected", "Died"]
    assert 3.0 <= news[0][1] <= 3.6
    assert 30.0 <= news[1][1] <= 30.9


def test_a_message_is_as_late_as_the_plan_says(world: World) -> None:
    world.set_faults("delay PYTHON_RET worker1->worker0 5s")
    future = world.run(0, rpc.rpc_async, "worker1", double, args=(4,))
    world.clock.advance(4.999)
    assert not future.done()
    world.clock.advance(0.001)
    assert future.done()
    assert future.wait() == 8


def test_what_the_plan_does_at_a_time_is_done_then(world: World) -> None:
    world.set_faults("cut worker0-worker1 at 10s for 2s; kill worker2 at 20s")
    world.clock.advance(19)
    assert world[2].agent.running
    world.clock.advance(2)
    assert not world[2].agent.running
    told = [(record.at, record.deed) for record in world.faults.report().records]
    assert told == [(10.0, "cut"), (12.0, "heal"), (20.0, "kill")]


def test_shared_memory_that_is_not_used_is_returned(world: World) -> None:
    lender = world[0].agent.peers.shared_memory.lender
    assert world.run(0, rpc.rpc_sync, "worker1", torch.sum, args=(torch.ones(100_000),)) == 100_000
    world.clock.advance(1.0)
    assert lender.counts() != (0, 0)
    world.clock.advance(IDLE + 1.0)
    assert lender.counts() == (0, 0)


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


def test_coroutines_sleep_by_the_clock(world: World) -> None:
    future = world.run(0, rpc.rpc_async, "worker1", nap, args=(5.0,))
    world.clock.advance(4.9)
    assert not future.done()
    world.clock.advance(0.1)
    assert future.done()
    assert future.wait() == "awake"


def test_a_gathering_ends_at_its_deadline(world: World) -> None:
    ended: list[float] = []

    def gather() -> None:
        with pytest.raises(CallTimeout, match=r"\['worker1', 'worker2'\] timed out in _all_gather"):
            rpc.api._all_gather(1, timeout=7.0)
        ended.append(world.clock.now())

    thread = threading.Thread(target=world.run, args=(0, gather))
    thread.start()
    eventually(lambda: "4 threads wait" in repr(world.clock))
    world.clock.advance(10)
    thread.join(5.0)
    assert ended == [7.0]


def test_it_ends_though_its_time_stands_still(world: World) -> None:
    world.set_faults("delay PYTHON_RET worker1->worker0 5s 1")
    future = world.run(0, rpc.rpc_async, "worker1", double, args=(1,))
    world.shutdown()
    assert future.wait() == 2
    assert world.clock.now() == 5.0


def test_it_can_be_left_with_everything_under_way(gate: threading.Event) -> None:
    started = time.monotonic()
    with World(2, clock="virtual", faults="freeze worker1; delay * * 3600s") as world:
        future = world.run(0, rpc.rpc_async, "worker1", double, args=(1,), timeout=0)
    assert time.monotonic() - started < 3.0
    with pytest.raises(RuntimeError):
        future.wait()


# A world whose time passes by itself.


@pytest.fixture
def auto() -> Iterator[World]:
    with World(3, clock="auto") as world:
        yield world


def test_nobody_waits_for_what_is_far_away(auto: World) -> None:
    auto.set_faults("delay PYTHON_RET worker1->worker0 20s 1; drop PYTHON_CALL worker0->worker2 1")
    assert auto.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
    assert auto.clock.now() == 20.0
    assert auto.run(0, rpc.rpc_sync, "worker2", double, args=(2,)) == 4
    assert 21.0 <= auto.clock.now() <= 22.0  # it is missed after a heartbeat


def test_deadlines_pass(auto: World) -> None:
    auto.set_faults("freeze worker1 for 20s")
    with pytest.raises(CallTimeout):
        auto.run(0, rpc.rpc_sync, "worker1", double, args=(1,), timeout=10)
    assert auto.clock.now() == 10.0
    assert auto.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2
    assert auto.clock.now() == 20.0


def test_tries_follow_pytorchs_schedule(auto: World) -> None:
    auto.set_faults("fail RREF_USER_DELETE * 5 each")
    rref = auto.run(0, rpc.remote, "worker1", double, args=(1,))
    assert auto.run(0, rref.to_here) == 2
    del rref
    auto.wait_until(lambda: not auto.unrest())
    assert [record.at for record in auto.faults.report().records] == [0.0, 1.0, 2.0, 3.5, 5.75]
    assert auto.clock.now() == pytest.approx(9.125, abs=0.6)  # the answer is looked at by the next tick
    assert auto.faults.messages()["worker0", "worker1", MessageType.RREF_USER_DELETE] == 1


def test_what_takes_real_time_takes_no_other(auto: World) -> None:
    auto.run(0, rpc.rpc_sync, "worker1", time.sleep, args=(0.1,))
    assert auto.clock.now() == 0.0


def call_behind() -> int:
    return rpc.rpc_sync("worker2", double, args=(5,), timeout=50)


def test_nested_calls_do_not_let_it_run_ahead(auto: World) -> None:
    assert [auto.run(0, rpc.rpc_sync, "worker1", call_behind) for _ in range(20)] == [10] * 20
    assert auto.clock.now() == 0.0


@rpc.functions.async_execution
def never() -> Any:
    return torch.futures.Future()  # type: ignore[no-untyped-call]


def test_what_would_wait_for_ever_is_seen_at_once(auto: World) -> None:
    auto.clock.limit = 100.0
    with pytest.raises(TimeoutError, match="nothing has come for 100 s"):
        auto.run(0, rpc.rpc_sync, "worker1", never, timeout=0)


def test_signs_of_life_do_not_hide_that(auto: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits reads the link, and meets every answer to a question whether the other lives."""
    monkeypatch.setattr(PoolReads, "_read_instead", lambda reads, registration: False)
    assert auto.run(0, rpc.rpc_sync, "worker1", double, args=(1,)) == 2  # there is a link, which no other thread reads
    auto.clock.limit = 100.0
    with pytest.raises(TimeoutError, match="nothing has come for 100 s"):
        auto.run(0, rpc.rpc_sync, "worker1", never, timeout=0)


def test_the_same_seed_tells_the_same_story() -> None:
    def story() -> str:
        with World(2, clock="auto", faults="drop * * p=0.1; delay * * 300ms p=0.2", seed=3) as world:
            for i in range(20):
                assert world.run(0, rpc.rpc_sync, "worker1", double, args=(i,)) == 2 * i
            return f"{world.faults.report()}\n{world.clock.now():.9f} s"

    assert story() == story()


# Asking for it.


def test_a_world_has_a_clock_if_it_was_asked_for(world: World) -> None:
    with World(1) as plain:
        assert plain[0].clock is SYSTEM
        with pytest.raises(RuntimeError, match="this world uses the system clock"):
            _ = plain.clock
    with pytest.raises(ValueError, match="clock must be"):
        World(1, clock="broken")  # type: ignore[arg-type]
    assert world[0].clock is world.clock


def test_the_fixture_makes_one(remora_world: Callable[..., World]) -> None:
    world = remora_world(2, clock="virtual", faults="delay PYTHON_CALL * 20s")
    future = world.run(0, rpc.rpc_async, "worker1", double, args=(1,))
    world.clock.advance(20)
    assert future.wait() == 2
