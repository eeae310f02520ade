"""How workers come together, leave and come again: static and dynamic groups, over all kinds of stores."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from remora import rpc
from remora.errors import RendezvousError, WorkerNotFound
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.secret import loopback_secret
from remora.rendezvous.store_table import StoreTable
from remora.transport.addresses import host_identity
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers


def start(name: str, rank: int, world_size: int | None, init_method: str, **settings: Any) -> list[str]:
    """`init_rpc`; the names of the workers it knows then."""
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    return names()


def names() -> list[str]:
    return [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()]


def leave(graceful: bool = True) -> None:
    rpc.shutdown(graceful=graceful)


def timed_start(*args: Any, **settings: Any) -> tuple[float, str, str]:
    seconds, outcome = targets.timed(start, *args, **settings)
    return seconds, type(outcome).__name__ if isinstance(outcome, Exception) else "", str(outcome)


@pytest.fixture
def processes() -> Iterator[Workers]:
    """Three processes that have not joined anything."""
    with Workers(3, join=False) as workers:
        yield workers


@pytest.fixture
def pair() -> Iterator[Workers]:
    with Workers(2, join=False) as workers:
        yield workers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_all(workers: Workers, specs: list[tuple[str, int]], init_method: str, **settings: Any) -> list[list[str]]:
    """Process i joins with the i-th (name, rank)."""
    pending = [
        workers.start(i, start, name, rank, len(specs), init_method, **settings) for i, (name, rank) in enumerate(specs)
    ]
    return [each.result(timeout=20.0) for each in pending]


def leave_all(workers: Workers, ranks: list[int]) -> None:
    for each in [workers.start(rank, leave) for rank in ranks]:
        each.result(timeout=15.0)


# Static groups.


def test_who_is_not_found_in_a_dynamic_group_may_still_join(pair: Workers, tmp_path: Path) -> None:
    """Under a launcher, a program that gives a rank and no world size may take its group for one of all processes."""
    assert pair.run(0, start, "a", 0, None, f"file://{tmp_path}/store") == ["a"]
    with pytest.raises(WorkerNotFound, match=r"among 1 workers \(a\)\. It may still join: .*given no world_size"):
        pair.run(0, rpc.rpc_sync, "w1", abs, (1,))
    pair.run(0, leave)



def test_init_again_after_shutdown_in_the_same_place(pair: Workers) -> None:
    for _ in range(3):
        start_all(pair, [("worker0", 0), ("worker1", 1)], pair.init_method)
        assert pair.run(0, targets.call, "worker1", targets.double, 2) == 4
        assert pair.run(1, targets.call, 0, targets.double, 2) == 4
        leave_all(pair, [0, 1])


def test_init_again_with_another_rank_and_name(pair: Workers) -> None:
    start_all(pair, [("ann", 0), ("bob", 1)], pair.init_method)
    assert pair.run(0, targets.call, "bob", targets.process_id) == pair.pid(1)
    leave_all(pair, [0, 1])
    assert start_all(pair, [("carl", 1), ("ann", 0)], pair.init_method) == [["ann", "carl"]] * 2
    assert pair.run(0, targets.call, "ann", targets.process_id) == pair.pid(1)
    assert pair.run(1, targets.call, 1, targets.process_id) == pair.pid(0)
    assert pair.run(0, targets.timed_call, "bob", targets.double, 1)[1] == "WorkerNotFound"
    leave_all(pair, [0, 1])


def test_init_again_in_a_group_of_another_size(processes: Workers) -> None:
    start_all(processes, [("a", 0), ("b", 1)], processes.init_method)
    leave_all(processes, [0, 1])
    start_all(processes, [("a", 0), ("b", 1), ("c", 2)], processes.init_method)
    assert processes.run(0, targets.call, "c", targets.double, 2) == 4
    leave_all(processes, [0, 1, 2])


def test_init_again_after_a_shutdown_that_was_not_graceful(pair: Workers) -> None:
    for _ in range(2):
        start_all(pair, [("worker0", 0), ("worker1", 1)], pair.init_method)
        assert pair.run(0, targets.call, "worker1", targets.double, 2) == 4
        for rank in (0, 1):
            pair.run(rank, leave, False)


def test_a_process_that_was_in_another_group_before(processes: Workers, tmp_path: Path) -> None:
    """Workers with different histories agree: counters of a process must not matter."""
    processes.run(0, start, "x", 0, 1, f"file://{tmp_path}/elsewhere")
    processes.run(0, leave)
    start_all(processes, [("a", 0), ("b", 1)], processes.init_method)
    assert processes.run(1, targets.call, "a", targets.double, 2) == 4
    leave_all(processes, [0, 1])


def test_over_tcp_twice(pair: Workers) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        start_all(pair, [("worker0", 0), ("worker1", 1)], method)
        assert pair.run(0, targets.call, "worker1", targets.double, 2) == 4
        leave_all(pair, [0, 1])


def with_process_group(rank: int, port: int, first: str) -> tuple[float, int]:
    """gloo and RPC in one process, on one MASTER_PORT, whichever comes first."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def join_rpc() -> None:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)

    def join_gloo() -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2)

    for join in (join_rpc, join_gloo) if first == "rpc" else (join_gloo, join_rpc):
        join()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    value = rpc.rpc_sync(f"worker{1 - rank}", targets.double, args=(rank,))
    rpc.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return total.item(), value


