"""Many workers in one process, connected in memory: a world for tests.

    with World(3) as world:
        world.run(0, rpc.rpc_sync, "worker1", torch.add, args=(1, 2))

Inside `run`, and inside every function that a worker of the world runs, the functions of `remora.rpc` act for that worker.
With `faults="drop PYTHON_CALL worker0->worker1 1"`, or by `world.faults.set(...)` at any time, things go wrong by plan; see
`remora.testing.faults`. Time is real, unless `clock="virtual"` or `clock="auto"` asks for a clock that stands still until it
is moved, or that skips all waiting: see `remora.testing.virtual_clock`.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from remora.agent.agent import Agent
from remora.agent.calls.blocking import wait_until
from remora.agent.runtime.current import set_current_worker
from remora.clock import SYSTEM
from remora.devices.maps import Wishes
from remora.faults.injector import Stage
from remora.faults.plan import Plan
from remora.options import check_timeout, fault_plan_of_environment
from remora.rpc import api
from remora.rpc.options import RemoraRpcBackendOptions
from remora.testing.stillness import Stillness
from remora.testing.virtual_clock import VirtualClock
from remora.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class World:
    """`n` workers, named worker0, worker1, … (and with ids 0, 1, …)."""

    def __init__(
        self,
        n: int,
        threads: int = 4,
        timeout: float = 60.0,
        faults: Plan | str | None = None,
        seed: int | None = None,
        clock: Literal["system", "virtual", "auto"] = "system",
        devices: Callable[[int], Wishes] | None = None,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)  # for tests that need chance; the plan uses the same seed
        self._seed = seed
        self._stage: Stage | None = None
        self._actors: Counter[threading.Thread] = Counter()  # threads that run a worker's program, and how often
        self._starting: set[int] = set()  # workers whose part is about to be run
        self._clock = _make_clock(clock)
        plan = fault_plan_of_environment() if faults is None else faults
        parsed = Plan.parse(plan) if isinstance(plan, str) else plan  # before anything is started that would have to end
        names = {"num_worker_threads": threads, "rpc_timeout": timeout, "transports": ["inproc"]}
        chosen = RemoraRpcBackendOptions(**{**names, **options})
        self.timeout, threads = chosen.rpc_timeout, chosen.num_worker_threads
        settings = replace(chosen.settings, faults="", clock=self._clock or SYSTEM)  # (the plan is the world's)
        wishes = [Wishes(chosen.device_maps) if devices is None else devices(rank) for rank in range(n)]
        store = HashStore()

        def start(rank: int) -> Worker:
            return Worker(f"worker{rank}", rank, n, store, self.timeout, threads, settings, api.CALLS, wishes[rank])

        with ThreadPoolExecutor(n) as pool:  # they wait for each other
            self.workers: list[Worker] = list(pool.map(start, range(n)))
        _worlds.add(self)
        if self._clock is not None:
            self._clock.still = Stillness(self.agents, lambda: self._stage, self._count_actors)
        if parsed is not None:
            self._stage = self._make_stage(self.workers)  # from the first link on
        for worker in self.workers:
            worker.start(greet=False)  # they start one after the other
        if parsed is not None:
            self.set_faults(parsed)

    @property
    def faults(self) -> Stage:
        """Return the fault plan of this world: `set` another, `heal`, `report` what it did, count the `messages`."""
        if self._stage is None:
            self._stage = self._make_stage([worker for worker in self.workers if worker.agent.running])
        return self._stage

    def _make_stage(self, workers: list[Worker]) -> Stage:
        stage = Stage("world", shared=True, clock=self._clock or SYSTEM, seed=self._seed)
        for worker in workers:
            worker.agent.inject(stage.join(worker.get_worker_info().name, worker.kill))
        return stage

    @property
    def clock(self) -> VirtualClock:
        """Return the virtual clock of this world: `advance` it, ask for the time with `now`."""
        if self._clock is None:
            raise RuntimeError('this world uses the system clock: make it with clock="virtual" or clock="auto"')
        return self._clock

    def agents(self) -> list[Agent]:
        """Return the agents of the living workers."""
        return [worker.agent for worker in self.workers if worker.agent.running]

    def _count_actors(self, asleep: set[threading.Thread]) -> int:
        """Return the number of threads that run a part of a worker's program, or are about to, without those that sleep."""
        return len(self._starting) + len(set(self._actors) - asleep)

    def set_faults(self, plan: Plan | str) -> None:
        """Follow a plan from now on, with the seed of this world if it has one."""
        self.faults.set(plan)

    @property
    def has_faults(self) -> bool:
        """Return True if the world ever had a plan. (Reading `faults` gives it one.)"""
        return self._stage is not None

    def __getitem__(self, i: int) -> Worker:
        return self.workers[i]

    def __len__(self) -> int:
        return len(self.workers)

    @contextmanager
    def acting(self, i: int) -> Iterator[Worker]:
        """Let the current thread act for worker i inside the block."""
        before, thread = set_current_worker(self.workers[i]), threading.current_thread()
        self._actors[thread] += 1  # (each thread counts for itself alone)
        try:
            yield self.workers[i]
        finally:
            set_current_worker(before)
            self._actors[thread] -= 1
            if not self._actors[thread]:
                del self._actors[thread]

    def run(self, i: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` as if it were part of worker i's program."""
        with self.acting(i):
            return function(*args, **kwargs)

    def run_all(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call it for every living worker, at the same time; return the values in order. Raise the first error at the
        end."""

        def run(i: int) -> R:
            with self.acting(i):
                self._starting.discard(i)
                return function(*args, **kwargs)

        living = [i for i, worker in enumerate(self.workers) if worker.agent.running]
        self._starting.update(living)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            pending = [pool.submit(run, i) for i in living]
        return [each.result() for each in pending]

    def unrest(self) -> list[str]:
        """Return what is still under way on the living workers, in words: calls, requests, references. Empty when all is
        done."""
        return [
            f"{worker.get_worker_info().name}: {what} {n}"
            for worker in self.workers
            if worker.agent.running
            for what, n in _under_way(worker).items()
            if n
        ]

    def shutdown(self, timeout: float = 0.0) -> None:
        """Make all living workers shut down together, gracefully. Raise what one of them raises. A virtual clock runs by
        itself meanwhile, because no thread could move it."""
        with nullcontext() if self._clock is None else self._clock.going():
            self.run_all(api.shutdown, timeout=timeout)

    def kill(self, i: int) -> None:
        """End worker i without a message to the others, as if its process had been killed."""
        self.workers[i].kill()

    def wait_until(self, ready: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait for a condition; AssertionError if it does not come true in time: real time, unless it passes by itself."""
        timeout = check_timeout(timeout, "the timeout of wait_until")
        clock = self._clock if self._clock is not None and self._clock.auto else SYSTEM

        def look() -> bool:
            if self._clock is not None and not self._clock.auto:
                self._clock.have_read()
            return ready()

        came_true = wait_until(look, clock.now() + timeout, clock, pause=0.001)
        assert came_true, f"{ready} did not come true within {timeout} s"

    def close(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def world_of(worker: Worker) -> World | None:
    """Return the world of a worker; None if it belongs to none."""
    return next((world for world in list(_worlds) if worker in world.workers), None)


def _make_clock(kind: str) -> VirtualClock | None:
    if kind not in ("system", "virtual", "auto"):
        raise ValueError(f'clock must be "system", "virtual" or "auto", got {kind!r}')
    return None if kind == "system" else VirtualClock(auto=kind == "auto")


def _under_way(worker: Worker) -> dict[str, int]:
    table = worker.references.table.counts()
    held = len(worker.references.table.snapshot().held)
    return {
        "calls": worker.agent.peers.active_calls(),
        "requests": worker.agent.dispatch.counts(),
        "references held": held,
        "values held by others": table["num_owner_rrefs"],
        "control messages": table["num_pending_futures"],
        "contexts": worker.autograd.counts()["num_autograd_contexts"],
    }
