"""Real processes that meet: at any kind of place, with changing ranks, beside a process group, killed while waiting."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from remora.errors import AuthenticationError, RendezvousError
from remora.testing.processes import ProcessEnded
from tests.workers import Workers

TIMEOUT = 30.0
T = TypeVar("T")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def join_static(url: str, name: str, rank: int, size: int, timeout: float = TIMEOUT) -> tuple[str, list[str]]:
    """What a worker does to join: open the store, sign in, wait. Returns the group's id and the names by rank."""
    from remora.rendezvous.group import StaticGroup
    from remora.rendezvous.record import WorkerRecord
    from remora.rendezvous.store import open_store

    group = StaticGroup(open_store(url, rank, size, timeout), size, timeout)
    members = group.join(WorkerRecord(name, rank, os.urandom(8).hex(), "host", ()))
    return group.group_id, [each.name for each in members]


def everywhere(workers: Workers, function: Callable[..., T], arguments: Callable[[int], tuple[object, ...]]) -> list[T]:
    pending = [workers.start(rank, function, *arguments(rank)) for rank in range(workers.world_size)]
    return [each.result(TIMEOUT) for each in pending]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_twenty_processes_join_at_once(kind: str) -> None:
    with Workers(20, join=False, timeout=60) as workers:
        url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else workers.init_method
        joined = everywhere(workers, join_static, lambda rank: (url, f"w{rank}", rank, 20))
    assert len({group for group, _ in joined}) == 1
    assert all(names == [f"w{rank}" for rank in range(20)] for _, names in joined)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_and_names_may_change_from_group_to_group(kind: str) -> None:
    """Rank 0 hosts the store: when it moves to another process, the first one still holds the port."""
    with Workers(3, join=False) as workers:
        url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else workers.init_method
        groups = set()
        for turn in range(3):
            joined = everywhere(
                workers, join_static, lambda rank, turn=turn: (url, f"p{rank}-{turn}", (rank + turn) % 3, 3)
            )
            assert all(names == [f"p{(rank - turn) % 3}-{turn}" for rank in range(3)] for _, names in joined)
            groups |= {group for group, _ in joined}
    assert len(groups) == 3


def test_workers_with_different_histories_agree() -> None:
    """One process has met others three times, the other comes for the first time."""
    with Workers(2, join=False) as workers:
        url = f"tcp://127.0.0.1:{free_port()}"
        for turn in range(3):
            assert workers.run(0, join_static, url, f"alone{turn}", 0, 1)[1] == [f"alone{turn}"]
        joined = everywhere(workers, join_static, lambda rank: (url, f"w{rank}", rank, 2))
    assert joined[0] == joined[1]


def share_with_process_group(port: int, pg_rank: int, rank: int, size: int) -> tuple[str, list[str]]:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=pg_rank, world_size=size)
    try:
        joined = join_static("env://", f"w{rank}", rank, size)
        total = torch.tensor([rank])
        dist.all_reduce(total)
        assert total.item() == sum(range(size))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return joined


@pytest.mark.parametrize("shift", [0, 1])
def test_the_store_is_shared_with_a_process_group(shift: int) -> None:
    """Also when the process group numbers its processes in another way."""
    port = free_port()
    with Workers(3, join=False) as workers:
        joined = everywhere(workers, share_with_process_group, lambda rank: (port, rank, (rank + shift) % 3, 3))
    assert all(each == joined[0] for each in joined)
    assert joined[0][1] == ["w0", "w1", "w2"]


def test_a_worker_killed_while_it_waits_is_missed_by_nobody_for_ever() -> None:
    """It cannot take its name off the table. The others and its successor are told, and can start again."""
    with Workers(3, join=False) as workers:
        url = workers.init_method
        first = workers.start(1, join_static, url, "w1", 1, 3, 20.0)
        deadline = time.monotonic() + 10
        file = Path(url.removeprefix("file://"))
        while not (file.exists() and b"/arrived" in file.read_bytes()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        workers.kill(1)
        with pytest.raises(RuntimeError):
            first.result(5)
        workers.add(1)
        pending = [workers.start(rank, join_static, url, f"w{rank}", rank, 3, 20.0) for rank in (1, 0)]
        for each in pending:
            with pytest.raises(RendezvousError, match="Worker id 1 is not unique"):
                each.result(TIMEOUT)
        joined = everywhere(workers, join_static, lambda rank: (url, f"w{rank}", rank, 3))
    assert all(names == ["w0", "w1", "w2"] for _, names in joined)


def fail_and_end(url: str, rank: int) -> str:
    """Fail to join a worker with another secret. The process of rank 0, which hosts the store, ends at once then."""
    from remora.rendezvous import static_join
    from remora.rendezvous.group import StaticGroup
    from remora.rendezvous.record import WorkerRecord
    from remora.rendezvous.seal import RecordSeal
    from remora.rendezvous.store import open_store

    static_join._LOOK_AROUND = 0.1 + rank  # rank 0 finds out first
    seal = RecordSeal(bytes([rank] * 32), "a secret was given")
    try:
        StaticGroup(open_store(url, rank, 2, TIMEOUT), 2, TIMEOUT, None, seal).join(
            WorkerRecord(f"w{rank}", rank, os.urandom(8).hex(), "host", ())
        )
    except AuthenticationError as error:
        if rank == 0:
            os._exit(0)
        return str(error)
    return "joined"


def test_a_host_that_fails_and_ends_lets_the_others_learn_why() -> None:
    """They would say that the store is gone."""
    with Workers(2, join=False) as workers:
        url = f"tcp://127.0.0.1:{free_port()}"
        host = workers.start(0, fail_and_end, url, 0)
        reason = workers.start(1, fail_and_end, url, 1).result(TIMEOUT)
        with pytest.raises(ProcessEnded):
            host.result(TIMEOUT)
    assert "do not have the same secret" in reason