@pytest.mark.parametrize("first", ["gloo", "rpc"])
def test_the_store_of_a_process_group_is_shared(first: str) -> None:
    with Workers(2, join=False, leak_timeout=None) as workers:
        port = free_port()
        pending = [workers.start(rank, with_process_group, rank, port, first) for rank in (0, 1)]
        assert [each.result(timeout=20.0) for each in pending] == [(3.0, 0), (3.0, 2)]


def test_a_second_worker_in_one_process_is_refused(pair: Workers) -> None:
    pair.run(0, start, "worker0", 0, 1, pair.init_method)
    _, kind, words = pair.run(0, timed_start, "again", 0, 1, pair.init_method)
    assert kind == "RuntimeError"
    assert "RPC is already initialized" in words
    assert pair.run(0, targets.call, "worker0", targets.double, 2) == 4


def test_a_missing_worker_is_named_within_the_bring_up_timeout(processes: Workers) -> None:
    method = processes.init_method
    pending = [
        processes.start(rank, timed_start, f"worker{rank}", rank, 3, method, bringup_timeout=1.0) for rank in (0, 2)
    ]
    for each in pending:
        seconds, kind, words = each.result(timeout=10.0)
        assert 0.9 < seconds < 4.0
        assert kind == "RendezvousError"
        assert "rank 1" in words
    # They have given up their places, and can come together with the one that was missing.
    start_all(processes, [("worker0", 0), ("worker1", 1), ("worker2", 2)], method)
    leave_all(processes, [0, 1, 2])


def test_the_bring_up_timeout_is_the_call_timeout_unless_given(pair: Workers) -> None:
    seconds, kind, _ = pair.run(0, timed_start, "worker0", 0, 2, pair.init_method, rpc_timeout=0.8)
    assert kind == "RendezvousError"
    assert 0.7 < seconds < 4.0


def test_a_worker_that_comes_late_is_waited_for(pair: Workers) -> None:
    first = pair.start(0, start, "worker0", 0, 2, pair.init_method, bringup_timeout=20.0, rpc_timeout=0.2)
    time.sleep(0.6)
    assert not first.done(), "longer than a call may take"
    pair.run(1, start, "worker1", 1, 2, pair.init_method)
    assert first.result() == ["worker0", "worker1"]
    leave_all(pair, [0, 1])


def test_no_group_is_formed_with_a_worker_that_was_killed_while_it_waited(tmp_path: Path) -> None:
    """Nobody listens where it did; one that is there, whoever it is, keeps its place."""
    seal = RecordSeal(loopback_secret())
    board, base = StoreTable(FileStore(f"{tmp_path}/rendezvous", -1), seal), f"static/{seal.fingerprint}/1"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        waiting = WorkerRecord("worker0", 0, "another life", host_identity(), (address,)).to_json().decode()
        board.swap(f"{base}/0/0", waiting)
        assert start("worker0", 0, 1, f"file://{tmp_path}/rendezvous", bringup_timeout=5.0) == ["worker0"]
        leave()
    assert "another life" in board.take([f"{base}/0/roster"])[0]
    board.swap(f"{base}/2/0", waiting)
    assert start("worker0", 0, 1, f"file://{tmp_path}/rendezvous", bringup_timeout=5.0) == ["worker0"]
    leave()
    assert "another life" not in board.take([f"{base}/2/roster"])[0]


def test_two_workers_of_one_name_are_refused(pair: Workers) -> None:
    pending = [pair.start(rank, timed_start, "twin", rank, 2, pair.init_method, bringup_timeout=3.0) for rank in (0, 1)]
    for each in pending:
        _, kind, words = each.result(timeout=10.0)
        assert kind == "RendezvousError"
        assert "is not unique" in words
        assert "twin" in words


