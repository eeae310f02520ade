"""Processes that fork: a child is a process without a worker, may start one of its own, and harms its parent's in no way."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.calls.call import current_serving
from remora.agent.calls.call_context import current_call_context
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers


def in_child(action: Any, *args: Any) -> Any:
    """Fork, run it in the child, and return what it returned, or the text of its error."""
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            writer.send(action(*args))
        except BaseException as error:
            writer.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    writer.close()
    try:
        assert reader.poll(20.0), "the child did not answer"
        return reader.recv()
    finally:
        reader.close()
        os.waitpid(pid, 0)


def call_as_child(to: str) -> int:
    value: int = rpc.rpc_sync(to, targets.double, args=(1,))
    return value


def be_a_worker(init_method: str, name: str, rank: int, world_size: int | None, to: str) -> tuple[int, list[str]]:
    """Join as a worker of its own, call another, leave."""
    options = rpc.RemoraRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    value = rpc.rpc_sync(to, targets.double, args=(21,), timeout=10)
    known = [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()]
    rpc.shutdown()
    return value, known


def test_a_child_has_no_worker() -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        assert "RPC has not been initialized" in workers.run(0, in_child, call_as_child, "worker1")
        assert workers.run(0, in_child, rpc._is_current_rpc_agent_set) is False
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2


def test_a_child_may_start_a_worker_of_its_own(tmp_path: Any) -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        method = f"file://{tmp_path}/of_the_child"
        for _ in range(2):
            assert workers.run(0, in_child, be_a_worker, method, "child", 0, 1, "child") == (42, ["child"])
            assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
            assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2


def test_a_child_joins_the_group_of_its_parent() -> None:
    """In a dynamic group: the child is one more member, and calls its own parent."""
    with Workers(1, join=False) as workers:
        workers.run(0, start_dynamic, workers.init_method)
        value, known = workers.run(0, in_child, be_a_worker, workers.init_method, "child", 1, None, "parent")
        assert value == 42
        assert known == ["parent", "child"]
        assert workers.run(0, targets.call, "parent", targets.double, 1) == 2


def start_dynamic(init_method: str) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=init_method)
    rpc.init_rpc("parent", rank=0, world_size=None, rpc_backend_options=options)


def fork_and_hold(seconds: float) -> int:
    """A child that does nothing but live for a while, with copies of all of its parent's descriptors."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def test_the_end_of_a_parent_is_noticed_though_a_child_lives_on() -> None:
    """The child must not hold the parent's connections open."""
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        workers.run(1, targets.call, "worker0", targets.double, 1)
        child = workers.run(0, fork_and_hold, 30.0)
        try:
            waiting = workers.start(1, targets.timed_call, "worker0", targets.block, timeout=20.0)
            eventually(lambda: workers.run(0, serving) == 1)
            workers.kill(0)
            _, kind, words = waiting.result(timeout=5.0)
            assert kind == "WorkerLost", words
            assert "worker0" in words
        finally:
            os.kill(child, 9)


def serving() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def test_forking_in_the_middle_of_traffic(tmp_path: Any) -> None:
    with Workers(2) as workers:
        assert workers.run(0, fork_while_calling, "worker1", f"file://{tmp_path}/meeting") == 2000


def fork_while_calling(to: str, method: str) -> int:
    """Children are forked while calls are under way on other threads; each starts a worker of its own."""
    import threading

    answered: list[int] = []

    def caller() -> None:
        answered.extend(rpc.rpc_sync(to, targets.double, args=(i,), timeout=20) for i in range(1000))

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(5):
        value, _ = in_child(be_a_worker, f"{method}{i}", "child", 0, 1, "child")
        assert value == 42
    for thread in threads:
        thread.join()
    return len(answered)


