"""Whole programs, as people write them: run as `python -m tests.processes.programs FOLDER`, it forks each pair of them.

Forked rather than started, because importing torch takes seconds; but they end as programs end, through the
interpreter's own exit, with `atexit` and all. What they print goes to files, and how they ended to `outcomes.json`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora import rpc
from tests.eventually import eventually
from tests.processes import targets

# Nothing that a program must not wait for ends by itself: no function that sleeps, no time limit of Remora's. So a program
# that waits for it is killed, and one that does not ends soon, however slow the machine is.
NEVER_ENDS = 600.0  # seconds
PATIENCE = 100.0  # for a program that should end by itself
LIMITS = dict.fromkeys(("connect_timeout", "reconnect_timeout", "silence_limit", "rpc_timeout"), NEVER_ENDS)
READY = "ready"
RUNNING = 1000
TOGETHER = 7


def join(rank: int, folder: Path, world_size: int = 2) -> str:
    """Start this program's worker; the name of the other."""
    options = rpc.RemoraRpcBackendOptions(init_method=f"file://{folder}/rendezvous", **LIMITS)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return f"worker{1 - rank}"


def talk(other: str) -> None:
    for i in range(20):
        assert rpc.rpc_sync(other, targets.double, args=(i,)) == 2 * i
        assert rpc.rpc_async(other, targets.double, args=(i,)).wait() == 2 * i


def leave_gracefully(rank: int, folder: Path) -> None:
    talk(join(rank, folder))
    rpc.shutdown()


def leave_at_exit(rank: int, folder: Path) -> None:
    atexit.register(rpc.shutdown)
    talk(join(rank, folder))


def leave_at_once(rank: int, folder: Path) -> None:
    talk(join(rank, folder))
    rpc.api._barrier({"worker0", "worker1"})
    rpc.shutdown(graceful=False)


def forget_to_leave(rank: int, folder: Path) -> None:
    talk(join(rank, folder))
    rpc.api._barrier({"worker0", "worker1"})


def serve_at_exit(rank: int, folder: Path) -> None:
    """One is passive and serves from its `atexit` handler, where no thread can be started any more."""
    atexit.register(rpc.shutdown)
    other = join(rank, folder)
    if rank == 0:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert rpc.rpc_sync(other, relay, args=("worker0",)) == 4


def relay(to: str) -> int:
    return int(rpc.rpc_sync(to, targets.double, args=(2,)))


def use_coroutines(rank: int, folder: Path) -> None:
    async def triple(x: int) -> int:
        return 3 * x

    other = join(rank, folder)
    assert rpc.rpc_sync(other, triple, args=(2,)) == 6
    rpc.shutdown()


def leave_a_call_unanswered(rank: int, folder: Path) -> None:
    """The function still runs when its worker leaves at once."""
    other = join(rank, folder)
    if rank == 0:
        rpc.rpc_async(other, targets.nap, args=(NEVER_ENDS,)).add_done_callback(lambda done: done.exception())  # type: ignore[attr-defined]
        rpc.rpc_sync(other, targets.double, args=(1,))
    rpc.api._barrier({"worker0", "worker1"})
    rpc.shutdown(graceful=False)


# Rank 0 of each of these is interrupted where it says that it is ready; rank 1 is left to find out.


def passive(other: str) -> None:
    try:
        rpc.shutdown()
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")


def interrupted_in_rpc_sync(rank: int, folder: Path) -> None:
    other = join(rank, folder)
    if rank == 0:
        print(READY, flush=True)
        rpc.rpc_sync(other, targets.nap, args=(1.0,), timeout=0)
        rpc.rpc_sync(other, targets.nap, args=(NEVER_ENDS,), timeout=0)
    passive(other)


def interrupted_in_wait(rank: int, folder: Path) -> None:
    other = join(rank, folder)
    if rank == 0:
        future = rpc.rpc_async(other, targets.nap, args=(NEVER_ENDS,), timeout=0)
        print(READY, flush=True)
        future.wait()
    passive(other)


def interrupted_in_then(rank: int, folder: Path) -> None:
    other = join(rank, folder)
    if rank == 0:
        future = rpc.rpc_async(other, targets.nap, args=(NEVER_ENDS,), timeout=0).then(lambda done: done.value())
        print(READY, flush=True)
        future.wait()
    passive(other)


