"""Code of the program, and the end of a call, at the most inconvenient moment: nothing hangs, is late or stays behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent import agent as agents
from remora.agent.channel import bulk
from remora.agent.channel.channel import Channel
from remora.agent.channel.inbox import PONG
from remora.agent.channel.outbox import Outbox
from remora.agent.runtime.try_lock import TryLock
from remora.errors import CallTimeout, SerializationError
from remora.testing.world import World
from remora.transport import link as stream
from remora.vocabulary.messages import RESPONSE
from remora.wire.frames import Frame
from remora.wire.packed import Packed
from tests.agent.alone import wait_until, worker_alone

SOON = 1.0  # seconds: much longer than it takes
LONG = 20.0

gate = threading.Event()
lock = threading.Lock()
begun = threading.Event()


@pytest.fixture
def me() -> Iterator[str]:
    """A worker that calls itself."""
    with worker_alone() as name:
        yield name
        gate.set()


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    begun.clear()
    yield
    gate.set()


def nothing() -> None:
    pass


def quick() -> str:
    return "quick"


def wait_at_gate() -> str:
    assert gate.wait(LONG)
    return "passed"


def fail() -> None:
    raise ValueError("as it should")


def outgoing(me: str) -> Channel:
    rpc.rpc_sync(me, nothing)  # so that there is a link
    return rpc._get_current_rpc_agent().peer(me).outgoing


def agent_here() -> agents.Agent:
    return rpc._get_current_rpc_agent().agent


def in_thread(what: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it on a thread; what it returned or raised will be in the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(what())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


# Unpickling, on a thread that waits.


class Locking:
    """A value that takes a lock of the program when it is unpickled."""

    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        begun.set()
        with lock:
            self.__dict__ = state


class Waiting:
    """One that waits for the next call."""

    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__ = {"state": following[0].wait(SOON)}


following: list[torch.futures.Future[Any]] = []


@pytest.mark.parametrize("second", [nothing, quick])
def test_who_unpickles_does_not_keep_the_reply_that_came_with_it(me: str, second: Callable[[], Any]) -> None:
    channel = outgoing(me)
    with channel.reading:  # nobody reads
        first, other = rpc.rpc_async(me, Locking), rpc.rpc_async(me, second)
        channel.flush()
        wait_until(lambda: not agent_here().dispatch.counts())
    with lock:
        thread, found = in_thread(lambda: torch.futures.wait_all([first, other]))
        assert begun.wait(SOON)
        other.wait(SOON)  # the one who is unpickling waits for us, and has read the reply we wait for
    thread.join(LONG)
    assert found[0][0].state == 1


def test_a_value_may_wait_for_the_next_one_when_it_is_unpickled(me: str) -> None:
    channel = outgoing(me)
    with channel.reading:
        following[:] = [rpc.rpc_async(me, Waiting), rpc.rpc_async(me, quick)]
        futures = list(following)
        following.pop(0)
        channel.flush()
        wait_until(lambda: not agent_here().dispatch.counts())
    assert torch.futures.wait_all(futures)[0].state == "quick"
    following.clear()


# Deadlines.


def test_a_deadline_that_has_passed_before_the_call_is_on_the_list_is_kept(
    me: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing(me)
    timers = agent_here().timers
    at = timers.at

    def at_once(when: float, action: Callable[[], None]) -> Any:
        timer = at(when, action)
        if when < time.monotonic() + 0.01:
            wait_until(lambda: timer.action is None)  # the thread of the timers was quicker than we are
        return timer

    monkeypatch.setattr(timers, "at", at_once)
    monkeypatch.setattr(agents, "TICK", 60.0)  # nobody repairs it
    future = rpc.rpc_async(me, wait_at_gate, timeout=1e-6)
    with pytest.raises(CallTimeout):
        future.wait(SOON)


def test_a_large_call_that_could_not_be_sent_in_time_fails_once(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline ends it on the thread of the timers, and at the same time its sender gives up."""
    channel = outgoing(me)
    not_sent = Outbox.not_sent

    def late(self: Outbox, call: Any) -> Any:
        wait_until(lambda: call.future is None)  # the pool has told its future
        return not_sent(self, call)

    monkeypatch.setattr(Outbox, "not_sent", late)
    monkeypatch.setattr(bulk, "SHARED_FROM", 1 << 40)
    with taken_elsewhere(channel.writing):
        future = rpc.rpc_async(me, torch.numel, args=(torch.zeros(1 << 18),), timeout=0.05)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        future.wait(SOON)


@contextmanager
def taken_elsewhere(turn: TryLock) -> Iterator[None]:
    """Another thread has it."""
    taken, done = threading.Event(), threading.Event()

    def take() -> None:
        with turn:
            taken.set()
            done.wait(LONG)

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(LONG)
    try:
        yield
    finally:
        done.set()
        thread.join()


class Nameless:
    """A function without a name, which does not like to be printed."""

    def __call__(self) -> str:
        return wait_at_gate()

    def __repr__(self) -> str:
        raise RuntimeError("not now")


