"""Programs that end while they hold everything that Remora gives out: `python -m tests.processes.endings FOLDER`.

Like `tests.processes.programs`, by which they are forked. Rank 0 ends in one way or another, without a word to Remora;
rank 1 serves until then. Everything is held by this module, which the interpreter takes apart when it ends.
"""

from __future__ import annotations

import builtins
import contextvars
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from remora import autograd, rpc
from remora.nn.api.remote_module import RemoteModule
from remora.optim import DistributedOptimizer
from tests.processes import programs, targets
from tests.processes.programs import join

STUCK = programs.PATIENCE / 2  # seconds after which a process that has not ended says where it is

held: dict[str, Any] = {}
let_me = threading.Event()


class Cycle:
    """Collected by nobody but the garbage collector."""

    def __init__(self, what: object) -> None:
        self.what = what
        self.me = self


class ReleaseQueue:
    """Lets a reference go when it is destroyed itself, and makes another one."""

    def __init__(self, rref: rpc.RRef[Any], other: str) -> None:
        self.rref: rpc.RRef[Any] | None = rref
        self.other = other

    def __del__(self) -> None:
        self.rref = None
        try:
            rpc.rpc_async(self.other, targets.double, args=(1,))
            rpc.remote(self.other, targets.double, args=(1,))
            rpc.RRef([1])
            rpc.rpc_sync(self.other, targets.double, args=(1,))
        except BaseException:  # the interpreter is going down
            pass


def fail() -> None:
    raise ValueError("on purpose")


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def large() -> torch.Tensor:
    return torch.ones(1 << 18)


def results(rref: rpc.RRef[Any]) -> Iterator[Any]:
    """A generator in the midst of its work."""
    with autograd.context():
        while True:
            yield rref.to_here()


def hold(other: str) -> None:
    """One of each."""
    held["references"] = [rpc.remote(other, targets.double, args=(i,)) for i in range(20)]
    held["mine"] = rpc.RRef([1, 2])
    first = held["references"][0]
    held["proxies"] = [first.rpc_sync(), first.rpc_async(), first.remote(), first.rpc_async().bit_length]
    held["pending"] = rpc.rpc_async(other, targets.nap, args=(programs.NEVER_ENDS,), timeout=0)
    held["making"] = rpc.remote(other, targets.nap, args=(programs.NEVER_ENDS,), timeout=0)
    held["fetching"] = held["making"].to_here_async()
    held["following"] = held["pending"].then(lambda done: held["references"])
    held["done"] = rpc.rpc_async(other, large)
    held["done"].wait()
    held["large"] = rpc.rpc_sync(other, large)
    held["failed"] = rpc.rpc_async(other, fail)
    held["all"] = torch.futures.collect_all([held["pending"], held["done"]])
    held["module"] = RemoteModule(f"{other}/cpu", torch.nn.Linear, (2, 2))
    held["optimizer"] = DistributedOptimizer(torch.optim.SGD, [rpc.remote(other, parameter)], lr=0.1)
    held["open"] = results(first)
    contextvars.copy_context().run(next, held["open"])  # (which is in an autograd context there)
    held["cycle"] = Cycle([rpc.remote(other, targets.double, args=(1,)), held["module"]])
    held["dropping"] = [ReleaseQueue(rpc.remote(other, targets.double, args=(1,)), other) for _ in range(2)]
    held["dropping in a cycle"] = Cycle(ReleaseQueue(first, other))
    for last in (builtins, sys):  # which are taken apart after everything else
        last.held_to_the_end = {  # type: ignore[attr-defined]
            **held,
            "references": [rpc.remote(other, targets.double, args=(i,)) for i in range(20)],
            "pending": rpc.rpc_async(other, targets.nap, args=(programs.NEVER_ENDS,), timeout=0),
            "failed": rpc.rpc_async(other, fail),
            "large": rpc.rpc_sync(other, large),
        }


