"""What `workers` has its processes do: prepare, join, leave."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing.forkserver
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from tests import leaks

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Assignment:
    """All that a worker process is told at its start."""

    rpc: str
    rank: int
    world_size: int
    init_method: str
    settings: dict[str, Any]
    output: str
    leak_timeout: float | None


_assignment: Assignment
_before_joining: leaks.Census | None = None


def prepare(assignment: Assignment) -> None:
    """The first thing that the process is told."""
    global _assignment
    _assignment = assignment
    _die_with_the_fork_server()
    _redirect_output(assignment.output)


def arrive() -> None:
    """Nothing: that it was run says that the process is up."""


def join() -> None:
    """Call `init_rpc` as the assignment says."""
    global _before_joining
    me = _assignment
    rpc = importlib.import_module(me.rpc)
    _before_joining = leaks.census()
    options = backend_options(rpc, me.init_method, me.settings)
    rpc.init_rpc(f"worker{me.rank}", rank=me.rank, world_size=me.world_size, rpc_backend_options=options)


def backend_options(rpc: Any, init_method: str, settings: dict[str, Any]) -> Any:
    """Remora's own options, or those of torch.distributed.rpc."""
    kind = getattr(rpc, "RemoraRpcBackendOptions", None) or rpc.TensorPipeRpcBackendOptions
    return kind(init_method=init_method, **settings)


def leave(graceful: bool) -> None:
    """Shut down, if this is still a worker, and check that nothing of the worker is left."""
    rpc = importlib.import_module(_assignment.rpc)
    if _is_worker(rpc):
        rpc.shutdown(graceful=graceful)
    if _assignment.leak_timeout is not None and _before_joining is not None:
        leaked = leaks.leaked_since(_before_joining, _assignment.leak_timeout)
        assert not leaked, f"after shutdown this worker still holds\n{leaked}\n{leaks.stacks(leaked)}"


def _is_worker(rpc: Any) -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _die_with_the_fork_server() -> None:
    """The fork server ends with the test run, however that ends; so do its children, whatever they are doing."""
    # It ends when nobody holds this pipe any more, and gives one end to each process it forks.
    server: Any = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
