"""Every reply is read and every message written by somebody, at once. What is forgotten, the tick would find half a second
later, and a thread that reads would look up after one: here neither does, so that whoever is forgotten waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.channel import outbox
from remora.agent.channel.channel import Channel
from remora.agent.channel.inbox import Inbox
from remora.agent.peers.failure_detector import FailureDetector
from remora.testing.world import World
from remora.transport import link as stream
from tests.eventually import eventually

SOON = 2.0  # seconds: much longer than anything here takes
LONG = 20.0  # the timeout of a call, for which nobody waits
gates: dict[str, threading.Event] = {}
arrived: list[str] = []


@pytest.fixture(autouse=True)
def nobody_repairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FailureDetector, "tick", lambda self, now: None)
    monkeypatch.setattr(stream, "BLOCK_LIMIT", LONG / 2)
    yield
    gates.clear()
    arrived.clear()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads of the program; those that still wait are set free when the world ends, which is before."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def world(pool: ThreadPoolExecutor) -> Iterator[World]:
    with World(2) as world:
        world.run(0, rpc.rpc_sync, "worker1", echo, (0,))  # so that there is a link
        yield world
        for gate in gates.values():
            gate.set()


def echo(value: Any) -> Any:
    return value


def pass_gate(name: str) -> str:
    arrived.append(name)
    assert gates.setdefault(name, threading.Event()).wait(LONG)
    return name


def is_at_gate(name: str) -> bool:
    return name in arrived


def open_gate(name: str) -> None:
    gates.setdefault(name, threading.Event()).set()


# Ways to wait for a value.


def synchronous(function: Callable[[Any], Any], argument: Any, timeout: float = LONG) -> Any:
    return rpc.rpc_sync("worker1", function, (argument,), timeout=timeout)


def asynchronous(function: Callable[[Any], Any], argument: Any, timeout: float = LONG) -> Any:
    return rpc.rpc_async("worker1", function, (argument,), timeout=LONG).wait(timeout)


def among_others(function: Callable[[Any], Any], argument: Any) -> Any:
    futures = [rpc.rpc_async("worker1", each, (argument,), timeout=LONG) for each in (echo, function, echo)]
    return torch.futures.wait_all(futures)[1]


def by_reference(function: Callable[[Any], Any], argument: Any, timeout: float = LONG) -> Any:
    return rpc.remote("worker1", function, (argument,), timeout=LONG).to_here(timeout)


def by_callback(function: Callable[[Any], Any], argument: Any) -> Any:
    values: list[Any] = []
    told = threading.Event()
    rpc.rpc_async("worker1", function, (argument,), timeout=LONG).then(lambda done: (values.append(done.wait()), told.set()))
    assert told.wait(LONG)
    return values[0]


READERS = [synchronous, asynchronous, by_reference]  # they read the link themselves, if nobody else does
WAYS = [*READERS, among_others, by_callback]


def names(way: object) -> str:
    return str(getattr(way, "__name__", way))


def channel_of(world: World) -> Channel:
    return world[0].agent.peers.find("worker1").outgoing


@pytest.fixture
def begin(world: World, pool: ThreadPoolExecutor) -> Callable[..., Future[Any]]:
    """Have a thread of worker0 call a function that waits at a gate; returns when it does."""

    def begin(way: Callable[..., Any], name: str, **how: float) -> Future[Any]:
        pending = pool.submit(world.run, 0, way, pass_gate, name, **how)
        eventually(lambda: is_at_gate(name))
        return pending

    return begin


@pytest.fixture
def begin_reading(world: World, begin: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """The same, and the thread reads the link while it waits."""

    def begin_reading(way: Callable[..., Any], name: str, **how: float) -> Future[Any]:
        pending = begin(way, name, **how)
        eventually(lambda: channel_of(world).reading.locked() or pending.done())
        return pending

    return begin_reading


def wait_until_asleep(world: World) -> None:
    """Until a thread has found that another one reads, or has said that it does not want to read."""
    channel = channel_of(world)
    eventually(lambda: channel.parked or channel.reader.notify_ids)


Begin = Callable[..., Future[Any]]


@pytest.mark.parametrize("second", WAYS, ids=names)
@pytest.mark.parametrize("first", READERS, ids=names)
def test_a_reply_is_read_when_the_thread_that_read_before_has_gone(
    world: World, begin: Begin, begin_reading: Begin, first: Any, second: Any
) -> None:
    reader = begin_reading(first, "first")
    sleeper = begin(second, "second")
    wait_until_asleep(world)
    open_gate("first")
    assert reader.result(SOON) == "first"
    open_gate("second")
    assert sleeper.result(SOON) == "second"


@pytest.mark.parametrize("second", WAYS, ids=names)
@pytest.mark.parametrize("first", READERS, ids=names)
def test_a_reply_is_read_by_a_thread_that_waits_for_another(
    world: World, begin: Begin, begin_reading: Begin, first: Any, second: Any
) -> None:
    reader = begin_reading(first, "first")
    sleeper = begin(second, "second")
    wait_until_asleep(world)
    open_gate("second")
    assert sleeper.result(SOON) == "second"
    assert not reader.done()
    open_gate("first")
    assert reader.result(SOON) == "first"


@pytest.mark.parametrize("second", WAYS, ids=names)
@pytest.mark.parametrize("first", READERS, ids=names)
def test_a_reply_is_read_when_the_thread_that_read_before_has_lost_patience(
    world: World, begin: Begin, begin_reading: Begin, first: Any, second: Any
) -> None:
    reader = begin_reading(first, "first", timeout=0.2)
    sleeper = begin(second, "second")
    assert reader.exception(SOON) is not None
    open_gate("second")
    assert sleeper.result(SOON) == "second"


@pytest.mark.parametrize("way", WAYS, ids=names)
def test_a_reply_is_read_when_nobody_has_read_for_a_while(world: World, begin: Begin, way: Any) -> None:
    """The poller was told to look away, by the synchronous call before."""
    for number in range(3):
        assert world.run(0, synchronous, echo, number) == number
        pending = begin(way, f"gate {number}")
        open_gate(f"gate {number}")
        assert pending.result(SOON) == f"gate {number}"


@pytest.mark.parametrize("way", READERS, ids=names)
def test_a_reply_that_somebody_listens_for_is_read_though_others_came_and_went(world: World, begin: Begin, way: Any) -> None:
    """They told the poller to look away, read their own replies, and are gone."""
    listener = begin(by_callback, "told")
    for number in range(3):
        assert world.run(0, way, echo, number) == number
    open_gate("told")
    assert listener.result(SOON) == "told"


def test_replies_are_read_while_the_pool_is_reading(world: World, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds a thread of the pool at it sleeps, and that one goes when it has read."""
    go_on, reads = threading.Event(), threading.Event()
    receive = Inbox.receive

    def linger(inbox: Inbox, *how: Any, **more: Any) -> Any:
        found = receive(inbox, *how, **more)
        if inbox is channel_of(world).inbox and threading.current_thread().name.startswith("remora-worker0"):
            reads.set()
            assert go_on.wait(LONG)
        return found

    told = begin(by_callback, "told")
    wait_until_asleep(world)
    monkeypatch.setattr(Inbox, "receive", linger)
    open_gate("told")
    assert reads.wait(SOON)
    sleepers = [begin(way, way.__name__) for way in READERS]
    go_on.set()
    assert told.result(SOON) == "told"
    for way, sleeper in zip(READERS, sleepers, strict=True):
        open_gate(way.__name__)
        assert sleeper.result(SOON) == way.__name__