def test_a_function_that_cannot_be_printed_has_a_deadline_too(me: str) -> None:
    with pytest.raises(CallTimeout, match="Nameless"):
        rpc.rpc_async(me, Nameless(), timeout=0.05).wait(SOON)
    with pytest.raises(CallTimeout, match="Nameless"):
        rpc.rpc_sync(me, Nameless(), timeout=0.05)


# Many futures.


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Three workers. Who reads is not woken but by what comes."""
    monkeypatch.setattr(stream, "BLOCK_LIMIT", LONG)
    with World(3) as made:
        with made.acting(0):
            for i in range(1, 3):
                rpc.rpc_sync(f"worker{i}", nothing)
        yield made
        gate.set()


def test_all_threads_that_wait_for_a_collection_hear_of_its_first_error(world: World) -> None:
    with world.acting(0):
        channel = world[0].peer("worker1").outgoing
        other = world[0].peer("worker2").outgoing
        everything = torch.futures.collect_all(
            [rpc.rpc_async("worker1", wait_at_gate), rpc.rpc_async("worker2", fail_at_gate)]
        )
    first, found = in_thread(everything.wait)
    wait_until(channel.reading.locked)
    second, found_too = in_thread(everything.wait)
    wait_until(lambda: other.reading.locked() and channel.parked)
    begun.set()
    second.join(SOON)
    first.join(SOON)
    assert isinstance(found_too[0], ValueError)
    assert found
    assert isinstance(found[0], ValueError)


def fail_at_gate() -> None:
    assert begun.wait(LONG)
    fail()


def test_a_collection_ends_at_the_deadline_of_a_member_whose_worker_says_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Outbox.send_unsequenced

    def send_but_answer_no_ping(outbox: Outbox, kind: int) -> None:  # as if it were frozen
        if kind != PONG:
            send(outbox, kind)

    monkeypatch.setattr(Outbox, "send_unsequenced", send_but_answer_no_ping)
    with world.acting(0):
        future = rpc.rpc_async("worker1", wait_at_gate, timeout=0.1)
    thread, found = in_thread(lambda: torch.futures.wait_all([future]))
    thread.join(SOON)
    assert found
    assert isinstance(found[0], CallTimeout)


# Exceptions that are none of ours.


def test_ctrl_c_while_a_call_is_being_sent_leaves_nothing_on_the_list(
    me: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = outgoing(me)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_async(me, quick)
    assert not channel.pending


def test_a_timeout_that_is_no_number_leaves_no_fork(me: str) -> None:
    outgoing(me)
    mine = rpc.RRef([1])
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(ValueError, match="not a number"):
            call(me, print, args=(mine,), timeout=float("nan"))
        assert rpc._rref_context_get_debug_info()["num_forks"] == "0"


def test_a_result_for_which_there_is_no_memory_is_answered_with_that(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing(me)

    def too_much(packed: Packed) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "SHARED_FROM", 1 << 40)
        patch.setattr(Packed, "complete", too_much)  # the first step of copying it
        with pytest.raises(SerializationError, match="no memory"):
            rpc.rpc_sync(me, torch.zeros, args=(30000,), timeout=SOON)
    wait_until(lambda: not agent_here().dispatch.counts(), SOON)


async def ask_to_exit() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    await asyncio.gather(leave())


async def quick_too() -> str:
    return "quick"


def test_a_task_that_exits_does_not_end_the_loop_of_others(me: str) -> None:
    with pytest.raises(RuntimeError, match="SystemExit"):
        rpc.rpc_sync(me, ask_to_exit, timeout=SOON)
    assert rpc.rpc_sync(me, quick_too, timeout=SOON) == "quick"


class WithTensor(Exception):
    """An error that makes its arguments."""

    def __init__(self, x: Any) -> None:
        super().__init__(torch.zeros(2))


def raise_with_tensor() -> None:
    raise WithTensor(1)


def test_an_error_with_tensors_is_raised_as_it_is(me: str) -> None:
    with pytest.raises(WithTensor):
        rpc.rpc_async(me, raise_with_tensor).wait(SOON)


class Interrupting(dict[int, Any]):
    """The list of pending calls; Ctrl-C strikes when one is taken off."""

    at = -1

    def pop(self, key: int, *default: Any) -> Any:
        if key == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return super().pop(key, *default)


def test_replies_that_were_read_before_ctrl_c_struck_are_not_lost(me: str) -> None:
    channel = outgoing(me)
    channel.pending = channel.calls.waiting = channel.reader.pending = pending = Interrupting(channel.pending)
    for part in (channel.inbox, channel.waiter_reads):
        part._pending = pending
    registration = channel.inbox.registration
    assert registration is not None
    frames: list[Frame] = []

    def both_are_here() -> bool:
        frames.extend(registration.link.read())
        return sum(bool(frame.kind & RESPONSE) for frame in frames) == 2

    with channel.reading:
        futures = [rpc.rpc_async(me, quick), rpc.rpc_async(me, quick)]
        of = dict(zip(sorted(pending), futures, strict=True))
        channel.flush()
        wait_until(both_are_here)
        first, second = (frame.call for frame in frames if frame.kind & RESPONSE)
        pending.at = second
        with pytest.raises(KeyboardInterrupt):
            channel.inbox.receive(registration, lambda: frames)  # as the thread does that waits
    assert of[first].wait(SOON) == "quick"
    of[second].cancel()
