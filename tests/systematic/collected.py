"""Destructors that use Remora, run at every line of it: `python -m tests.systematic.collected FOLDER PREFIX…`.

The garbage collector may run a destructor of the program wherever an object is made, so also where one of our locks is
held. Here what such a destructor does happens at each line, on whichever thread comes there first. One process for each
verb, forked: importing torch takes long, and one that is stuck has to be killed. What it found goes to a file.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from remora import rpc
from remora.agent.calls import blocking
from remora.agent.calls import call as calls
from remora.agent.runtime.current import current_worker
from remora.errors import CallOutcomeUnknown, CallTimeout
from remora.rref.ref_table import Table
from remora.testing.world import World
from remora.transport import link as stream
from tests.eventually import eventually
from tests.systematic.tracing import MAKING, AtEachPlace, Place
from tests.thorough import THOROUGH

STUCK = 25.0  # seconds after which a process is
LONGEST = 15.0 if THOROUGH else 1.2  # seconds for which places are looked for
WAIT = 10.0  # seconds for a wait of a destructor, which ends at once or
SOON = 0.05  # after so many seconds, if its own thread keeps the answer from coming
AT_ONCE = 2  # processes
LARGE = torch.ones(1 << 16)
# A lock is held here over one system call, which makes nothing that the collector counts. A wait here would not end.
WAITING = ("sync", "fetch", "share_sync")
ONE_SYSTEM_CALL = ("EpollPoller._modify", "EpollPoller.add", "EpollPoller.remove")


def double(x: int) -> int:
    return 2 * x


def size(tensor: torch.Tensor) -> int:
    return tensor.numel()


def length_of(rrefs: list[rpc.RRef[Any]]) -> int:
    """References of others, handed on and fetched."""
    return sum(rref.to_here() for rref in rrefs)


def keep_and_return(rref: rpc.RRef[Any]) -> rpc.RRef[Any]:
    return rref


def echo(value: Any) -> Any:
    return value


class Destructor:
    """What a destructor of the program does, and what came of it."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.references: list[rpc.RRef[Any]] = []
        self.futures: list[tuple[Any, int]] = []
        self.to_drop: list[rpc.RRef[Any]] = []
        self.armed: World | None = None
        self.count = 0
        self.refused = 0  # waits that were told at once that they cannot end
        self.errors: list[str] = []

    def __call__(self, place: Place) -> None:
        if self.armed is None or (self.verb in WAITING and place.function in ONE_SYSTEM_CALL):
            return
        self.count += 1
        try:
            with self.armed.acting(0) if current_worker() is None else nullcontext():  # (the thread of the timers)
                VERBS[self.verb](self)
        except BaseException:  # as after any destructor, the program goes on
            self.errors.append(f"at {place}: {traceback.format_exc()}")

    def remote(self) -> None:
        self.references.append(rpc.remote(f"worker{self.count % 2}", double, args=(2,)))

    def call(self) -> None:
        self.futures.append((rpc.rpc_async(f"worker{self.count % 2}", double, args=(2,)), 4))

    def call_large(self) -> None:
        self.futures.append((rpc.rpc_async(f"worker{self.count % 2}", size, args=(LARGE,)), LARGE.numel()))

    def drop(self) -> None:
        if self.to_drop:
            self.to_drop.pop()

    def own(self) -> None:
        mine = rpc.RRef([1])
        assert mine.to_here() == [1]
        rpc._rref_context_get_debug_info()
        str(rpc.references())

    def share(self) -> None:
        mine = rpc.RRef(3)
        self.futures.append((rpc.rpc_async(f"worker{self.count % 2}", length_of, args=([mine],)), 3))

    def sync(self) -> None:
        for to in self.some_workers():
            self.wait_for(partial(rpc.rpc_sync, to, double, args=(2,), timeout=WAIT))

    def share_sync(self) -> None:
        mine = rpc.RRef(4)
        for to in self.some_workers():
            self.wait_for(partial(rpc.rpc_sync, to, length_of, args=([mine],), timeout=WAIT))

    def fetch(self) -> None:
        for to in self.some_workers():
            self.wait_for(lambda to=to: rpc.remote(to, double, args=(2,)).to_here(timeout=WAIT))

    def some_workers(self) -> list[str]:
        """All three, in changing order."""
        return [f"worker{(self.count + i) % 3}" for i in range(3)]

    def wait_for(self, wait: Callable[[], object]) -> None:
        """Its answer is 4, or it hears at once that it cannot have one there."""
        try:
            assert wait() == 4
        except CallTimeout:
            raise
        except CallOutcomeUnknown:
            self.refused += 1

    def check(self) -> None:
        """All of it was done, and done right."""
        for rref in self.references:
            assert rref.to_here() == 4
        for future, value in self.futures:
            assert future.wait() == value
        self.references.clear()
        self.futures.clear()


