"""Many workers in one process, connected in memory: a world for tests.

    with World(3) as world:
        world.run(0, rpc.rpc_sync, "worker1", torch.add, args=(1, 2))

Inside `run`, and inside every function that a worker of the world runs, the functions of `remora.rpc` act for that worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from remora.agent.crew import act_for
from remora.options import Settings
from remora.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class World:
    """`n` workers, named worker0, worker1, … (and with ids 0, 1, …)."""

    def __init__(self, n: int, threads: int = 4, timeout: float = 60.0, **settings: Any) -> None:
        self.timeout = timeout
        store = HashStore()
        chosen = Settings(**{"transports": ["inproc"], **settings})

        def start(rank: int) -> Worker:
            return Worker(f"worker{rank}", rank, n, store, timeout, threads, chosen)

        with ThreadPoolExecutor(n) as pool:  # they wait for each other
            self.workers: list[Worker] = list(pool.map(start, range(n)))
        for worker in self.workers:
            worker.start()

    def __getitem__(self, i: int) -> Worker:
        return self.workers[i]

    def __len__(self) -> int:
        return len(self.workers)

    @contextmanager
    def acting(self, i: int) -> Iterator[Worker]:
        """Inside, the current thread acts for worker i."""
        before = act_for(self.workers[i])
        try:
            yield self.workers[i]
        finally:
            act_for(before)

    def run(self, i: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` as if it were part of worker i's program."""
        with self.acting(i):
            return function(*args, **kwargs)

    def kill(self, i: int) -> None:
        """End worker i without a word to the others, as if its process had been killed."""
        self.workers[i].agent.kill()

    def wait_until(self, ready: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait for a condition; AssertionError if it does not come true in time."""
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, f"{ready} did not come true within {timeout} s"
            time.sleep(0.001)

    def close(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