def test_two_workers_of_one_rank_are_refused(pair: Workers) -> None:
    pending = [pair.start(i, timed_start, f"worker{i}", 0, 2, pair.init_method, bringup_timeout=2.0) for i in (0, 1)]
    for each in pending:
        seconds, kind, _ = each.result(timeout=10.0)
        assert kind == "RendezvousError"
        assert seconds < 6.0
    assert any("not unique" in each.result()[2] for each in pending)


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 128, "a\n", "worker/1"])
def test_a_name_against_the_rules_is_refused(name: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"must match|must be non-empty and shorter than 128"):
        start(name, 0, 1, "file:///nowhere/at/all")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-2, 2), (40000, None)])
def test_a_rank_that_cannot_be_is_refused(tmp_path: Path, rank: int, world_size: int | None) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        start("worker", rank, world_size, f"file://{tmp_path}/rendezvous", bringup_timeout=1.0)
    assert not rpc._is_current_rpc_agent_set()


def test_nobody_at_the_master_port_is_an_error_within_the_timeout(pair: Workers) -> None:
    port = free_port()
    seconds, kind, words = pair.run(0, timed_start, "worker1", 1, 2, f"tcp://127.0.0.1:{port}", rpc_timeout=1.0)
    assert kind == "RendezvousError"
    assert str(port) in words
    assert seconds < 5.0


@pytest.mark.parametrize(("bringup", "call"), [(0.1, 60.0), (0.4, 0.01)])
def test_the_master_port_is_watched_for_as_long_as_the_bring_up_may_take(bringup: float, call: float) -> None:
    """However long a call may take: rank 0 may start late, and a program may not want to wait for long."""
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match=f"nothing listened .* within {bringup:g} s"):
        start("worker1", 1, 2, f"tcp://127.0.0.1:{free_port()}", bringup_timeout=bringup, rpc_timeout=call)
    assert bringup / 2 <= time.monotonic() - begun < 10.0


