"""Random programs of many workers in one process: at rest, owners keep exactly what somebody holds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from remora import rpc
from remora.errors import OwnerDied, RemoraError
from remora.testing.world import World

N = 5
shelves: dict[str, list[rpc.RRef[Any]]] = {}


def make(n: int) -> list[int]:
    return [n]


def keep(reference: rpc.RRef[Any]) -> None:
    shelves[rpc.get_worker_info().name].append(reference)


def give(which: int) -> list[rpc.RRef[Any]]:
    shelf = shelves[rpc.get_worker_info().name]
    return [shelf[which % len(shelf)]] if shelf else []


def pass_on(path: list[str], reference: rpc.RRef[Any]) -> None:
    if path:
        rpc.rpc_sync(path[0], pass_on, args=(path[1:], reference))
    else:
        keep(reference)


workers = st.integers(0, N - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("own"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("share"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("ask"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("chain"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("use"), workers, workers, st.integers(0, 9)),
        st.tuples(st.just("drop"), workers, workers, st.integers(0, 9)),
    ),
    min_size=5,
    max_size=40,
)


def pick(i: int, which: int) -> rpc.RRef[Any] | None:
    shelf = shelves[f"worker{i}"]
    return shelf[which % len(shelf)] if shelf else None


def step(world: World, kind: str, i: int, j: int, n: int, dead: set[int]) -> None:
    """One step of worker i's program."""
    there = f"worker{j}"
    reference = pick(i, n)
    match kind:
        case "create":
            keep(rpc.remote(there, make, args=(n,)))
        case "own":
            keep(rpc.RRef([n]))
        case "share" if reference is not None:
            rpc.rpc_sync(there, keep, args=(reference,))
        case "ask":
            for received in rpc.rpc_sync(there, give, args=(n,)):
                keep(received)
        case "chain" if reference is not None:
            path = [f"worker{(j + k) % N}" for k in range(n % 4) if (j + k) % N not in dead]
            pass_on(path, reference)
        case "use" if reference is not None:
            assert 0 <= reference.to_here()[0] <= 9
        case "drop" if reference is not None:
            shelves[f"worker{i}"].remove(reference)


def expected(dead: set[int]) -> dict[int, set[Any]]:
    """What each worker should own for others: the values of which a live worker elsewhere holds a reference."""
    owned: dict[int, set[Any]] = {i: set() for i in range(N) if i not in dead}
    for i in range(N):
        for reference in shelves[f"worker{i}"] if i not in dead else []:
            owner = reference.owner().id
            if owner != i and owner in owned:
                owned[owner].add(reference._handle.rref_id)
    return owned


def actual(world: World, dead: set[int]) -> dict[int, set[Any]]:
    return {i: set(world[i].references.table.state.owner.values) for i in range(N) if i not in dead}


def at_rest(world: World, dead: set[int]) -> Callable[[], bool]:
    gc.collect()  # errors and tracebacks of failed steps may hold references in cycles

    def ready() -> bool:
        for i in set(range(N)) - dead:
            world[i].agent.peers.watch_all()  # confirmations that nobody is in a hurry for
        quiet = all(
            counts["num_pending_futures"] == counts["num_pending_users"] == 0
            for counts in (world[i].references.table.counts() for i in range(N) if i not in dead)
        )
        return quiet and actual(world, dead) == expected(dead)

    return ready


def check(world: World, dead: set[int]) -> None:
    try:
        world.wait_until(at_rest(world, dead), 10)
    except AssertionError:
        note(f"owned: {actual(world, dead)}\nexpected: {expected(dead)}")
        for i in set(range(N)) - dead:
            note(f"worker{i}: {world.run(i, rpc.references)}")
        raise
    for i in set(range(N)) - dead:
        table = world[i].references.table
        table.state.owner.check()
        table.state.holder.check()


def forget_everything(world: World, dead: set[int]) -> None:
    for shelf in shelves.values():
        shelf.clear()
    check(world, dead)
    for i in set(range(N)) - dead:
        table = world[i].references.table
        world.wait_until(lambda table=table: not table.state.holder.forks, 10)  # type: ignore[misc]  # those to values of the dead, too
        counts = table.counts()
        assert set(counts.values()) == {0}, f"worker{i}: {counts}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_at_rest_owners_keep_exactly_what_is_held(plan: list[tuple[str, int, int, int]]) -> None:
    shelves.update({f"worker{i}": [] for i in range(N)})
    with World(N, threads=2) as world:
        for kind, i, j, n in plan:
            world.run(i, step, world, kind, i, j, n, set())
        check(world, set())
        forget_everything(world, set())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, workers, st.integers(0, 20))
def test_so_they_do_after_a_worker_died(plan: list[tuple[str, int, int, int]], victim: int, when: int) -> None:
    shelves.update({f"worker{i}": [] for i in range(N)})
    dead: set[int] = set()
    with World(N, threads=2) as world:
        for number, (kind, i, j, n) in enumerate(plan):
            if number == when:
                dead.add(victim)
                world.kill(victim)
                shelves[f"worker{victim}"] = []
            if i in dead:
                continue
            started = time.monotonic()
            try:
                world.run(i, step, world, kind, i, j, n, dead)
            except OwnerDied:
                assert dead
            except RemoraError:
                assert dead, "nothing died, and yet a call failed"
            assert time.monotonic() - started < 5
        for shelf in shelves.values():  # what it owned is gone: such references are of no use
            shelf[:] = [reference for reference in shelf if reference.owner().id not in dead]
        check(world, dead)
        forget_everything(world, dead)
