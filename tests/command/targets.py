"""What workers run in the tests of the command. By name on each worker: this file is imported there."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from remora import rpc

lock = threading.Lock()
let_go = threading.Event()
leaked: list[Any] = []


def around(n: int, last: int) -> str:
    """Call the next worker, until the last one calls back to worker0, where the lock is held by what began."""
    if n == last:
        return rpc.rpc_sync("worker0", take_lock, timeout=0)
    return rpc.rpc_sync(f"worker{n + 1}", around, args=(n + 1, last), timeout=0)


def begin_cycle(last: int) -> str:
    with lock:
        return around(0, last)


def take_lock() -> str:
    with lock:
        return "never, while the cycle lasts"


def call_on_the_loop() -> None:
    rpc.rpc_sync("worker0", block_the_loop, timeout=0)


async def block_the_loop() -> None:
    """Make a call that blocks in a coroutine. It comes back to a coroutine of the same event loop."""
    rpc.rpc_sync("worker1", call_back, timeout=0)


def call_back() -> None:
    rpc.rpc_sync("worker0", do_nothing, timeout=0)


async def do_nothing() -> None:
    pass


def hold_lock() -> None:
    """Hold the lock until told otherwise."""
    with lock:
        let_go.wait()


def release() -> None:
    let_go.set()


def wait_for(worker: str, name: str) -> None:
    """Call a function of this module on another worker."""
    rpc.rpc_sync(worker, globals()[name], timeout=0)


def meet() -> None:
    """Come to a barrier of all workers."""
    rpc._all_gather(None, timeout=0)


def hold_interpreter(seconds: int) -> None:
    """Sleep in C code without giving the interpreter away."""
    ctypes.PyDLL(None).sleep(seconds)


def make_thing(n: int) -> list[int]:
    return [n]


def leak(worker: str, count: int) -> int:
    """Make values on another worker, and keep references to them for ever."""
    leaked.extend(rpc.remote(worker, make_thing, args=(n,)) for n in range(count))
    leaked[-1].to_here()
    return len(leaked)


def forget() -> None:
    leaked.clear()


def many_calls(worker: str, count: int) -> None:
    for n in range(count):
        rpc.rpc_sync(worker, make_thing, args=(n,))


def nap(seconds: float) -> None:
    time.sleep(seconds)
