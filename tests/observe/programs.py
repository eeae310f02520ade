"""What workers run in the tests of traces, dumps and exports."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

from remora import observe, rpc
from remora.errors import CallTimeout

SKEW = 1.0


def inner(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.ones(4, 4).mm(torch.ones(4, 4)).sum()


def outer(seconds: float) -> torch.Tensor:
    """On worker1: calls worker2, several times at once and then once more."""
    futures = [rpc.rpc_async("worker2", inner, args=(seconds,)) for _ in range(3)]
    last = rpc.rpc_sync("worker2", inner, args=(seconds,))
    return sum((future.wait() for future in futures), last)


def call_nested(times: int, seconds: float) -> None:
    for _ in range(times):
        rpc.rpc_sync("worker1", outer, args=(seconds,))


_stop = threading.Event()
_calling: list[threading.Thread] = []


def keep_calling() -> None:
    """Call from now on, on a thread of its own, until `stop_calling`."""

    def run() -> None:
        while not _stop.is_set():
            call_nested(1, 0.001)

    _calling.append(threading.Thread(target=run))
    _calling[0].start()


def stop_calling() -> None:
    _stop.set()
    _calling.pop().join()


_wall_clock = time.time


def set_clock_ahead(seconds: float) -> None:
    """The wall clock of this process is wrong from now on."""
    time.time = lambda: _wall_clock() + seconds


def trace_of_nested_calls(path: str) -> None:
    with observe.trace(path):
        call_nested(5, 0.001)


def profile_of_nested_calls(path: str) -> None:
    with observe.profile_group(path, steps=2) as profile:
        for _ in range(4):
            call_nested(1, 0.001)
            profile.step()
            assert os.path.exists(path) == (profile._steps_left is not None and profile._steps_left <= 0)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def call_and_lose(name: str) -> str:
    try:
        rpc.rpc_sync(name, sleep, args=(60,))
    except Exception as error:
        return type(error).__name__
    return ""


def let_a_call_time_out(name: str) -> None:
    try:
        rpc.rpc_sync(name, sleep, args=(2,), timeout=0.2)
    except CallTimeout:
        pass


def send_signal_to_self() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def one_of_two(rank: int, folder: str, dumps: str) -> None:
    """A program of two workers, in which worker1 fails, and worker0 waits for it."""
    options = rpc.RemoraRpcBackendOptions(init_method=f"file://{folder}/meeting", dump_folder=dumps)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        if rpc.rpc_sync("worker0", len, args=("abc",)) == 3:
            raise ValueError("there is no batch 17")
    else:
        rpc.rpc_sync("worker1", sleep, args=(60,))
