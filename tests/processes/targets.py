"""Functions that workers call on each other, and that tests have them run. State is per process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from remora import rpc
from tests.eventually import eventually

wait_until = eventually

counts: dict[int, int] = {}
_lock = threading.Lock()
_gate = threading.Event()


def double(x: int) -> int:
    return 2 * x


def echo(value: Any) -> Any:
    return value


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def process_id() -> int:
    return os.getpid()


def count(key: int) -> int:
    """Note that this was called with `key`, and how often."""
    with _lock:
        counts[key] = counts.get(key, 0) + 1
        return counts[key]


def counted() -> dict[int, int]:
    return dict(counts)


def block() -> str:
    """Until `unblock`."""
    assert _gate.wait(30.0)
    return "unblocked"


def unblock() -> None:
    _gate.set()


def die() -> None:
    """As suddenly as possible, in the middle of a call."""
    os.kill(os.getpid(), 9)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def call(to: Any, function: Callable[..., Any], *args: Any, timeout: float = 10.0) -> Any:
    return rpc.rpc_sync(to, function, args=args, timeout=timeout)


def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """How long it took, and its value or its exception."""
    start = time.monotonic()
    try:
        outcome = function(*args, **kwargs)
    except Exception as error:
        outcome = error
    return time.monotonic() - start, outcome


def timed_call(to: Any, function: Callable[..., Any], *args: Any, timeout: float = 10.0) -> tuple[float, str, str]:
    """(seconds, the kind of error or "", its words or the value) of a call."""
    seconds, outcome = timed(call, to, function, *args, timeout=timeout)
    return seconds, type(outcome).__name__ if isinstance(outcome, Exception) else "", str(outcome)


def link_kind(to: str) -> str:
    """By which transport this worker's calls to another go."""
    link = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing.link
    assert link is not None
    return link.where


def listening_ports() -> list[int]:
    """The TCP ports where this worker listens."""
    record = rpc._get_current_rpc_agent().record
    return [int(address.rsplit(":", 1)[1]) for address in record.addresses if address.startswith("tcp://")]


def sum_of(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def serving() -> int:
    """Requests that this worker has received and not answered."""
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def join_dynamic(name: str, rank: int, init_method: str, **settings: Any) -> None:
    """Become a worker of a dynamic group."""
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


def leave(graceful: bool = True) -> None:
    rpc.shutdown(graceful=graceful)


def freeze(workers: Any, rank: int) -> None:
    """SIGSTOP, and wait until it has arrived: until then the process may still answer a call."""
    workers.stop(rank)
    eventually(lambda: _state(workers.pid(rank)) == "T")


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]