def test_a_master_port_taken_by_something_else_is_named(pair: Workers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        seconds, kind, words = pair.run(0, timed_start, "worker0", 0, 2, f"tcp://127.0.0.1:{port}", rpc_timeout=2.0)
        assert kind == "RendezvousError"
        assert f"port {port} is in use" in words
        assert seconds < 4.0


def test_a_folder_that_is_not_there_is_named(pair: Workers) -> None:
    seconds, kind, words = pair.run(0, timed_start, "worker0", 0, 2, "file:///no/such/folder/file")
    assert kind == "RendezvousError"
    assert "/no/such/folder/file" in words
    assert seconds < 2.0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB that is full but for a little."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_not_a_hang(pair: Workers, tiny_disk: Path) -> None:
    (tiny_disk / "filling").write_bytes(b"x" * 60_000)
    seconds, kind, words = pair.run(0, timed_start, "worker0", 0, 2, f"file://{tiny_disk}/rendezvous", rpc_timeout=5.0)
    assert kind == "RendezvousError"
    assert "space" in words
    assert seconds < 7.0
    assert pair.run(0, start, "worker0", 0, 1, pair.init_method) == ["worker0"], "the process can still be a worker"


# Dynamic groups.


def call_all(others: list[str]) -> list[int]:
    return [rpc.rpc_sync(name, targets.double, args=(i,)) for i, name in enumerate(others)]


def test_workers_join_and_leave_at_any_time(processes: Workers) -> None:
    method = processes.init_method
    assert processes.run(0, start, "a", 0, None, method) == ["a"]
    assert processes.run(1, start, "b", 1, None, method) == ["a", "b"]
    assert processes.run(0, names) == ["a", "b"], "who was there first hears of who comes"
    assert processes.run(0, call_all, ["b", "a"]) == [0, 2]
    assert processes.run(2, start, "c", 2, None, method) == ["a", "b", "c"]
    assert processes.run(1, call_all, ["a", "c"]) == [0, 2]
    processes.run(1, leave)
    eventually(lambda: processes.run(0, names) == ["a", "c"])
    eventually(lambda: processes.run(2, names) == ["a", "c"])
    seconds, kind, _ = processes.run(0, targets.timed_call, "b", targets.double, 1)
    assert kind in ("CallNotSent", "WorkerNotFound")
    assert seconds < 1.0
    assert processes.run(0, call_all, ["c"]) == [0]
    processes.run(0, leave)
    processes.run(2, leave)


def test_leaving_a_dynamic_group_is_quick(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    pair.run(1, start, "b", 1, None, pair.init_method)
    for rank in (1, 0):
        assert pair.run(rank, targets.timed, leave)[0] < 2.0


def test_the_first_worker_may_leave(processes: Workers) -> None:
    method = processes.init_method
    for i, name in enumerate("abc"):
        processes.run(i, start, name, i, None, method)
    processes.run(0, leave)
    assert processes.run(1, call_all, ["c"]) == [0]
    assert processes.run(0, start, "a", 0, None, method) == ["a", "b", "c"]
    assert processes.run(1, call_all, ["a", "c"]) == [0, 2]
    for i in range(3):
        processes.run(i, leave)


def test_a_worker_leaves_and_comes_again_many_times(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    for i in range(5):
        pair.run(1, start, "b", 1, None, pair.init_method)
        assert pair.run(0, targets.call, "b", targets.double, i) == 2 * i
        assert pair.run(1, targets.call, "a", targets.double, i) == 2 * i
        pair.run(1, leave)
        eventually(lambda: pair.run(0, names) == ["a"])
    pair.run(0, leave)


def test_a_worker_comes_again_with_another_id_or_name(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    for name, rank in (("b", 1), ("b", 2), ("c", 2), ("b", 1)):
        pair.run(1, start, name, rank, None, pair.init_method)
        assert pair.run(0, targets.call, name, targets.process_id) == pair.pid(1)
        assert pair.run(0, targets.call, rank, targets.process_id) == pair.pid(1)
        assert pair.run(0, names) == ["a", name]
        pair.run(1, leave)
    pair.run(0, leave)


def test_a_worker_that_was_killed_can_be_replaced(pair: Workers) -> None:
    """A process that died did not take its name back; who is started in its place must be able to join."""
    pair.run(0, start, "a", 0, None, pair.init_method)
    pair.run(1, start, "b", 1, None, pair.init_method)
    assert pair.run(0, targets.call, "b", targets.double, 2) == 4
    pair.kill(1)
    assert pair.run(0, targets.timed_call, "b", targets.double, 1)[1] in ("WorkerLost", "CallNotSent")
    pair.add(1)
    assert pair.run(1, start, "b", 1, None, pair.init_method) == ["a", "b"]
    assert pair.run(0, targets.call, "b", targets.process_id) == pair.pid(1)
    assert pair.run(1, targets.call, "a", targets.double, 2) == 4


def test_names_and_ids_are_unique_in_a_dynamic_group(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    for name, rank in (("a", 1), ("b", 0)):
        _, kind, words = pair.run(1, timed_start, name, rank, None, pair.init_method)
        assert kind == "RendezvousError"
        assert "is not unique" in words
    assert pair.run(1, start, "b", 1, None, pair.init_method) == ["a", "b"], "and nothing of the failed tries is left"
    pair.run(1, leave)
    pair.run(0, leave)


def test_many_workers_join_at_the_same_time() -> None:
    with Workers(6, join=False) as workers:
        pending = [workers.start(i, start, f"worker{i}", i, None, workers.init_method) for i in range(6)]
        for each in pending:
            each.result(timeout=20.0)
        everybody = [f"worker{i}" for i in range(6)]
        for i in range(6):
            assert workers.run(i, call_all, everybody) == [2 * j for j in range(6)]
            assert workers.run(i, names) == everybody
        for each in [workers.start(i, leave) for i in range(6)]:
            each.result(timeout=20.0)


def test_leaving_waits_for_calls_under_way(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    pair.run(1, start, "b", 1, None, pair.init_method)
    waiting = pair.start(0, targets.timed_call, "b", targets.nap, 0.5)
    eventually(lambda: pair.run(1, serving) == 1)
    pair.run(1, leave)
    assert waiting.result()[1:] == ("", "0.5")
    pair.run(0, leave)


def serving() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def test_static_and_dynamic_members_do_not_mix(pair: Workers) -> None:
    pair.run(0, start, "a", 0, None, pair.init_method)
    _, kind, words = pair.run(1, timed_start, "b", 1, 2, pair.init_method, bringup_timeout=2.0)
    assert kind == "RendezvousError"
    assert "mixes statically and dynamically" in words
    pair.run(0, leave)


def test_a_dynamic_group_over_tcp_and_env(pair: Workers) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    pair.run(0, start, "a", 0, None, method)
    assert pair.run(1, start, "b", 1, None, method) == ["a", "b"]
    assert pair.run(0, call_all, ["b"]) == [0]
    pair.run(1, leave)
    pair.run(0, leave)


def test_worker_infos(pair: Workers) -> None:
    start_all(pair, [("ann", 0), ("bob", 1)], pair.init_method)
    assert pair.run(0, rpc.get_worker_info) == rpc.WorkerInfo("ann", 0)
    assert pair.run(0, rpc.get_worker_info, "bob") == rpc.WorkerInfo("bob", 1)
    assert pair.run(0, targets.call, "bob", rpc.get_worker_info) == rpc.WorkerInfo("bob", 1)
    _, outcome = pair.run(0, targets.timed, rpc.get_worker_info, "carl")
    assert type(outcome).__name__ == "WorkerNotFound"
    leave_all(pair, [0, 1])