VERBS: dict[str, Callable[[Destructor], None]] = {
    "remote": Destructor.remote,
    "call": Destructor.call,
    "call_large": Destructor.call_large,
    "drop": Destructor.drop,
    "own": Destructor.own,
    "share": Destructor.share,
    "sync": Destructor.sync,
    "fetch": Destructor.fetch,
    "share_sync": Destructor.share_sync,
}


def work() -> None:
    """Everything that takes a lock, or may."""
    for other in ("worker0", "worker1", "worker2"):
        assert rpc.rpc_sync(other, double, args=(1,)) == 2
        assert rpc.rpc_sync(other, size, args=(LARGE,)) == LARGE.numel()
        assert rpc.rpc_sync(other, echo, args=(LARGE,)).numel() == LARGE.numel()
        futures = [rpc.rpc_async(other, double, args=(i,)) for i in range(5)]
        assert torch.futures.wait_all(futures) == [0, 2, 4, 6, 8]
        rrefs = [rpc.remote(other, double, args=(i,)) for i in range(12)]
        assert rrefs[3].to_here() == 6
        assert rpc.rpc_sync("worker1", length_of, args=(rrefs,)) == 132
        assert rpc.rpc_sync("worker2", keep_and_return, args=(rrefs[5],)).to_here() == 10
        mine = rpc.RRef(7)
        assert rpc.rpc_sync(other, length_of, args=([mine, mine],)) == 14
        failed = rpc.remote(other, divide, args=(1, 0))
        with_error(failed)
        rrefs[0].rpc_sync().bit_length()
        rrefs.clear()


def divide(x: int, y: int) -> float:
    return x / y


def with_error(rref: rpc.RRef[Any]) -> None:
    try:
        rref.to_here()
    except ZeroDivisionError:
        return
    raise AssertionError("no error")


def left(table: Table) -> object:
    return table.counts(), dict(list(table.state.holder.forks.items())[:3]), dict(list(table.state.owner.values.items())[:3])


def nothing_left(world: World) -> bool:
    gc.collect()
    tables = [world[i].references.table for i in range(3)]
    return all(set(table.counts().values()) == {0} and not table.state.holder.forks for table in tables)


def run(verb: str, prefixes: tuple[str, ...], report: Any) -> None:
    blocking.GIVEN_UP_AFTER = calls.GIVEN_UP_AFTER = stream.BLOCK_LIMIT = SOON  # type: ignore[attr-defined]
    destructor = Destructor(verb)
    strike = AtEachPlace(destructor, MAKING, threads=True, where=prefixes)

    def watch() -> None:
        time.sleep(STUCK - 1.0)
        print(f"stuck at {strike.now}", file=report, flush=True)

    threading.Thread(target=watch, daemon=True).start()
    with strike, World(3) as world, world.acting(0):
        work()  # so that there are links
        if verb == "drop":
            destructor.to_drop = [rpc.remote(f"worker{i % 3}", double, args=(2,)) for i in range(800)]
        strike.struck.clear()
        destructor.armed = world
        before, end = -5, time.monotonic() + LONGEST
        while destructor.count > before + 4 and time.monotonic() < end:
            before = destructor.count  # while a destructor waits, others pass by places where none was run yet
            work()
        destructor.armed = None
        assert not destructor.errors, f"{len(destructor.errors)} errors:\n" + "\n".join(destructor.errors)
        assert destructor.count > (30 if verb in WAITING and not THOROUGH else 100), destructor.count
        work()
        destructor.check()
        destructor.to_drop.clear()
        eventually(lambda: nothing_left(world), 15.0, what=lambda: [left(world[i].references.table) for i in range(3)])
    print(f"done at {destructor.count} places", file=report)


def main(folder: Path, prefixes: tuple[str, ...]) -> None:
    children: set[int] = set()
    for verb in VERBS:
        if len(children) == AT_ONCE:
            children.discard(os.wait()[0])
        pid = os.fork()
        if not pid:
            code = 1
            with open(folder / verb, "w") as report:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors of functions are printed there
                faulthandler.dump_traceback_later(STUCK, exit=True, file=report)
                try:
                    run(verb, prefixes, report)
                    code = 0
                except BaseException:
                    traceback.print_exc(file=report)
            os._exit(code)
        children.add(pid)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    gc.freeze()
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or ("",))
