"""Somebody is always there: nothing waits behind what blocks, be it read or served, and who is not needed goes home.

With real workers. The same for a pool alone is in `test_pool.py` and `runtime/test_leader.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent import agent as agents
from remora.agent.runtime.pool import WorkerPool
from remora.agent.serving.dispatch import Request
from remora.protocol.leader import Thresholds
from remora.testing.world import World
from remora.transport.poller import EpollPoller, SelectPoller
from remora.vocabulary.messages import MessageType
from remora.wire.pickler import pack
from tests.agent.alone import NAME, worker_alone
from tests.eventually import eventually

ASKED, ANSWERED = MessageType.RUN_WITH_PROFILING_REQ, MessageType.RUN_WITH_PROFILING_RESP  # workers do not use them
SOON = 5.0  # seconds: much longer than it takes, much shorter than what blocks would


class Gate:
    """Lets threads pass when it is opened, and knows who has come to it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.came: list[str] = []

    def __call__(self) -> None:
        self.came.append(threading.current_thread().name)
        assert self._open.wait(20.0)

    def open(self) -> None:
        self._open.set()


gate = Gate()


@pytest.fixture(autouse=True)
def shut_gate() -> None:
    global gate
    gate = Gate()


@pytest.fixture
def narrow() -> Iterator[str]:
    """A worker that calls itself and has a single worker thread."""
    with worker_alone(num_worker_threads=1) as name:
        yield name
        gate.open()


@pytest.fixture(params=[EpollPoller, SelectPoller])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Three workers that know each other; what is to block does so on worker 0. There are no ticks, at which somebody would
    find what was forgotten."""
    monkeypatch.setattr(agents, "make_poller", request.param)
    monkeypatch.setattr(agents, "TICK", 60.0)
    with World(3) as made:
        for i in range(1, 3):
            call(made, i)
        yield made
        gate.open()


def double(x: int) -> int:
    return 2 * x


def wait_at_gate() -> None:
    gate()


def call(world: World, i: int, timeout: float = SOON) -> None:
    """Worker i calls a function of worker 0."""
    with world.acting(i):
        assert rpc.rpc_sync("worker0", double, args=(i,), timeout=timeout) == 2 * i


def follow(world: World, to: str) -> None:
    """Worker 0 makes a call, and a callback is run when it is answered."""
    with world.acting(0):
        followed = threading.Event()
        rpc.rpc_async(to, double, args=(1,)).add_done_callback(lambda done: followed.set())
        assert followed.wait(SOON)


def ask(world: World, i: int) -> torch.futures.Future[Any]:
    """Worker i sends worker 0 a request of the type that tests have a handler for."""
    agent = world[i].agent
    return agent.caller.call_async(agent.peers.find("worker0"), int(ASKED), pack(None), 0, 20.0, "a test")


def on_asked(world: World, what: Callable[[], None]) -> None:
    """Have worker 0 do this while it reads."""

    def handle(request: Request) -> None:
        what()
        request.reply(int(ANSWERED), None)

    world[0].agent.dispatch.on(ASKED, handle, inline=True)


# C1, where code runs while a thread takes in what came.


def test_others_are_served_while_a_handler_that_runs_inline_blocks(world: World) -> None:
    on_asked(world, wait_at_gate)
    asked = ask(world, 1)
    eventually(lambda: gate.came)
    for _ in range(3):
        call(world, 2)
    follow(world, "worker2")
    assert not asked.done()
    gate.open()
    assert asked.wait() is None
    call(world, 1)


class SlowToPack:
    """A value of a program which takes its time when it is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        gate()
        return int, (7,)


def test_others_are_served_while_a_value_that_is_fetched_is_packed(world: World) -> None:
    fetched = fetch(world, 1, made(world, 1))
    eventually(lambda: gate.came)
    call(world, 2)
    follow(world, "worker2")
    gate.open()
    assert fetched.wait() == 7


def made(world: World, i: int) -> rpc.RRef[Any]:
    """Worker i has worker 0 make a value, and waits until it is there."""
    with world.acting(i):
        reference: rpc.RRef[Any] = rpc.remote("worker0", SlowToPack)
        eventually(reference.confirmed_by_owner)
        return reference


def fetch(world: World, i: int, reference: rpc.RRef[Any]) -> torch.futures.Future[Any]:
    with world.acting(i):
        future: torch.futures.Future[Any] = reference.to_here_async()
        future.done()  # who asks wants it to go on, though nobody waits
        return future


# … by as many threads as there are.


@pytest.fixture
def larger() -> Iterator[World]:
    with World(4) as made:
        yield made
        gate.open()


