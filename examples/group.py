"""Starts the worker processes of an example on this machine, and ends them whatever happens.

    with group("trainer", "stage1", "stage2"):
        rpc.rpc_sync("stage1", ...)

The first name is this process; the others are processes of their own, which serve until the block ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from remora import rpc

END_TIMEOUT = 30.0
PRELOADED = ["torch._dynamo", "remora.rpc", "remora.optim", "remora.nn"]  # torch's optimizers want the first

if sys.platform == "win32":
    _processes = multiprocessing.get_context("spawn")
else:
    _processes = multiprocessing.get_context("forkserver")  # loads torch once, for all of them


@contextmanager
def group(me: str, *others: str) -> Iterator[None]:
    """Be worker `me` of a group with `others` inside."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # so the others call the script that started them
    _processes.set_forkserver_preload(PRELOADED)
    names = [me, *others]
    with tempfile.TemporaryDirectory(prefix="remora-example-") as folder:
        started = [
            _processes.Process(target=_serve, args=(names, rank, folder), daemon=True) for rank in range(1, len(names))
        ]
        try:
            for process in started:
                process.start()
            _join(names, 0, folder)
            yield
            rpc.shutdown()
            for process in started:
                process.join(END_TIMEOUT)
        finally:
            _end(started)


def _serve(names: list[str], rank: int, folder: str) -> None:
    """What every other worker does: answer calls until all agree that it is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends this one
    _join(names, rank, folder)
    rpc.shutdown()


def _join(names: list[str], rank: int, folder: str) -> None:
    torch.set_num_threads(1)  # there are more workers than cores; threads would only get into each other's way
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting")
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)


def _end(started: Sequence[multiprocessing.process.BaseProcess]) -> None:
    if rpc._is_current_rpc_agent_set():  # an error came before shutdown
        rpc.shutdown(graceful=False)
    for process in started:
        if process.pid is not None:
            process.kill()
            process.join()