def interrupted_in_shutdown(rank: int, folder: Path) -> None:
    other = join(rank, folder)
    if rank == 0:
        print(READY, flush=True)
        rpc.shutdown()
    else:
        try:
            while True:
                rpc.rpc_sync(other, targets.double, args=(1,))
                time.sleep(0.01)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}")


def interrupted_in_init_rpc(rank: int, folder: Path) -> None:
    if rank == 0:
        print(READY, flush=True)
        join(rank, folder, world_size=3)


def interrupted_with_care(rank: int, folder: Path) -> None:
    """A program that cleans up after itself."""
    other = join(rank, folder)
    if rank == 0:
        try:
            print(READY, flush=True)
            rpc.rpc_sync(other, targets.nap, args=(NEVER_ENDS,), timeout=0)
        except KeyboardInterrupt:
            assert rpc.rpc_sync(other, targets.double, args=(2,)) == 4, "the worker is still in order"
        finally:
            rpc.shutdown(graceful=False)
    else:
        passive(other)


Program = Callable[[int, Path], None]
PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        leave_gracefully, leave_at_exit, leave_at_once, forget_to_leave, serve_at_exit, use_coroutines,
        leave_a_call_unanswered, interrupted_in_rpc_sync, interrupted_in_wait, interrupted_in_then,
        interrupted_in_shutdown, interrupted_in_init_rpc, interrupted_with_care,
    )
}  # fmt: skip


def fork(name: str, rank: int, folder: Path) -> int:
    """The process id in the parent; the child does not return, but goes on to the end of its program."""
    pid = os.fork()
    if pid:
        return pid
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{stream}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    PROGRAMS[name](rank, folder)
    print("done")
    sys.exit(0)


class Pair:
    """The two processes of one program."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self.name, self.folder = name, folder
        self.start = time.monotonic()  # or the interruption
        self.pids = [fork(name, rank, folder) for rank in (0, 1)]
        self.codes: list[int | None] = [RUNNING, RUNNING]

    def await_ready(self) -> None:
        out = self.folder / "out0"  # which the process itself makes
        eventually(lambda: out.exists() and READY in out.read_text())

    def interrupt(self) -> None:
        os.kill(self.pids[0], signal.SIGINT)
        self.start = time.monotonic()

    def look(self) -> bool:
        """Take note of those that have ended. Whether both have."""
        for i, pid in enumerate(self.pids):
            if self.codes[i] == RUNNING:
                self.codes[i] = self._look(pid)
        return RUNNING not in self.codes

    def kill(self) -> None:
        """Those that have not ended, if something else went wrong."""
        for pid, code in zip(self.pids, self.codes, strict=True):
            if code == RUNNING:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _look(self, pid: int) -> int | None:
        """Its exit code; None if it had to be killed."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() < self.start + PATIENCE:
            return RUNNING
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None


def run_together(names: list[str], folder: Path) -> dict[str, Any]:
    pairs = [Pair(name, folder / name) for name in names]
    try:
        return await_ends(pairs)
    finally:
        for pair in pairs:
            pair.kill()


def await_ends(pairs: list[Pair]) -> dict[str, Any]:
    to_interrupt = [pair for pair in pairs if pair.name.startswith("interrupted")]
    for pair in to_interrupt:
        pair.await_ready()
    time.sleep(0.3 if to_interrupt else 0.0)  # let them get where they wait; where exactly does not matter
    for pair in to_interrupt:
        pair.interrupt()
    while sum(pair.look() for pair in pairs) < len(pairs):
        time.sleep(0.01)
    return {pair.name: pair.codes for pair in pairs}


def main(folder: Path) -> None:
    """Not all at the same time: that many processes would only be in each other's way."""
    outcomes: dict[str, Any] = {}
    names = list(PROGRAMS)
    for first in range(0, len(names), TOGETHER):
        outcomes |= run_together(names[first : first + TOGETHER], folder)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    assert threading.active_count() == 1, "forking wants a process without threads"
    gc.freeze()  # or each child looks at all of torch once more when it ends
    main(Path(sys.argv[1]))