def rest(world: World) -> None:
    """Wait until one thread of worker 0 leads, and one stands by."""
    if world[0].agent.poller.gate is None:
        pytest.skip("this system has no gate")
    eventually(lambda: world[0].agent.pool.counts()[:2] == (2, 2))


def test_though_two_handlers_block(larger: World) -> None:
    on_asked(larger, wait_at_gate)
    for i in range(1, 4):
        call(larger, i)
    rest(larger)
    for i in (1, 2):
        ask(larger, i)
        eventually(lambda i=i: len(gate.came) == i)  # type: ignore[misc]
    call(larger, 3, timeout=SOON)


def test_though_two_values_are_packed(larger: World) -> None:
    call(larger, 3)
    references = {i: made(larger, i) for i in (1, 2)}
    rest(larger)
    fetched = []
    for i, reference in references.items():
        fetched.append(fetch(larger, i, reference))
        eventually(lambda i=i: len(gate.came) == i)  # type: ignore[misc]
    call(larger, 3, timeout=SOON)
    gate.open()
    assert [future.wait() for future in fetched] == [7, 7]


# C3: one service behind another.


def test_services_that_block_do_not_hold_up_the_one_behind_them(world: World) -> None:
    """Nobody is woken for what a thread leaves to be done while it reads: it means to do that itself."""
    pool: WorkerPool = world[0].agent.pool
    served = threading.Event()

    def leave_some() -> None:
        for _ in range(4):
            pool.submit_system(gate)
        pool.submit_system(served.set)

    on_asked(world, leave_some)
    ask(world, 1).wait()
    assert served.wait(SOON)
    eventually(lambda: len(gate.came) == 4)


def test_callbacks_that_block_do_not_hold_up_those_of_later_calls(narrow: str) -> None:
    for i in range(8):
        go = threading.Event()
        _go[:] = [go]
        rpc.rpc_async(narrow, answer_when_told).add_done_callback(lambda done: gate())
        go.set()
        eventually(lambda i=i: len(gate.came) == i + 1)  # type: ignore[misc]
    assert len(set(gate.came)) == 8, "each on a thread of its own"
    assert rpc.rpc_sync(narrow, double, args=(2,), timeout=SOON) == 4


_go: list[threading.Event] = []


def answer_when_told() -> None:
    assert _go[0].wait(20.0)


def test_nor_those_of_calls_that_are_answered_at_the_same_time(narrow: str) -> None:
    """What can be run next for the same caller shares a write with the answer before it, and is read with it."""
    agent = rpc._get_current_rpc_agent().agent
    for _ in range(5):
        go = threading.Event()
        _go[:] = [go]
        blocked = len(gate.came)
        rpc.rpc_async(narrow, answer_when_told).done()
        first, second = (rpc.rpc_async(narrow, double, args=(i,)) for i in (1, 2))
        first.add_done_callback(lambda done: gate())
        eventually(lambda: agent.dispatch.counts() == 3)
        go.set()
        eventually(lambda blocked=blocked: len(gate.came) > blocked)  # type: ignore[misc]
        assert second.wait(timeout=SOON) == 4


# Who is not needed goes home.

MANY = 40


def threads() -> int:
    """How many threads the pool of the worker has."""
    names = (thread.name.removeprefix(f"remora-{NAME}-") for thread in threading.enumerate())
    return sum(name.isdigit() for name in names)


def burst(name: str) -> None:
    """Many functions block at once, and then do not any more."""
    futures: list[torch.futures.Future[Any]] = [rpc.rpc_async(name, wait_at_gate) for _ in range(MANY)]
    eventually(lambda: len(gate.came) == MANY)
    assert threads() > MANY, "and somebody stands by"
    gate.open()
    torch.futures.wait_all(futures)


def test_after_many_functions_that_blocked_two_threads_are_left() -> None:
    """One that leads and one that stands by. Those who helped are given a moment, for there may be more to do."""
    with worker_alone(num_worker_threads=MANY) as name:
        if rpc._get_current_rpc_agent().agent.poller.gate is None:
            pytest.skip("this system has no gate")
        burst(name)
        eventually(lambda: threads() == 2)
        assert rpc.rpc_sync(name, double, args=(2,), timeout=SOON) == 4


@pytest.mark.parametrize("poller", [EpollPoller, SelectPoller])
def test_only_a_few_are_given_that_moment(poller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "make_poller", poller)
    monkeypatch.setattr(agents, "WorkerPool", partial(WorkerPool, thresholds=Thresholds(term=3600.0)))
    with worker_alone(num_worker_threads=MANY) as name:
        burst(name)
        eventually(lambda: threads() <= 5)  # with the one that leads
        assert rpc.rpc_sync(name, double, args=(2,), timeout=SOON) == 4
