"""Connections that break in the middle of traffic: every call is answered exactly once, and with the right bytes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers

ERROR = "cut by the test"


def cut(peer: str, direction: str) -> bool:
    """Break this worker's link with another; whether there was one."""
    found = rpc._get_current_rpc_agent().agent.peers.find(peer)
    channel = found.outgoing if direction == "outgoing" else found.incoming
    if channel is None or channel.link is None:
        return False
    channel.cut(OSError(ERROR))
    return True


def count_while_the_callee_cuts(to: str, n: int, cuts: int) -> tuple[list[int], int]:
    """The same, cut from the other end."""
    cutting = rpc.rpc_async(to, cut_often, args=(rpc.get_worker_info().name, cuts), timeout=30)
    futures: list[Any] = []
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    for i in range(n):
        futures.append(rpc.rpc_async(to, targets.count, args=(i,), timeout=30))
        if i % (n // cuts) == 0 and not cutting.done():
            wait_for_another_link(channel, cutting)
    return list(torch.futures.wait_all(futures)), cutting.wait()


def wait_for_another_link(channel: Any, cutting: Any) -> None:
    link = channel.link
    eventually(lambda: channel.link is not link or cutting.done())


def cut_often(peer: str, cuts: int) -> int:
    made = 0
    while made < cuts:
        made += cut(peer, "incoming")
        time.sleep(0.002)
    return made


class Cutter(threading.Thread):
    """Cuts a link as soon as it is there, again and again."""

    def __init__(self, peer: str, direction: str, pause: float) -> None:
        super().__init__()
        self.peer, self.direction, self.pause = peer, direction, pause
        self.cuts = 0
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            self.cuts += cut(self.peer, self.direction)
            time.sleep(self.pause)

    def __enter__(self) -> Cutter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        self.join()


def count_while_cutting(to: str, n: int, cuts: int) -> tuple[list[int], int]:
    """`n` calls while the link is cut `cuts` times or more; what they returned, and how often it was cut."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    futures: list[Any] = []
    with Cutter(to, "outgoing", 0.0002) as cutter:
        for i in range(n):
            futures.append(rpc.rpc_async(to, targets.count, args=(i,), timeout=30))
            eventually(lambda i=i: cutter.cuts >= (i + 1) * cuts // n)  # type: ignore[misc]
        return list(torch.futures.wait_all(futures)), cutter.cuts


def count_in_sync_while_cutting(to: str, direction: str, n: int) -> list[int]:
    """Threads that call and wait, while the link is cut again and again."""
    values: list[int] = []

    def caller(first: int) -> None:
        values.extend(rpc.rpc_sync(to, targets.count, args=(i,), timeout=30) for i in range(first, first + n))

    threads = [threading.Thread(target=caller, args=(first,)) for first in (0, n, 2 * n)]
    with Cutter(to, direction, 0.003):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return values


def tensors_while_cutting(to: str, n: int) -> int:
    """Large tensors there and back while the link is cut; how many came back as they were."""
    right = 0
    with Cutter(to, "outgoing", 0.02):
        for i in range(n):
            tensor = torch.full((1 << 19,), float(i))
            right += torch.equal(rpc.rpc_sync(to, targets.echo, args=(tensor,), timeout=30), tensor)
    return right


@pytest.mark.parametrize("count", [count_while_cutting, count_while_the_callee_cuts])
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_every_asynchronous_call_is_answered_exactly_once(transport: str, count: Any) -> None:
    with Workers(2, options={"transports": [transport]}) as workers:
        values, cuts = workers.run(0, count, "worker1", 5000, 200)
        assert cuts >= 200
        assert values == [1] * 5000, "nothing ran twice"
        assert workers.run(1, targets.counted) == dict.fromkeys(range(5000), 1)


def count_while_the_link_flaps(to: str, seconds: float) -> list[int]:
    values: list[int] = []
    end = time.monotonic() + seconds
    with Cutter(to, "outgoing", 0.004):
        while time.monotonic() < end:
            key = len(values)
            values += torch.futures.wait_all([rpc.rpc_async(to, targets.count, args=(key + i,)) for i in range(10)])
    return values


def test_a_link_that_breaks_all_the_time_is_not_taken_for_one_that_is_gone() -> None:
    """For much longer than a connection may be away, it is never away for that long."""
    with Workers(2, options={"reconnect_timeout": 0.4}) as workers:
        values = workers.run(0, count_while_the_link_flaps, "worker1", 2.0)
        assert set(values) == {1}
        assert len(values) > 20
        assert workers.run(1, targets.counted) == dict.fromkeys(range(len(values)), 1)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_every_synchronous_call_is_answered_exactly_once(direction: str) -> None:
    with Workers(2) as workers:
        values = workers.run(0, count_in_sync_while_cutting, "worker1", direction, 300)
        assert values == [1] * 900
        assert workers.run(1, targets.counted) == dict.fromkeys(range(900), 1)


def test_large_tensors_survive_cuts() -> None:
    with Workers(2) as workers:
        assert workers.run(0, tensors_while_cutting, "worker1", 40) == 40


def test_both_directions_cut_while_both_workers_call_each_other() -> None:
    with Workers(2) as workers:
        first = workers.start(0, count_while_cutting, "worker1", 1500, 50)
        second = workers.start(1, count_while_cutting, "worker0", 1500, 50)
        for pending, other in ((first, 1), (second, 0)):
            values, cuts = pending.result(timeout=30.0)
            assert set(values) == {1}
            assert cuts >= 50
            assert workers.run(other, targets.counted) == dict.fromkeys(range(len(values)), 1)


def test_a_call_that_waits_when_its_link_breaks_gets_its_answer() -> None:
    with Workers(2) as workers:
        waiting = workers.start(0, targets.call, "worker1", targets.block)
        eventually(lambda: workers.run(1, serving) == 1)
        workers.run(1, cut, "worker0", "incoming")
        workers.run(1, targets.unblock)
        assert waiting.result(timeout=5.0) == "unblocked"


def serving() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def test_an_idle_link_that_broke_is_restored_by_the_next_call() -> None:
    with Workers(2) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        for _ in range(20):
            workers.run(0, cut, "worker1", "outgoing")
            seconds, kind, value = workers.run(0, targets.timed_call, "worker1", targets.double, 1)
            assert (kind, value) == ("", "2")
            assert seconds < 1.0


def test_no_descriptors_are_left_behind_by_broken_links() -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        before = workers.run_all(descriptors)
        workers.run(0, count_while_cutting, "worker1", 500, 50)
        eventually(lambda: all(a <= b + 2 for a, b in zip(workers.run_all(descriptors), before, strict=True)))


def descriptors() -> int:
    import os

    return len(os.listdir("/proc/self/fd"))


# What was changed after the call returned is not seen, even if the message has to be said again.


def send_change_and_cut(to: str, pid: int, how: str) -> tuple[str, float]:
    """The callee is stopped, so that only a part of the message can leave; then the link breaks and all is sent again."""
    import os
    import signal

    rpc.rpc_sync(to, targets.double, args=(1,))
    os.kill(pid, signal.SIGSTOP)
    try:
        tensor = torch.zeros(2 << 20)
        future = rpc.rpc_async(to, targets.sum_of, args=(tensor,), timeout=10)
        if how == "in place":
            tensor.fill_(1.0)
        elif how == "data":
            tensor.data.fill_(1.0)
        elif how == "numpy":
            tensor.numpy()[:] = 1.0
        cut(to, "outgoing")
    finally:
        os.kill(pid, signal.SIGCONT)
    try:
        return "", future.wait()
    except Exception as error:
        return type(error).__name__, 0.0


@pytest.mark.parametrize("how", ["not at all", "in place", "data", "numpy"])
def test_a_repeated_message_never_carries_later_changes(how: str) -> None:
    with Workers(2, options={"transports": ["unix"]}) as workers:
        kind, total = workers.run(0, send_change_and_cut, "worker1", workers.pid(1), how)
        assert total == 0.0
        assert kind in (("",) if how == "not at all" else ("", "CallNotSent"))
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2


_served = torch.zeros(75_000)


def serve_and_change(how: str) -> torch.Tensor:
    """A parameter server: the tensor that it returns is changed soon after."""
    threading.Timer(0.3, change_served, (how,)).start()
    return _served


def change_served(how: str) -> None:
    if how == "in place":
        _served.fill_(1.0)
    else:
        _served.numpy()[:] = 1.0


def stop_myself_until_the_reply_is_there(to: str, how: str) -> tuple[str, float]:
    """Ask, and do not read the answer before it was changed and the link cut."""
    future = rpc.rpc_async(to, serve_and_change, args=(how,), timeout=10)
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    eventually(lambda: channel.link is not None)
    with channel.reading:  # nobody reads meanwhile
        time.sleep(0.6)
        cut(to, "outgoing")
    try:
        return "", float(future.wait().sum())
    except Exception as error:
        return type(error).__name__, 0.0


@pytest.mark.parametrize("how", ["in place", "numpy"])
def test_a_repeated_reply_never_carries_later_changes(how: str) -> None:
    with Workers(2, options={"transports": ["unix"]}) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        kind, total = workers.run(0, stop_myself_until_the_reply_is_there, "worker1", how)
        assert total == 0.0
        assert kind in ("", "CallOutcomeUnknown")
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
