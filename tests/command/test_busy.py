"""A program that does everything at once and never hangs: no look at it may find a cycle."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from remora import rpc
from remora.command.verbs.why_verb import QUERY
from remora.observer.group_observer import GroupObserver
from remora.observer.waits import WaitGraph
from remora.testing.processes import Processes
from tests.command.running import group_of

pytestmark = pytest.mark.usefixtures("fork_server")

WORKERS = [f"worker{n}" for n in range(3)]
SECONDS = 2.0

plain, reentrant = threading.Lock(), threading.RLock()
of_the_loop = asyncio.Lock()


def leaf() -> int:
    with plain: return 1  # fmt: skip  # noqa: E701


async def coroutine(depth: int) -> int:
    async with of_the_loop: await asyncio.sleep(0)  # fmt: skip  # noqa: E701
    if depth:
        calls = [rpc.rpc_async(random.choice(WORKERS), coroutine, args=(depth - 1,), timeout=0) for _ in range(2)]
        await asyncio.gather(*calls)
    return 1


def step(depth: int) -> int:
    """Work with locks held, and call others with none held."""
    with plain:
        sum(range(200))
    with reentrant: sum(range(200))  # fmt: skip  # noqa: E701
    if not depth:
        return 1
    to = random.choice(WORKERS)
    way = random.randrange(5)
    if way == 0:
        return rpc.rpc_sync(to, step, args=(depth - 1,), timeout=0)
    if way == 1:
        return rpc.rpc_sync(to, coroutine, args=(depth - 1,), timeout=0)
    if way == 2:
        found: int = rpc.remote(to, step, args=(depth - 1,)).to_here(timeout=0)
        return found
    if way == 3:
        thread = threading.Thread(target=rpc.rpc_sync, args=(to, leaf), kwargs={"timeout": 0})
        thread.start()
        thread.join()
        return 1
    with reentrant:
        return rpc.rpc_sync(to, leaf, timeout=0)


def run(seconds: float) -> None:
    until = time.monotonic() + seconds

    def go() -> None:
        while time.monotonic() < until:
            step(3)

    threads = [threading.Thread(target=go) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def test_a_busy_program_is_in_no_cycle() -> None:
    with Processes(len(WORKERS)) as workers:
        under_way = [workers.start(rank, run, SECONDS) for rank in range(len(WORKERS))]
        kinds: set[str] = set()
        with GroupObserver.find(group=group_of(workers)) as group:
            while not all(each.done() for each in under_way):
                snapshot = group.snapshot(QUERY, 20.0)
                graph = WaitGraph.of(snapshot)
                assert [each.text for each in graph.cycles()] == []
                kinds |= {wait.kind.value for worker in snapshot.workers for wait in worker.waits}
        for each in under_way:
            each.result()
        assert {"call", "thread"} <= kinds
