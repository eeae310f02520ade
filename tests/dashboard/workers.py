"""What real workers do while a test looks at them in the dashboard. Each function runs on a worker."""

from __future__ import annotations

import threading
import time

import torch

from remora import autograd, rpc
from remora.observer.directory import entries

LOCK = threading.Lock()
KEPT: list[object] = []


def group_of(pid: int) -> str | None:
    """The group of the worker with this process, as its record says. Runs in the test."""
    return next((each.group for each in entries() if each.pid == pid), None)


def add_up(n: int) -> int:
    return sum(range(n))


def work(peer: str, seconds: float) -> int:
    """Make calls of a few kinds until the time is over; keep some references."""
    end, calls = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rpc.rpc_sync(peer, add_up, args=(1000,))
        rpc.rpc_sync(peer, torch.add, args=(torch.ones(2000), 1))
        calls += 2
        if calls % 20 == 0 and len(KEPT) < 40:
            KEPT.append(rpc.remote(peer, torch.ones, args=(100,)))
        time.sleep(0.005)
    return calls


def learn(peer: str) -> None:
    with autograd.context() as context:
        weight = torch.ones(3, requires_grad=True)
        autograd.backward(context, [rpc.rpc_sync(peer, torch.mul, args=(weight, 2)).sum()])


def ask_around(names: list[str], seconds: float) -> None:
    """Hold this worker's lock, and have the next worker do the same. With a name twice, they wait for each other."""
    with LOCK:
        rpc.rpc_sync(names[0], _ask_on, args=(names[1:], seconds), timeout=seconds)


def _ask_on(names: list[str], seconds: float) -> None:
    if names:
        ask_around(names, seconds)
    else:
        with LOCK:
            pass