# Messages that wait for company.


@pytest.fixture
def expecting_company(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message that nobody was in a hurry for was followed by another: the next one waits for such a one."""
    monkeypatch.setattr(outbox, "NO_TIME", 60.0)
    for _ in range(2):
        assert world.run(0, by_reference, echo, 1) == 1
    eventually(lambda: not owned(world) and nobody_expects_company(world))
    assert channel_of(world).outbox._followed


def owned(world: World) -> int:
    """How many values of worker1 others refer to."""
    return world[1].references.table.counts()["num_owner_rrefs"]


def nobody_expects_company(world: World) -> bool:
    return not any((timer := worker.agent.delayed_flush._timer) is not None and timer.pending for worker in world.workers)


def test_remote_calls_that_nothing_follows_are_sent_and_answered(world: World, expecting_company: None) -> None:
    references = []
    for name in ("first", "second", "third"):
        world[0].agent.peers.watch_all()  # (nobody is in a hurry to read the answer)
        references.append(world.run(0, rpc.remote, "worker1", pass_gate, (name,)))
        eventually(lambda name=name: is_at_gate(name), SOON)  # type: ignore[misc]
        open_gate(name)
        eventually(lambda: not channel_of(world).pending, SOON)
        eventually(lambda: nobody_expects_company(world), SOON)  # so that the next one is alone
    assert all(reference.confirmed_by_owner() for reference in references)


def test_the_release_of_a_context_that_nothing_follows_is_sent(world: World, expecting_company: None) -> None:
    def contexts() -> int:
        return world[1].autograd.counts()["num_autograd_contexts"]

    with world.acting(0), autograd.context():
        assert rpc.rpc_sync("worker1", torch.add, (torch.ones(1, requires_grad=True), 1)).item() == 2.0
        assert contexts() == 1
        eventually(lambda: nobody_expects_company(world))
    eventually(lambda: not contexts(), SOON)


def test_calls_in_a_burst_are_sent_though_nobody_waits_for_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a write, which the pool is asked for."""
    monkeypatch.setattr(outbox, "BURST_GAP", 60.0)
    futures = [world.run(0, rpc.rpc_async, "worker1", pass_gate, (name,)) for name in "abc"]
    eventually(lambda: all(map(is_at_gate, "abc")), SOON)
    for name in "abc":
        open_gate(name)
    assert [future.wait(SOON) for future in futures] == ["a", "b", "c"]


def test_a_goodbye_that_nothing_follows_is_sent(world: World, expecting_company: None) -> None:
    reference = world.run(0, rpc.remote, "worker1", echo, (1,))
    assert world.run(0, reference.to_here) == 1
    eventually(lambda: owned(world) == 1, SOON)
    del reference
    eventually(lambda: not owned(world), SOON)


# All at once.


def test_many_threads_that_wait_in_different_ways_never_stall(world: World, pool: ThreadPoolExecutor) -> None:
    """Each wait is an opportunity to forget somebody. (In the other direction, too: worker1 calls back.)"""

    def work(offset: int) -> list[Any]:
        ways = WAYS[offset % len(WAYS) :] + WAYS[: offset % len(WAYS)]
        return [way(call_back if number % 7 == 0 else echo, number) for number in range(30) for way in ways]

    expected = [number for number in range(30) for _ in WAYS]
    pending = [pool.submit(world.run, 0, work, offset) for offset in range(6)]
    assert [each.result(LONG / 2) for each in pending] == [expected] * 6


def call_back(value: Any) -> Any:
    return rpc.rpc_sync("worker0", echo, (value,), timeout=LONG)
