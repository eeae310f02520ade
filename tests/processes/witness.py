"""What a worker hears about the others, for tests to ask for. State is per process."""

from __future__ import annotations

import time
from typing import Any

from remora import rpc
from remora.rpc.membership import MembershipEvent
from tests import hosts
from tests.eventually import eventually
from tests.workers import Workers

_heard: list[tuple[float, MembershipEvent]] = []


def listen() -> None:
    """Take down what happens from now on."""
    rpc.on_membership(lambda event: _heard.append((time.monotonic(), event)))


def heard() -> list[tuple[float, str, str]]:
    """(when, what, about whom), in order."""
    return [(when, type(event).__name__, event.worker.name) for when, event in list(_heard)]


def kinds(about: str) -> list[str]:
    """What was heard about one worker."""
    return [kind for _, kind, name in heard() if name == about]


def states() -> dict[str, str]:
    return {member.worker.name: member.state for member in rpc.members()}


def names() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def wait_for(workers: Workers, rank: int, what: str, about: str, timeout: float = 10.0) -> float:
    """Wait until a worker has heard of something; when it did."""
    found: list[float] = []

    def look() -> bool:
        found[:] = [when for when, kind, name in workers.run(rank, heard) if (kind, name) == (what, about)]
        return bool(found)

    eventually(look, timeout, f"({what} {about})")
    return found[0]


def join_on_host(namespace: str, address: str, rank: int, size: int | None, method: str, **settings: Any) -> None:
    """Move this process to a host of its own and start a worker there."""
    hosts.enter(namespace)
    options = rpc.RemoraRpcBackendOptions(init_method=method, host=address, secret="x" * 32, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def join_all_on_hosts(workers: Workers, where: hosts.Hosts, size: int | None, **settings: Any) -> None:
    """Worker i joins on host i."""
    pending = [
        workers.start(i, join_on_host, where.namespace(i), where.address(i), i, size, workers.init_method, **settings)
        for i in range(where.n)
    ]
    for each in pending:
        each.result(timeout=20.0)