def join_in_pool(arguments: tuple[str, int]) -> str:
    method, rank = arguments
    options = rpc.RemoraRpcBackendOptions(init_method=method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc.get_worker_info().name


def call_in_pool(x: int) -> tuple[str, float]:
    me = rpc.get_worker_info()
    value = rpc.rpc_sync(1 - me.id, torch.add, args=(torch.ones(1), x), timeout=10)
    return me.name, value.item()


def leave_in_pool(_: int) -> bool:
    rpc.shutdown()
    return rpc._is_current_rpc_agent_set()


def use_pool(method: str) -> tuple[list[str], set[tuple[str, float]], list[bool]]:
    """Workers in the children of a pool, with the work spread over several calls of the pool."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # as tests start it, it is
    with multiprocessing.get_context("fork").Pool(2) as pool:
        joined = pool.map(join_in_pool, [(method, 0), (method, 1)], chunksize=1)
        called = {outcome for x in range(5) for outcome in pool.map(call_in_pool, [x] * 2, chunksize=1)}
        left = pool.map(leave_in_pool, range(2), chunksize=1)
    return sorted(joined), called, left


def test_a_pool_of_forked_processes(tmp_path: Any) -> None:
    with Workers(1, join=False, leak_timeout=None) as workers:
        joined, called, left = workers.run(0, use_pool, f"file://{tmp_path}/pool")
        assert joined == ["worker0", "worker1"]
        assert {value for _, value in called} == {1.0, 2.0, 3.0, 4.0, 5.0}
        assert left == [False, False]


def test_a_pool_of_a_process_that_is_a_worker_itself(tmp_path: Any) -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        joined, _, left = workers.run(0, use_pool, f"file://{tmp_path}/pool")
        assert joined == ["worker0", "worker1"]
        assert left == [False, False]
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2


def test_a_function_that_is_called_may_fork(tmp_path: Any) -> None:
    """The child begins in the middle of a call of its parent's worker; that must not matter to it."""
    with Workers(2, options={"num_worker_threads": 2}) as workers:
        traffic = workers.start(1, keep_calling, "worker0", 1500)
        for i in range(5):
            method = f"file://{tmp_path}/meeting{i}"
            outcome = workers.run(0, targets.call, "worker0", in_child, be_a_worker, method, "child", 0, 1, "child")
            assert outcome == (42, ["child"])
        assert traffic.result() == 1500


def keep_calling(to: str, n: int) -> int:
    return sum(rpc.rpc_sync(to, targets.double, args=(i,), timeout=20) == 2 * i for i in range(n))


# A child that is forked by a function which a peer called: on a thread of the pool, in the midst of a request.


def links_of(to: str) -> list[int]:
    """The links that this worker has with another: the same numbers if they are the same links."""
    peer = rpc._get_current_rpc_agent().agent.peers.find(to)
    return [id(channel.link) for channel in peer.channels()]


def look_around(to: str) -> tuple[bool, str, list[str]]:
    """As a child: whether there is a worker here, what becomes of a call, and which threads there are."""
    try:
        outcome = str(call_as_child(to))
    except RuntimeError as error:
        outcome = str(error)
    return rpc._is_current_rpc_agent_set(), outcome, [each.name for each in threading.enumerate()]


def test_a_child_of_a_called_function_has_no_worker_and_leaves_the_links_alone() -> None:
    with Workers(2) as workers:
        for rank in range(2):
            workers.run(rank, targets.call, f"worker{1 - rank}", targets.double, 1)
        workers.run(1, witness.listen)
        before = [workers.run(rank, links_of, f"worker{1 - rank}") for rank in range(2)]
        for _ in range(3):
            is_worker, outcome, threads = workers.run(1, targets.call, "worker0", in_child, look_around, "worker1")
            assert not is_worker
            assert "RPC has not been initialized" in outcome
            assert len(threads) == 1
        assert workers.run(0, targets.call, "worker1", targets.double, 1) == 2
        assert [workers.run(rank, links_of, f"worker{1 - rank}") for rank in range(2)] == before
        assert workers.run(1, witness.heard) == []
        eventually(lambda: workers.run(0, targets.serving) == 0)  # (the last answer is sent before it is counted)


def return_twice(how: str) -> tuple[str, int]:
    """Fork, and have the child come back from here, too, or fail, or exit; the parent comes back when it is gone."""
    pid = os.fork()
    if pid == 0:
        if how == "fail":
            raise ValueError("the child failed")
        if how == "exit":
            os._exit(0)
        return "child", os.getpid()
    try:
        eventually(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), what="(the child is still there)")
    except AssertionError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    return "parent", os.getpid()


