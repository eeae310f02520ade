"""References to a worker that came back: their values died with the old one, and they never reach those of the new one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

pytestmark = pytest.mark.timeout(60)

PATIENCE = 2.0  # for calls that should fail at once
MAKERS = ["owner", "holder", "third"]  # who asked for the value, and so whose number it has

held: dict[str, rpc.RRef[Any]] = {}  # by who asked for the value
reached: list[int] = []  # a value of this process was
_known = threading.Event()


class Thing:
    """A value that knows where it is and notes whether somebody reaches it."""

    def touch(self) -> int:
        reached.append(os.getpid())
        return os.getpid()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.touch(),)  # what is fetched


# What is run on the workers: worker0 holds, worker1 owns and comes back, worker2 is a third one.


def hand_out() -> rpc.RRef[Thing]:
    return rpc.RRef(Thing())


def have_made() -> rpc.RRef[Thing]:
    return rpc.remote("worker1", Thing)


def keep(references: dict[str, rpc.RRef[Any]]) -> None:
    held.update(references)


def hold() -> list[int]:
    """Have worker0 and worker2 hold references to values of worker1. Where those are."""
    held["owner"] = rpc.rpc_sync("worker1", hand_out)
    held["holder"] = have_made()
    held["third"] = rpc.rpc_sync("worker2", have_made)
    rpc.rpc_sync("worker2", keep, (held,))
    return [held[maker].to_here() for maker in MAKERS]


def hold_a_new_one() -> int:
    held["new"] = rpc.rpc_sync("worker1", hand_out)
    return int(held["new"].to_here())


def give(maker: str) -> rpc.RRef[Any]:
    return held[maker]


def fetch(reference: rpc.RRef[Any]) -> int:
    return int(reference.to_here(PATIENCE))


def touch(references: list[rpc.RRef[Any]]) -> int:
    return int(references[0].rpc_sync(PATIENCE).touch())


def times_reached() -> int:
    return len(reached)


def values_of_others() -> int:
    """How many values of this worker others hold."""
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def assert_one_value_is_held(workers: Workers) -> None:
    """The new one; and nothing is kept for references to old ones."""
    workers.run_all(gc.collect)  # errors keep what was used where they were raised
    eventually(lambda: workers.run(1, values_of_others) == 1)


# Every use of a reference, and what becomes of it.


def outcome(use: Callable[[], object]) -> str:
    """The kind of its error; or where the value was that it reached."""
    _, found = targets.timed(use)
    return type(found).__name__ if isinstance(found, Exception) else f"reached {found}"


def fetched(maker: str) -> dict[str, str]:
    return {"to_here": outcome(lambda: held[maker].to_here(PATIENCE))}


def fetched_later(maker: str) -> dict[str, str]:
    return {"to_here_async": outcome(lambda: held[maker].to_here_async(PATIENCE).wait())}


def called(maker: str) -> dict[str, str]:
    reference = held[maker]
    return {
        "rpc_sync()": outcome(lambda: reference.rpc_sync(PATIENCE).touch()),
        "rpc_async()": outcome(lambda: reference.rpc_async(PATIENCE).touch().wait()),
        "remote()": outcome(lambda: reference.remote(PATIENCE).touch().to_here(PATIENCE)),
    }


def handed_to(maker: str, to: str) -> dict[str, str]:
    """In calls; whoever gets it uses it."""
    reference = held[maker]
    return {
        f"rpc_sync to {to}": outcome(lambda: rpc.rpc_sync(to, fetch, (reference,), timeout=PATIENCE)),
        f"rpc_async to {to}": outcome(lambda: rpc.rpc_async(to, touch, ([reference],), timeout=PATIENCE).wait()),
        f"remote to {to}": outcome(lambda: rpc.remote(to, fetch, (reference,)).to_here(PATIENCE)),
    }


def answered_by(maker: str, keeper: str) -> dict[str, str]:
    """In the answer to a call."""
    return {f"reply of {keeper}": outcome(lambda: fetch(rpc.rpc_sync(keeper, give, (maker,), timeout=PATIENCE)))}


def assert_worthless(workers: Workers, rank: int, use: Callable[..., dict[str, str]], *args: str) -> None:
    for maker in MAKERS:
        found = workers.start(rank, use, maker, *args).result(4 * PATIENCE)
        assert set(found.values()) == {"OwnerDied"}, f"a value asked for by its {maker}, used by worker{rank}: {found}"


def join(workers: Workers, rank: int) -> None:
    workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)


def leave_all(workers: Workers) -> None:
    for rank in range(3):
        workers.run(rank, targets.leave)


@pytest.fixture
def trio() -> Iterator[Workers]:
    """Three workers of a dynamic group. Two of them hold references to values of worker1."""
    with Workers(3, join=False) as workers:
        for rank in range(3):
            join(workers, rank)
        workers.run_all(witness.listen)
        assert workers.run(0, hold) == [workers.pid(1)] * len(MAKERS)
        yield workers


def miss_nobody() -> None:
    """Worker1 may be gone: do not look whether it is."""
    peers = rpc._get_current_rpc_agent().agent.peers
    old, connect = peers.find("worker1"), peers.connect
    peers.connect = lambda peer: None if peer is old else connect(peer)


def has_given_up(name: str) -> bool:
    return bool(rpc._get_current_rpc_agent().agent.peers.find(name).gone)




@pytest.mark.parametrize(
    "end",
    ["killed", "killed and not missed", "left"],
)
def test_one_that_came_back_has_no_value_of_the_old_one(trio: Workers, end: str) -> None:
    for rank in (0, 2):
        if end == "killed and not missed":
            trio.run(rank, miss_nobody)
    if end == "left":
        trio.run(1, targets.leave)
    trio.kill(1)
    for rank in (0, 2):
        if end == "killed and not missed":
            assert not trio.run(rank, has_given_up, "worker1")
        else:
            witness.wait_for(trio, rank, "Left" if end == "left" else "Died", "worker1")
    trio.add(1)
    join(trio, 1)
    assert trio.run(0, hold_a_new_one) == trio.pid(1), "its number would be that of an old one, if it counted from 0"
    for holder, other in ((0, "worker2"), (2, "worker0")):
        for use in (fetched, fetched_later, called):
            assert_worthless(trio, holder, use)
        for to in (other, "worker1"):
            assert_worthless(trio, holder, handed_to, to)
    for caller in (1, 2):
        assert_worthless(trio, caller, answered_by, "worker0")
    assert trio.run(0, fetched, "new") == {"to_here": f"reached {trio.pid(1)}"}
    assert trio.run(1, times_reached) == 2, "by the new reference alone"
    assert_one_value_is_held(trio)
    leave_all(trio)


# Somebody has heard that a worker is gone, and of the new one, but its references do not know yet.


def mourn_slowly() -> None:
    rpc._get_current_rpc_agent().agent.peers.on_gone.insert(0, lambda peer: _known.wait(30.0))


def mourn() -> None:
    _known.set()


@pytest.fixture
def unaware(trio: Workers) -> Workers:
    """Worker1 came back, and worker0 does not know that its references are worthless."""
    trio.run(0, mourn_slowly)
    trio.kill(1)
    eventually(lambda: trio.run(0, has_given_up, "worker1"))
    witness.wait_for(trio, 2, "Died", "worker1")
    trio.add(1)
    join(trio, 1)
    assert trio.run(0, hold_a_new_one) == trio.pid(1)
    return trio


def test_who_gets_a_reference_to_the_old_one_knows_that_it_is_not_to_the_new_one(unaware: Workers) -> None:
    assert_worthless(unaware, 0, fetched)
    assert_worthless(unaware, 0, handed_to, "worker2")
    assert_worthless(unaware, 2, answered_by, "worker0")
    unaware.run(0, mourn)
    assert unaware.run(1, times_reached) == 1
    assert_one_value_is_held(unaware)
    leave_all(unaware)


def test_the_new_one_knows_that_a_reference_to_the_old_one_is_not_its_own(unaware: Workers) -> None:
    assert_worthless(unaware, 0, called)
    assert_worthless(unaware, 0, handed_to, "worker1")
    assert_worthless(unaware, 1, answered_by, "worker0")
    unaware.run(0, mourn)
    assert unaware.run(1, times_reached) == 1
    assert_one_value_is_held(unaware)
    leave_all(unaware)