def start(rank: int, folder: Path) -> str:
    """Join, and hold everything. The name of the other worker."""
    other = join(rank, folder)
    if rank == 1:
        time.sleep(programs.NEVER_ENDS)  # it ends with the other one
    faulthandler.dump_traceback_later(STUCK)
    rpc.rpc_sync(other, end_with, args=(os.getpid(),))
    hold(other)
    return other


def end_with(pid: int) -> None:
    """End this process when that one has ended."""
    threading.Thread(target=_end_with, args=(os.pidfd_open(pid),), daemon=True).start()


def _end_with(process: int) -> None:
    select.select([process], [], [])
    os._exit(0)


def keep_calling(other: str) -> None:
    """What a daemon thread does until it is not there any more."""
    while True:
        rpc.rpc_sync(other, targets.double, args=(1,))
        rref = rpc.remote(other, targets.double, args=(1,))
        rref.to_here()
        rpc.rpc_async(other, large)
        let_me.set()


def ends_by_itself(rank: int, folder: Path) -> None:
    start(rank, folder)


def ends_with_an_error(rank: int, folder: Path) -> None:
    start(rank, folder)
    raise ZeroDivisionError("on purpose")


def ends_with_an_error_in_a_context(rank: int, folder: Path) -> None:
    other = start(rank, folder)
    with autograd.context():
        rref = rpc.remote(other, parameter)
        rpc.rpc_sync(other, fail)
        rref.to_here()


def ends_by_sys_exit(rank: int, folder: Path) -> None:
    start(rank, folder)
    sys.exit(3)


def ends_by_a_handler(rank: int, folder: Path) -> None:
    other = start(rank, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    rpc.rpc_sync(other, targets.nap, args=(programs.NEVER_ENDS,), timeout=0)


def ends_by_a_signal(rank: int, folder: Path) -> None:
    start(rank, folder)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(programs.NEVER_ENDS)


def ends_beside_threads(rank: int, folder: Path) -> None:
    """Daemon threads are in the midst of calls."""
    other = start(rank, folder)
    for _ in range(4):
        threading.Thread(target=keep_calling, args=(other,), daemon=True).start()
    assert let_me.wait(20.0)
    raise ZeroDivisionError("on purpose")


def ends_while_it_serves(rank: int, folder: Path) -> None:
    """Functions of others are running, and importing."""
    other = start(rank, folder)
    held["calling back"] = [rpc.rpc_async(other, call_back, args=("worker0",), timeout=0) for _ in range(2)]
    assert let_me.wait(20.0)
    raise ZeroDivisionError("on purpose")


def call_back(to: str) -> None:
    while True:
        rpc.rpc_sync(to, import_slowly)


def import_slowly() -> None:
    sys.modules.pop("this_takes_a_while", None)
    sys.path_importer_cache.clear()
    try:
        __import__("this_takes_a_while")
    except ImportError:
        pass
    let_me.set()


class SlowFinder:
    """An import that takes a while, as the first one of a large library does."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "this_takes_a_while":
            time.sleep(0.05)


sys.meta_path.append(SlowFinder)  # type: ignore[arg-type]


ENDINGS: dict[str, tuple[int, str]] = {  # how each of them ends: exit code, the last line that it prints
    "ends_by_itself": (0, ""),
    "ends_with_an_error": (1, "ZeroDivisionError: on purpose"),
    "ends_with_an_error_in_a_context": (1, "ValueError: on purpose"),
    "ends_by_sys_exit": (3, ""),
    "ends_by_a_handler": (4, ""),
    "ends_by_a_signal": (-signal.SIGTERM, ""),
    "ends_beside_threads": (1, "ZeroDivisionError: on purpose"),
    "ends_while_it_serves": (1, "ZeroDivisionError: on purpose"),
}


if __name__ == "__main__":
    torch.optim.SGD([parameter()], lr=0.1).step()  # which imports what takes long
    assert threading.active_count() == 1, "forking wants a process without threads"
    gc.freeze()  # or each child looks at all of torch once more when it ends
    programs.PROGRAMS = {name: globals()[name] for name in ENDINGS}
    programs.main(Path(sys.argv[1]))
