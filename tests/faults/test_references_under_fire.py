"""Ten thousand references on five real workers, one of which is killed: the survivors keep exactly what is held."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest

from remora import rpc
from remora.errors import RemoraError
from tests.workers import Workers

N = 5
VICTIM = 4
PER_WORKER = 2_000

held: list[rpc.RRef[Any]] = []


def make(n: int) -> bytes:
    return bytes(n)


def keep_sometimes(path: list[str], reference: rpc.RRef[Any]) -> None:
    """Hand a reference on along the path; one in ten stays on each worker it visits."""
    if random.random() < 0.1:
        held.append(reference)
    if path:
        rpc.rpc_sync(path[0], keep_sometimes, args=(path[1:], reference))


def churn(seed: int, count: int) -> int:
    """Create, share along random chains and drop. How many steps failed, because a worker died."""
    chance = random.Random(seed)
    failed = 0
    for _ in range(count):
        names = [f"worker{chance.randrange(N)}" for _ in range(chance.randrange(1, 5))]
        try:
            reference = rpc.remote(names[0], make, args=(chance.randrange(1000),))
            keep_sometimes(names[1:], reference)
        except RemoraError:
            failed += 1
        if len(held) > 50:
            del held[chance.randrange(len(held))]
    return failed


def holdings() -> tuple[list[tuple[int, Any]], list[Any], dict[str, str]]:
    """(what is held here: owner and id; what is owned here for others; counters)."""
    gc.collect()
    worker = rpc.api._get_current_rpc_agent()
    live = [(reference.owner().id, reference._handle.rref_id) for reference in held if not reference.is_owner()]
    return live, list(worker.references.table.state.owner.values), rpc._rref_context_get_debug_info()


def forget_lost(dead: int) -> None:
    held[:] = [reference for reference in held if reference.owner().id != dead]


def forget_all() -> None:
    held.clear()


def resident() -> int:
    """Bytes of memory this process uses."""
    gc.collect()
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * 4096


def survivors_agree(workers: Workers) -> str:
    """Empty if every survivor owns exactly what other survivors hold; else what is wrong."""
    reports = {rank: workers.run(rank, holdings) for rank in range(N) if rank != VICTIM}
    for rank, (_, owned, counters) in reports.items():
        wanted = {rref for other in reports if other != rank for owner, rref in reports[other][0] if owner == rank}
        if set(owned) != wanted:
            return f"worker{rank} owns {len(owned)} values, {len(wanted)} are held: {set(owned) ^ wanted}"
        if counters["num_pending_users"] != "0" or counters["num_pending_futures"] != "0":
            return f"worker{rank} is not at rest: {counters}"
    return ""


def agree_within(workers: Workers, seconds: float) -> None:
    end = time.monotonic() + seconds
    while problem := survivors_agree(workers):
        assert time.monotonic() < end, problem
        time.sleep(0.05)


@pytest.mark.timeout(110)
def test_survivors_of_a_killed_worker_keep_exactly_the_live_references() -> None:
    with Workers(N, timeout=90) as workers:
        for rank in range(N):
            workers.run(rank, churn, rank, 100)  # everything is warm now
        workers.run_all(forget_all)
        before = [workers.run(rank, resident) for rank in range(N)]

        counts = [PER_WORKER // 3 if rank == VICTIM else PER_WORKER for rank in range(N)]
        running = [workers.start(rank, churn, 100 + rank, counts[rank]) for rank in range(N)]
        running[VICTIM].result(80)  # the others are in the thick of it now
        workers.kill(VICTIM)
        failed = [running[rank].result(80) for rank in range(N) if rank != VICTIM]
        assert sum(failed) > 0, "the worker died too late to hurt anybody"
        assert sum(failed) < 4 * PER_WORKER * 0.95

        for rank in set(range(N)) - {VICTIM}:
            workers.run(rank, forget_lost, VICTIM)
        agree_within(workers, 5)

        for rank in set(range(N)) - {VICTIM}:
            workers.run(rank, forget_all)
        agree_within(workers, 5)
        for rank in set(range(N)) - {VICTIM}:
            assert workers.run(rank, rpc._rref_context_get_debug_info)["num_owner_rrefs"] == "0"
            growth = workers.run(rank, resident) - before[rank]
            assert growth < 40 << 20, f"worker{rank} grew by {growth >> 20} MiB"