@pytest.mark.parametrize("how", ["return", "fail", "exit"])
def test_a_child_that_comes_back_from_the_function_does_not_answer_the_request(how: str) -> None:
    """It has the way back to the caller in its hands, and what it says there would be heard."""
    with Workers(2) as workers:
        parent = workers.run(0, targets.process_id)
        before = workers.run(1, targets.call, "worker0", targets.double, 1), workers.run(1, links_of, "worker0")
        for _ in range(3):
            assert workers.run(1, targets.call, "worker0", return_twice, how) == ("parent", parent)
        assert (workers.run(1, targets.call, "worker0", targets.double, 1), workers.run(1, links_of, "worker0")) == before


def test_a_child_of_a_called_function_may_start_a_worker_of_its_own(tmp_path: Any) -> None:
    with Workers(2) as workers:
        traffic = workers.start(0, keep_calling, "worker1", 500)
        for i in range(3):
            method = f"file://{tmp_path}/meeting{i}"
            outcome = workers.run(1, targets.call, "worker0", in_child, be_a_worker, method, "child", 0, 1, "child")
            assert outcome == (42, ["child"])
        assert traffic.result() == 500
        assert workers.run(1, targets.call, "worker0", targets.double, 1) == 2


def test_a_child_of_a_called_function_joins_the_group_and_calls_who_waits_for_it() -> None:
    with Workers(2, join=False) as workers:
        for rank, name in enumerate(("parent", "caller")):
            workers.run(rank, targets.join_dynamic, name, rank, workers.init_method)
        child = (be_a_worker, workers.init_method, "child", 2, None)
        for to in ("caller", "parent"):
            value, known = workers.run(1, targets.call, "parent", in_child, *child, to)
            assert value == 42
            assert known == ["parent", "caller", "child"]
        assert workers.run(1, targets.call, "parent", targets.double, 1) == 2
        assert workers.run(0, targets.call, "caller", targets.double, 1) == 2
        for rank in range(2):
            workers.run(rank, targets.leave)


def test_the_end_of_a_parent_is_noticed_though_a_child_of_a_called_function_lives_on() -> None:
    with Workers(2) as workers:
        child = workers.run(1, targets.call, "worker0", fork_and_hold, 30.0)
        try:
            waiting = workers.start(1, targets.timed_call, "worker0", targets.block, timeout=20.0)
            eventually(lambda: workers.run(0, targets.serving) == 1)
            workers.kill(0)
            _, kind, words = waiting.result(timeout=5.0)
            assert kind == "WorkerLost", words
        finally:
            os.kill(child, 9)


def inherited() -> tuple[object, bool]:
    """As a child: the call whose deadline that calls inherit, and whether they are recorded."""
    return current_serving.get(), current_call_context.get() is not None


def have_it_fork(to: str) -> tuple[object, bool]:
    with autograd.context():
        value: tuple[float | None, bool] = rpc.rpc_sync(to, in_child, args=(inherited,), timeout=20.0)
        return value


def test_the_call_in_which_a_child_was_forked_is_none_of_its_business() -> None:
    """Neither its deadline nor its context: calls of a worker of its own would end with the one, and miss the other."""
    with Workers(2) as workers:
        deadline, recorded = workers.run(1, have_it_fork, "worker0")
        assert deadline is None
        assert not recorded
