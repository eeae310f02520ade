"""Many workers on few threads: everybody calls everybody, calls nest across workers, nothing waits for ever."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch

from remora import rpc
from tests.processes import targets
from tests.workers import Workers

ONE_THREAD = {"num_worker_threads": 1}


def bounce(depth: int) -> int:
    """Two workers call each other, deeper and deeper."""
    other = f"worker{1 - rpc.get_worker_info().id}"
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other, bounce, args=(depth - 1,))


def bounce_async(depth: int) -> int:
    other = f"worker{1 - rpc.get_worker_info().id}"
    return 0 if depth == 0 else 1 + rpc.rpc_async(other, bounce_async, args=(depth - 1,)).wait()


def bounce_wait_all(depth: int) -> int:
    """Two calls at each level; both call back."""
    if depth == 0:
        return 1
    other = f"worker{1 - rpc.get_worker_info().id}"
    return sum(torch.futures.wait_all([rpc.rpc_async(other, bounce_wait_all, args=(depth - 1,)) for _ in range(2)]))


def bounce_then(depth: int) -> int:
    if depth == 0:
        return 0
    other = f"worker{1 - rpc.get_worker_info().id}"
    return int(rpc.rpc_async(other, bounce_then, args=(depth - 1,)).then(lambda done: done.value() + 1).wait())


@rpc.functions.async_execution
def bounce_promising(depth: int) -> Any:
    if depth == 0:
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(0)
        return done
    other = f"worker{1 - rpc.get_worker_info().id}"
    return rpc.rpc_async(other, bounce_promising, args=(depth - 1,)).then(lambda done: done.value() + 1)


async def bounce_awaiting(depth: int) -> int:
    other = f"worker{1 - rpc.get_worker_info().id}"
    return 0 if depth == 0 else 1 + await rpc.rpc_async(other, bounce_awaiting, args=(depth - 1,))


def test_two_workers_call_each_other_a_hundred_deep_on_one_thread() -> None:
    with Workers(2, options=ONE_THREAD) as workers:
        for function in (bounce, bounce_async, bounce_promising, bounce_awaiting):
            assert workers.run(0, targets.call, "worker1", function, 100) == 100
        assert workers.run(0, targets.call, "worker1", bounce_then, 30) == 30
        assert workers.run(0, targets.call, "worker1", bounce_wait_all, 6) == 64


def test_both_descend_at_the_same_time_on_one_thread() -> None:
    with Workers(2, options=ONE_THREAD) as workers:
        pending = [workers.start(rank, targets.call, f"worker{1 - rank}", bounce, 60) for rank in (0, 1)]
        pending += [workers.start(rank, targets.call, f"worker{1 - rank}", bounce_wait_all, 5) for rank in (0, 1)]
        assert [each.result(timeout=15.0) for each in pending] == [60, 60, 32, 32]


def around(start: int, left: int) -> int:
    """A ring: each worker calls the next."""
    me = rpc.get_worker_info().id
    return me if left == 0 else me + rpc.rpc_sync((me + 1) % start, around, args=(start, left - 1))


def call_everybody(n: int, rounds: int) -> int:
    """Each worker calls all of them, itself included, in an order of its own; each of those calls calls back."""
    me = rpc.get_worker_info().id
    order = list(range(n))
    random.Random(me).shuffle(order)
    futures = [rpc.rpc_async(to, call_back, args=(me, i), timeout=60) for i in range(rounds) for to in order]
    return sum(torch.futures.wait_all(futures))


def call_back(to: int, x: int) -> int:
    return int(rpc.rpc_sync(to, targets.double, args=(x,), timeout=60)) // 2 + 1


def test_twenty_workers_all_call_all_on_one_thread() -> None:
    n, rounds = 20, 5
    with Workers(n, options=ONE_THREAD, timeout=60.0) as workers:
        start = time.monotonic()
        found = workers.run_all(call_everybody, n, rounds)
        assert found == [n * sum(i + 1 for i in range(rounds))] * n
        assert time.monotonic() - start < 30.0
        assert workers.run(0, targets.call, 1, around, n, 2 * n) == 1 + 2 * sum(range(n))
        assert max(workers.run_all(descriptors)) < 200


def descriptors() -> int:
    import os

    return len(os.listdir("/proc/self/fd"))


def test_workers_that_never_talk_open_no_connections() -> None:
    """But for those of a static group that are next to each other in the ring of ids, which greet when they start."""
    with Workers(5) as workers:
        assert workers.run_all(connections) == [sorted([(rank + 1) % 5, (rank - 1) % 5]) for rank in range(5)]
        workers.run(0, targets.call, "worker2", targets.double, 1)
        workers.run(0, targets.call, "worker1", targets.double, 1)  # over the one that there is
        assert workers.run_all(connections) == [[1, 2, 4], [0, 2], [0, 1, 3], [2, 4], [0, 3]]


def connections() -> list[int]:
    """The ids of the workers at the other ends: one that has two is here twice."""
    peers = rpc._get_current_rpc_agent().agent.peers.all()
    channels = [(peer.id, channel) for peer in peers for channel in (peer.outgoing, peer.incoming)]
    return sorted(id for id, channel in channels if channel is not None and channel.link is not None)


def test_gathering_and_barriers() -> None:
    with Workers(4) as workers:
        everybody = {f"worker{rank}": rank * 10 for rank in range(4)}
        assert workers.run_all(gather_my_rank) == [everybody] * 4
        assert workers.run_all(gather_my_rank, set()) == [everybody] * 4  # no names are all names, as with PyTorch
        assert workers.run_all(rpc.api._barrier, set()) == [None] * 4
        some = {"worker1", "worker3"}
        pending = [workers.start(rank, gather_my_rank, some) for rank in (1, 3)]
        assert [each.result() for each in pending] == [{"worker1": 10, "worker3": 30}] * 2
        pending = [workers.start(rank, rpc.api._barrier, some) for rank in (1, 3)]
        assert [each.result() for each in pending] == [None, None]


def gather_my_rank(names: set[str] | None = None) -> dict[str, int]:
    return rpc._all_gather(rpc.get_worker_info().id * 10, names)


def call_from_threads(to: str, threads: int, n: int) -> int:
    """Threads of one worker call another at the same time, each in several ways; how many answers were right."""
    right: list[bool] = []

    def caller(k: int) -> None:
        for i in range(n):
            x = k * n + i
            futures = [rpc.rpc_async(to, targets.double, args=(x + j,), timeout=30) for j in range(3)]
            tensor = torch.full((1000 * (i % 5) + 1,), float(x))
            right.append(rpc.rpc_sync(to, targets.double, args=(x,), timeout=30) == 2 * x)
            right.append(torch.equal(rpc.rpc_sync(to, targets.echo, args=(tensor,), timeout=30), tensor))
            right.append(torch.futures.wait_all(futures) == [2 * (x + j) for j in range(3)])

    running = [threading.Thread(target=caller, args=(k,)) for k in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(right)


def test_many_threads_of_one_worker_call_at_the_same_time() -> None:
    with Workers(2) as workers:
        pending = [workers.start(rank, call_from_threads, f"worker{1 - rank}", 12, 50) for rank in (0, 1)]
        assert [each.result(timeout=25.0) for each in pending] == [3 * 12 * 50] * 2
