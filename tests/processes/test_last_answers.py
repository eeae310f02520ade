"""What a worker answered before it left arrives: its farewell travels behind its answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

SMALL, LARGE = 10, 1 << 23  # elements; the large answer has 32 MB
ROADS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"transports": ["unix"], "shared_memory": 0},
    "tcp": {"transports": ["tcp"], "shared_memory": 0},
}
LATE = "delay PYTHON_RET worker1->worker0 700ms"  # longer than a worker that ends at once waits for goodbyes
BROKEN = f"{LATE}; cut worker0-worker1 at 300ms for 400ms"

asked = threading.Event()
held: list[rpc.RRef[Any]] = []


def answer(n: int) -> torch.Tensor:
    """The last answer: the main thread leaves as soon as the call is under way."""
    asked.set()
    return torch.full((n,), 7.0)


def leave_when_asked(graceful: bool = True) -> None:
    assert asked.wait(20.0)
    rpc.shutdown(graceful=graceful)


def ask_twice(to: str, n: int) -> list[bool]:
    """Whether the answers to a synchronous and an asynchronous call are right."""
    futures = [rpc.rpc_async(to, torch.full, args=((n,), 7.0), timeout=30)]
    found = [rpc.rpc_sync(to, answer, args=(n,), timeout=30), *torch.futures.wait_all(futures)]
    return [bool(torch.equal(each, torch.full((n,), 7.0))) for each in found]


def join(workers: Workers, n: int, **settings: Any) -> None:
    for rank in range(n):
        workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method, **settings)


@pytest.mark.parametrize("n", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("road", ROADS)
def test_the_answers_of_one_that_leaves_come_before_its_farewell(road: str, n: int) -> None:
    with Workers(2, join=False) as workers:
        join(workers, 2, **ROADS[road], faults=LATE)
        workers.run(0, witness.listen)
        leaving = workers.start(1, leave_when_asked)
        assert workers.run(0, ask_twice, "worker1", n) == [True, True]
        leaving.result(20.0)
        assert workers.run(0, witness.kinds, "worker1") == ["Left"], "it is told before shutdown returns"
        workers.run(0, targets.leave)


def test_they_come_over_a_new_link_if_the_old_one_breaks_meanwhile() -> None:
    with Workers(2, join=False) as workers:
        join(workers, 2, **ROADS["unix"], faults=BROKEN)
        leaving = workers.start(1, leave_when_asked)
        assert workers.run(0, ask_twice, "worker1", SMALL) == [True, True]
        leaving.result(20.0)
        workers.run(0, targets.leave)


def test_one_that_ends_at_once_says_goodbye_behind_what_it_has_answered() -> None:
    with Workers(2, options=ROADS["tcp"]) as workers:
        pending = workers.start(0, ask_twice, "worker1", LARGE)
        workers.run(1, leave_when_answered)
        assert pending.result(20.0) == [True, True]
        workers.run(0, targets.leave, False)


def leave_when_answered() -> None:
    assert asked.wait(20.0)
    eventually(lambda: not targets.serving())
    rpc.shutdown(graceful=False)


def test_news_of_a_third_worker_do_not_overtake_them() -> None:
    """An owner of values that has lost the leaving worker asks us to confirm that nothing more will come from it."""
    with Workers(3, join=False) as workers:
        join(workers, 3, **ROADS["unix"], faults="delay PYTHON_RET worker1->worker0 1500ms")
        workers.run(1, hold_a_value_of, "worker2")
        leaving = workers.start(1, leave_when_asked)
        assert workers.run(0, ask_twice, "worker1", SMALL) == [True, True]
        leaving.result(20.0)
        for rank in (0, 2):
            workers.run(rank, targets.leave)


def hold_a_value_of(name: str) -> None:
    held.append(rpc.remote(name, targets.double, args=(1,)))
    held[0].to_here()


def pass_on() -> rpc.RRef[Any]:
    """The last answer is a reference to a value of a third worker."""
    asked.set()
    return held[0]


def fetch(to: str) -> Any:
    return rpc.rpc_sync(to, pass_on, timeout=30).to_here()


def test_a_reference_that_its_owner_has_not_confirmed_yet_is_an_answer_too() -> None:
    with Workers(3, join=False) as workers:
        join(workers, 3, **ROADS["unix"], faults="delay * worker2->worker0 700ms")
        workers.run(1, hold_a_value_of, "worker2")
        leaving = workers.start(1, leave_when_asked)
        assert workers.run(0, fetch, "worker1") == 2
        leaving.result(20.0)
        for rank in (0, 2):
            workers.run(rank, targets.leave)
