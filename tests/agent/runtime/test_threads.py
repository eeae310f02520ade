"""Calls inside calls, on as few threads as possible: nothing deadlocks, and user code runs only where it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.futures import wait_all as wait_all_bound_early

from remora import rpc
from tests.agent.alone import NAME, worker_alone
from tests.eventually import eventually

gate = threading.Event()
running: list[str] = []


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    running.clear()
    yield
    gate.set()


def double(x: int) -> int:
    return 2 * x


def wait_at_gate() -> None:
    running.append(threading.current_thread().name)
    assert gate.wait(10.0)
    running.pop()


def descend(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(NAME, descend, args=(depth - 1,))


def descend_async(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_async(NAME, descend_async, args=(depth - 1,)).wait()


def descend_wait_all(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + max(torch.futures.wait_all([rpc.rpc_async(NAME, descend_wait_all, args=(depth - 1,)) for _ in range(2)]))


def descend_wait_all_bound_early(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + max(wait_all_bound_early([rpc.rpc_async(NAME, descend_wait_all_bound_early, args=(depth - 1,))]))


def descend_collect_all(depth: int) -> int:
    if depth == 0:
        return 0
    futures = [rpc.rpc_async(NAME, descend_collect_all, args=(depth - 1,))]
    return 1 + torch.futures.collect_all(futures).wait()[0].value()


def descend_then(depth: int) -> int:
    if depth == 0:
        return 0
    return rpc.rpc_async(NAME, descend_then, args=(depth - 1,)).then(lambda done: 1 + done.value()).wait()


def descend_in_callback(depth: int) -> Any:
    """Each level is called from the callback of the one before."""
    if depth == 0:
        return 0
    first = rpc.rpc_async(NAME, double, args=(0,))
    return first.then(lambda _: 1 + rpc.rpc_sync(NAME, descend_in_callback, args=(depth - 1,))).wait()


def descend_remote(depth: int) -> int:
    if depth == 0:
        return 0
    value: int = rpc.remote(NAME, descend_remote, args=(depth - 1,)).to_here()
    return 1 + value


@rpc.functions.async_execution
def descend_promising(depth: int) -> torch.futures.Future[int]:
    if depth == 0:
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(0)
        return done
    return rpc.rpc_async(NAME, descend_promising, args=(depth - 1,)).then(lambda done: 1 + done.value())


@pytest.mark.parametrize(
    ("function", "depth"),
    [
        (descend, 100),
        (descend_async, 100),
        (descend_wait_all, 6),
        (descend_wait_all_bound_early, 5),
        (descend_collect_all, 30),
        (descend_then, 30),
        (descend_in_callback, 30),
        (descend_remote, 30),
        (descend_promising, 100),
    ],
)
def test_calls_nest_on_one_worker_thread(narrow: str, function: Any, depth: int) -> None:
    assert rpc.rpc_sync(narrow, function, args=(depth,), timeout=5.0) == depth
    assert rpc.rpc_async(narrow, function, args=(depth,), timeout=5.0).wait() == depth


def test_several_threads_descend_at_the_same_time(narrow: str) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(rpc.rpc_sync(narrow, descend, args=(20,), timeout=8.0)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert found == [20] * 8


def test_no_more_functions_run_at_once_than_there_are_worker_threads() -> None:
    with worker_alone(num_worker_threads=3) as name:
        futures = [rpc.rpc_async(name, wait_at_gate) for _ in range(10)]
        eventually(lambda: len(running) == 3)
        extra = rpc.rpc_async(name, double, args=(1,))
        with pytest.raises(TimeoutError):
            extra.wait(timeout=0.1)
        assert len(running) == 3
        gate.set()
        torch.futures.wait_all([*futures, extra])


def test_as_many_functions_run_at_once_as_there_are_worker_threads(me: str) -> None:
    futures = [rpc.rpc_async(me, wait_at_gate) for _ in range(16)]
    eventually(lambda: len(running) == 16)
    assert len(set(running)) == 16, "each on a thread of its own"
    gate.set()
    torch.futures.wait_all(futures)


def test_a_worker_with_512_threads_starts_none_it_does_not_need() -> None:
    before = threading.active_count()
    with worker_alone(num_worker_threads=512) as name:
        for i in range(50):
            rpc.rpc_sync(name, double, args=(i,))
        assert threading.active_count() - before < 8


def test_a_hundred_functions_block_at_once() -> None:
    with worker_alone(num_worker_threads=256) as name:
        futures = [rpc.rpc_async(name, wait_at_gate) for _ in range(100)]
        eventually(lambda: len(running) == 100)
        gate.set()
        torch.futures.wait_all(futures)


def test_a_promise_holds_no_thread(narrow: str) -> None:
    promises: list[torch.futures.Future[int]] = _promises
    futures = [rpc.rpc_async(narrow, promise_later) for _ in range(20)]
    eventually(lambda: len(promises) == 20)
    assert rpc.rpc_sync(narrow, double, args=(2,), timeout=5.0) == 4
    for i, promise in enumerate(promises):
        promise.set_result(i)
    promises.clear()
    assert sorted(torch.futures.wait_all(futures)) == list(range(20))


_promises: list[torch.futures.Future[int]] = []


@rpc.functions.async_execution
def promise_later() -> torch.futures.Future[int]:
    promise: torch.futures.Future[int] = torch.futures.Future()
    _promises.append(promise)
    return promise


# User code never runs on a thread that waits for something else, for that thread may hold a lock.

lock = threading.Lock()


def take_lock() -> str:
    with lock:
        return threading.current_thread().name


def test_callbacks_do_not_run_on_a_thread_that_waits_in_a_synchronous_call(me: str) -> None:
    """The waiting thread reads the link itself; the callbacks of the answers it finds there are not its to run."""
    names: list[str] = []
    asked, called = threading.Event(), threading.Event()

    def on_answer(done: torch.futures.Future[int]) -> None:
        with lock:
            names.append(threading.current_thread().name)
        called.set()

    def let_go() -> None:
        """While the main thread waits, the answer for the callback arrives, and then its own."""
        assert asked.wait(5.0)
        agent = rpc._get_current_rpc_agent().agent
        eventually(lambda: agent.peers.active_calls() == 2)
        first_gate.set()

    first_gate.clear()
    rpc.rpc_sync(me, double, args=(1,))  # connected: the thread that waits below does read
    future = rpc.rpc_async(me, wait_at_first_gate)
    future.add_done_callback(on_answer)
    helper = threading.Thread(target=let_go)
    helper.start()
    with lock:
        asked.set()
        assert rpc.rpc_sync(me, wait_at_first_gate_and_a_little_longer, timeout=5.0) == 2
        assert not names, "the callback needs the lock and cannot have run"
    helper.join(5.0)
    assert called.wait(5.0)
    assert names[0].startswith("remora-")


first_gate = threading.Event()


def wait_at_first_gate() -> int:
    assert first_gate.wait(5.0)
    return 1


def wait_at_first_gate_and_a_little_longer() -> int:
    assert first_gate.wait(5.0)
    time.sleep(0.1)  # the answer to the other call comes first, and is read by the thread that waits for this one
    return 2


def test_functions_do_not_run_on_a_thread_that_waits_in_a_synchronous_call(narrow: str) -> None:
    """A worker that calls itself while it holds a lock which another of its functions needs."""
    other = threading.Thread(target=lambda: running.append(rpc.rpc_sync(narrow, take_lock, timeout=5.0)))
    with lock:
        other.start()
        eventually(lambda: rpc._get_current_rpc_agent().agent.dispatch.counts() == 1)
        # The only place is taken by take_lock, so this one has to wait for it: nobody may run it on our thread.
        future = rpc.rpc_async(narrow, double, args=(1,), timeout=5.0)
        with pytest.raises(TimeoutError):
            future.wait(timeout=0.1)
    assert future.wait() == 2
    other.join(5.0)
    assert running[0].startswith("remora-")


def test_a_future_is_not_completed_on_a_thread_that_waits_for_another(me: str) -> None:
    threads: set[int] = set()
    for _ in range(200):
        future = rpc.rpc_async(me, double, args=(1,))
        future.add_done_callback(lambda done: threads.add(threading.get_ident()) if not inline[0] else None)
        inline[0] = False
        rpc.rpc_sync(me, double, args=(2,))
        inline[0] = True
        future.wait()
    assert threading.get_ident() not in threads


inline = [True]


def test_an_idle_worker_uses_no_processor_time(me: str) -> None:
    rpc.rpc_sync(me, double, args=(1,))
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05


def test_threads_end_with_their_worker() -> None:
    before = set(threading.enumerate())
    with worker_alone() as name:
        gate.set()
        torch.futures.wait_all([rpc.rpc_async(name, wait_at_gate) for _ in range(16)])
    eventually(lambda: set(threading.enumerate()) <= before)
