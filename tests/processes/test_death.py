"""A worker dies: whoever waits for it is told at once and by name, and everybody else goes on."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers

TRANSPORTS = ["unix", "tcp"]


def outcomes_of_many(to: str, n: int) -> tuple[float, dict[str, int], str]:
    """Make calls that will never be answered; (when the last failed, kinds of errors, the words of one)."""
    futures = [rpc.rpc_async(to, targets.block, timeout=0) for _ in range(n)]
    errors: list[BaseException] = []
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            errors.append(error)
    return time.monotonic(), dict(Counter(type(error).__name__ for error in errors)), str(errors[0])


def block_in_sync(to: str) -> tuple[float, str]:
    try:
        rpc.rpc_sync(to, targets.block, timeout=0)
    except Exception as error:
        return time.monotonic(), type(error).__name__
    return time.monotonic(), "no error"


def block_in_many_ways(to: str) -> dict[str, tuple[float, str]]:
    """The same from several threads at once, each waiting in its own way."""
    import asyncio

    async def awaited() -> None:
        await rpc.rpc_async(to, targets.block, timeout=0)

    ways: dict[str, Any] = {
        "rpc_sync": lambda: rpc.rpc_sync(to, targets.block, timeout=0),
        "another rpc_sync": lambda: rpc.rpc_sync(to, targets.block, timeout=30),
        "wait": lambda: rpc.rpc_async(to, targets.block, timeout=0).wait(),
        "wait_all": lambda: torch.futures.wait_all([rpc.rpc_async(to, targets.block, timeout=0) for _ in range(3)]),
        "then": lambda: rpc.rpc_async(to, targets.block, timeout=0).then(lambda done: done.wait()).wait(),
        "await": lambda: asyncio.run(awaited()),
        "to_here": lambda: rpc.remote(to, targets.block, timeout=0).to_here(timeout=0),
    }
    found: dict[str, tuple[float, str]] = {}

    def wait_by(name: str) -> None:
        try:
            ways[name]()
        except Exception as error:
            found[name] = (time.monotonic(), type(error).__name__)
        else:
            found[name] = (time.monotonic(), "no error")

    threads = [threading.Thread(target=wait_by, args=(name,)) for name in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_before_the_first_call(transport: str) -> None:
    with Workers(3, options={"transports": [transport]}) as workers:
        workers.kill(1)
        seconds, kind, words = workers.run(0, targets.timed_call, "worker1", targets.double, 1)
        assert seconds < 2.0
        assert kind in ("CallNotSent", "WorkerLost")
        assert "worker1" in words
        assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_after_a_call(transport: str) -> None:
    with Workers(3, options={"transports": [transport]}) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2
        workers.kill(1)
        for _ in range(3):
            seconds, kind, words = workers.run(0, targets.timed_call, "worker1", targets.double, 1)
            assert seconds < 2.0
            assert kind in ("CallNotSent", "WorkerLost")
            assert "worker1" in words
        seconds, kind, _ = workers.run(0, targets.timed_call, "worker1", targets.double, 1)
        assert kind == "CallNotSent", "a worker known to be gone is not called"
        assert seconds < 0.1
        assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8
        assert workers.run(2, targets.call, "worker0", targets.double, 4) == 8


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_while_a_thousand_calls_wait(transport: str) -> None:
    with Workers(3, options={"transports": [transport]}) as workers:
        many = workers.start(0, outcomes_of_many, "worker1", 1000)
        blocked = workers.start(2, block_in_sync, "worker1")
        eventually(lambda: workers.run(1, serving) == 1001)
        assert not many.done()
        killed = time.monotonic()
        workers.kill(1)
        ended, kinds, words = many.result(timeout=5.0)
        assert ended - killed < 2.0
        assert kinds == {"WorkerLost": 1000}
        assert "worker1" in words
        assert "targets.block" in words
        ended, kind = blocked.result(timeout=5.0)
        assert ended - killed < 2.0
        assert kind == "WorkerLost"
        assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8
        assert workers.run(2, targets.call, "worker0", targets.double, 4) == 8


def test_every_way_of_waiting_ends_when_the_callee_dies() -> None:
    with Workers(2, options={"num_worker_threads": 32}) as workers:
        waiting = workers.start(0, block_in_many_ways, "worker1")
        eventually(lambda: workers.run(1, serving) >= 9)
        assert not waiting.done()
        killed = time.monotonic()
        workers.kill(1)
        found = waiting.result(timeout=10.0)
        late = {way: ended - killed for way, (ended, _) in found.items() if ended - killed > 2.0}
        assert not late
        kinds = {way: kind for way, (_, kind) in found.items()}
        assert kinds.pop("to_here") in ("OwnerDied", "WorkerLost")
        assert set(kinds.values()) == {"WorkerLost"}, kinds
        assert len(kinds) == 6


def test_a_callee_that_dies_inside_the_call() -> None:
    with Workers(3) as workers:
        seconds, kind, words = workers.run(0, targets.timed_call, "worker1", targets.die)
        assert (seconds < 2.0, kind) == (True, "WorkerLost"), words
        assert "targets.die" in words
        workers.kill(1)  # it is dead: lets the others end without it


def test_a_callee_that_dies_while_large_messages_are_under_way() -> None:
    with Workers(3) as workers:
        sending = workers.start(0, send_large_ones, "worker1")
        receiving = workers.start(2, receive_large_ones, "worker1")
        eventually(lambda: "begun" in workers.output(0) and "begun" in workers.output(2))
        killed = time.monotonic()
        workers.kill(1)
        for pending in (sending, receiving):
            ended, kind = pending.result(timeout=5.0)
            assert ended - killed < 2.0
            assert kind in ("WorkerLost", "CallNotSent")
        assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8


def send_large_ones(to: str) -> tuple[float, str]:
    tensor = torch.zeros(4 << 20)
    try:
        while True:
            rpc.rpc_sync(to, targets.sum_of, args=(tensor,), timeout=20)
            print("begun")
    except Exception as error:
        return time.monotonic(), type(error).__name__


def receive_large_ones(to: str) -> tuple[float, str]:
    try:
        while True:
            rpc.rpc_sync(to, torch.zeros, args=((4 << 20,),), timeout=20)
            print("begun")
    except Exception as error:
        return time.monotonic(), type(error).__name__


def test_a_caller_that_dies_leaves_nothing_on_the_callee() -> None:
    with Workers(3) as workers:
        workers.start(1, block_in_sync, "worker0")
        eventually(lambda: workers.run(0, serving) == 1)
        workers.kill(1)
        workers.run(0, targets.unblock)
        eventually(lambda: workers.run(0, serving) == 0)
        assert workers.run(2, targets.call, "worker0", targets.double, 4) == 8


def serving() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def test_the_coroutines_of_a_dead_caller_are_cancelled() -> None:
    with Workers(2) as workers:
        workers.start(1, call_coroutine, "worker0")
        eventually(lambda: "coroutine started" in workers.output(0))
        workers.kill(1)
        eventually(lambda: "coroutine cancelled" in workers.output(0), timeout=8.0)


def call_coroutine(to: str) -> None:
    rpc.rpc_sync(to, sleep_in_coroutine, timeout=0)


async def sleep_in_coroutine() -> None:
    import asyncio

    print("coroutine started")
    try:
        await asyncio.sleep(60.0)
    except asyncio.CancelledError:
        print("coroutine cancelled")
        raise


def test_a_chain_of_calls_breaks_where_a_worker_died() -> None:
    """worker0 calls worker1, which calls worker2, which dies."""
    with Workers(3) as workers:
        seconds, kind, words = workers.run(0, targets.timed_call, "worker1", targets.call, "worker2", targets.die)
        assert seconds < 3.0
        assert kind == "WorkerLost", words
        assert "worker2" in words
        assert workers.run(0, targets.call, "worker1", targets.double, 4) == 8
        workers.kill(2)


def test_a_stopped_worker_is_waited_for_and_nothing_is_lost_or_repeated() -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        targets.freeze(workers, 1)
        pending = workers.start(0, count_up, "worker1", 2000)
        eventually(lambda: "all sent" in workers.output(0))
        time.sleep(2.0)
        assert not pending.done()
        workers.cont(1)
        assert pending.result(timeout=10.0) == [1] * 2000
        assert workers.run(1, targets.counted) == dict.fromkeys(range(2000), 1)


def count_up(to: str, n: int) -> list[int]:
    futures = [rpc.rpc_async(to, targets.count, args=(i,), timeout=30) for i in range(n)]
    print("all sent")
    return list(torch.futures.wait_all(futures))


def test_a_worker_that_stays_silent_is_given_up() -> None:
    options = {"heartbeat": 0.2, "silence_limit": 1.5}
    with Workers(3, options=options) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        targets.freeze(workers, 1)
        stopped = time.monotonic()
        _, kind, words = workers.run(0, targets.timed_call, "worker1", targets.double, 1, timeout=20.0)
        assert 1.0 < time.monotonic() - stopped < 5.0
        assert kind == "WorkerLost"
        assert "silent" in words
        assert workers.run(0, targets.call, "worker2", targets.double, 4) == 8


def test_idle_workers_are_not_taken_for_dead() -> None:
    options = {"heartbeat": 0.1, "silence_limit": 0.6}
    with Workers(2, options=options) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2
        time.sleep(2.0)
        assert workers.run(0, targets.timed_call, "worker1", targets.double, 1)[1:] == ("", "2")
        assert workers.run(1, targets.timed_call, "worker0", targets.double, 1)[1:] == ("", "2")


def test_a_busy_worker_is_not_taken_for_dead() -> None:
    """Its one thread runs a function that never lets go of the interpreter for long."""
    options = {"heartbeat": 0.1, "silence_limit": 1.0, "num_worker_threads": 1}
    with Workers(2, options=options) as workers:
        assert workers.run(0, targets.call, "worker1", spin, 2.5) > 1000


def spin(seconds: float) -> int:
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += 1
    return n


def call_twice_in_vain(to: str) -> list[tuple[float, str]]:
    found = []
    for way in (
        lambda: rpc.rpc_sync(to, targets.double, args=(1,), timeout=0.4),
        lambda: rpc.rpc_async(to, targets.double, args=(1,), timeout=0.4).wait(),
        lambda: rpc.rpc_async(to, targets.sum_of, args=(torch.zeros(1 << 20),), timeout=0.4).wait(),
    ):
        seconds, outcome = targets.timed(way)
        found.append((seconds, type(outcome).__name__))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deadlines_hold_while_the_first_connection_is_being_made(transport: str) -> None:
    """The callee is stopped before anybody has ever talked to it: its kernel takes the connection, and nobody answers."""
    with Workers(2, options={"transports": [transport]}) as workers:
        targets.freeze(workers, 1)
        found = workers.run(0, call_twice_in_vain, "worker1")
        assert all(0.3 < seconds < 1.5 for seconds, _ in found), found
        assert {kind for _, kind in found} <= {"CallTimeout", "CallNotSent"}
        workers.cont(1)
        assert workers.run(0, targets.call, "worker1", targets.double, 4) == 8


def call_again_before_reading(to: str, pid: int) -> tuple[Any, str]:
    """The answer to a call is there, unread, when the callee dies; and then another call cannot be written."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    renew = channel.reading.renew  # (a reader that has not moved for two ticks is replaced)
    with channel.reading:  # nobody reads
        first = rpc.rpc_async(to, targets.count, args=(7,), timeout=10)
        eventually(lambda: renew() or (os.path.exists(f"/proc/{pid}") and has_unread_bytes(channel.link)))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: renew() or is_dead(pid))
        second = rpc.rpc_async(to, targets.count, args=(8,), timeout=10)
        time.sleep(0.05)
    channel.watch()
    _, outcome = targets.timed(first.wait)
    _, other = targets.timed(second.wait)
    return outcome if isinstance(outcome, int) else type(outcome).__name__, type(other).__name__


def has_unread_bytes(link: Any) -> bool:
    return bool(select.select([link.sock], [], [], 0)[0])


def is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_answer_that_came_before_the_callee_died_counts(transport: str) -> None:
    with Workers(2, options={"transports": [transport]}) as workers:
        first, second = workers.run(0, call_again_before_reading, "worker1", workers.pid(1))
        assert first == 1
        assert second in ("WorkerLost", "CallNotSent")
        workers.kill(1)
