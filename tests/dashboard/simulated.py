"""A made-up group: many workers with calls, waits, references, links, passes and trouble, at any moment of its time.

It answers as `GroupObserver` does. The same seed and time give the same snapshot, so screenshots stay alike.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from remora.errors import RemoraError
from remora.observer.model import (
    CallKey,
    CallStatus,
    Event,
    EventKind,
    GroupSnapshot,
    HeldReference,
    Histogram,
    LinkStatus,
    Memory,
    Missing,
    OwnedReference,
    PassStatus,
    Pool,
    Query,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)

FUNCTIONS = ("model.forward", "model.embed", "optim.step", "data.next_batch", "metrics.report", "torch.add")
LOAD = (40.0, 90.0, 12.0, 60.0, 4.0, 150.0)  # calls of each a second, of each worker
TAKES = (0.004, 0.0008, 0.03, 0.01, 0.002, 0.00005)  # seconds, the median
MAIN, POOL, LOCKED, SERVING = 1000, 1001, 1002, 1003
STACK_OF_CALL = (
    "train.py:88 main",
    "train.py:41 step",
    "remora/rpc/api.py:120 rpc_sync",
    "remora/agent/calls/future.py:80 wait",
)
STACK_OF_POOL = (
    "threading.py:1002 _bootstrap",
    "remora/agent/runtime/pool.py:201 run",
    "remora/agent/runtime/leader_followers.py:90 wait",
)
STACK_OF_WORK = (
    "threading.py:1002 _bootstrap",
    "remora/agent/runtime/pool.py:201 run",
    "remora/agent/serving/execution.py:77 run",
)


class SimulatedGroup:
    """`n` workers. Change `cycle`, `dead`, `silent`, `error` or `names` at any time."""

    def __init__(
        self, n: int = 8, *, seed: int = 1, clock: Callable[[], float] = time.time, cycle: bool = True
    ) -> None:
        self.names = [f"worker{rank}" for rank in range(n)]
        self.cycle = cycle
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.error: str | None = None
        self.asked = 0
        self.queries: list[Query] = []
        self._seed = seed
        self._clock = clock
        self.begun = clock() - 400.0

    def snapshot(self, query: Query = Query(), timeout: float = 2.0) -> GroupSnapshot:
        self.asked += 1
        self.queries.append(query)
        if self.error is not None:
            raise RemoraError(self.error)
        now = self._clock()
        alive = [rank for rank, name in enumerate(self.names) if name not in self.dead | self.silent]
        workers = tuple(self._worker(rank, now, query) for rank in alive)
        return GroupSnapshot(
            group="training",
            time=now,
            workers=workers,
            missing=tuple(self._missing()),
            clock_offsets={each.name: 0.0 for each in workers},
            clock_errors={each.name: 0.001 for each in workers},
        )

    def close(self) -> None: ...

    def _missing(self) -> Iterator[Missing]:
        for rank, name in enumerate(self.names):
            if name in self.dead:
                yield Missing(
                    name=name, rank=rank, state="dead", reason="its process was ended by SIGKILL", pid=4000 + rank
                )
            elif name in self.silent:
                stacks = 'Thread 0x1 (most recent call first):\n  File "kernel.py", line 12 in spin\n'
                yield Missing(
                    name=name, rank=rank, state="silent", reason="it did not answer within 1 s", stacks=stacks
                )

    def _worker(self, rank: int, now: float, query: Query) -> WorkerSnapshot:
        up = now - self.begun
        chance = random.Random(self._seed * 1000 + rank)
        speed = (0.6 + 0.8 * chance.random()) * (1.0 + 0.35 * math.sin(up / 9 + rank))
        served = int(sum(LOAD) * (0.6 + 0.8 * chance.random()) * (up - 3.0 * math.cos(up / 9 + rank)))
        running = min(int(4 * speed), 15)
        parts = {
            "calls": self._calls, "waits": self._waits, "owned": self._owned, "held": self._held, "passes": self._passes,
            "links": self._links, "events": self._events, "histograms": self._histograms, "threads": self._threads,
        }  # fmt: skip
        found = {name: tuple(make(rank, now, query)) for name, make in parts.items() if name in query.parts}
        if "events" in found:
            found["events"] = tuple(sorted(found["events"], key=lambda each: each.time))
        return WorkerSnapshot(
            name=self.names[rank],
            rank=rank,
            group="training",
            incarnation=f"{rank}",
            pid=4000 + rank,
            host=f"node{rank // 8}",
            time=now,
            up=up,
            versions={"remora": "0.9", "torch": "2.13", "python": "3.11"},
            program="train.py --lr 0.1",
            cpu=up * (0.3 + 0.5 * chance.random()),
            calls_made=served,
            calls_served=served,
            calls_failed=int(up / 20),
            memory=Memory(
                resident=int((420 + 60 * chance.random() + up * 0.05 * (rank == 3)) * 2**20), shared_own=64 << 20
            ),
            pool=Pool(limit=16, threads=8, running=running, queued=max(int(6 * speed) - 6, 0)),
            left_out={
                name: len(entries) - query.limit for name, entries in found.items() if len(entries) > query.limit
            },
            **{name: entries[-query.limit :] for name, entries in found.items()},  # type: ignore[arg-type]
        )

    def _others(self, rank: int, count: int) -> list[int]:
        return [(rank + step) % len(self.names) for step in range(1, count + 1) if step < len(self.names)]

    # Calls: a few short ones, and in the first three workers a cycle.

    def _ring(self, rank: int) -> int | None:
        """The next worker of the cycle, for those that are in it."""
        size = min(3, len(self.names))
        return (rank + 1) % size if self.cycle and rank < size else None

    def _stuck(self, rank: int, now: float, stage: Stage, thread: int) -> CallStatus:
        """The call of the cycle that this worker makes."""
        callee = self._ring(rank)
        assert callee is not None
        before = (rank - 1) % min(3, len(self.names))
        return CallStatus(
            key=CallKey(caller=self.names[rank], id=77),
            callee=self.names[callee],
            function="locks.acquire_all",
            kind="PYTHON_CALL",
            stage=stage,
            age=12.0 + (now - self.begun) % 1000 + rank,
            left=48.0,
            bytes=312,
            thread=thread,
            parent=CallKey(caller=self.names[before], id=77),
        )

    def _calls(self, rank: int, now: float, query: Query) -> Iterator[CallStatus]:
        if self._ring(rank) is not None:
            yield self._stuck(rank, now, Stage.BEGUN, SERVING)
            yield self._stuck((rank - 1) % min(3, len(self.names)), now, Stage.RUNNING, SERVING)
        chance = random.Random(f"{rank} {int(now * 4)}")
        for number, other in enumerate(self._others(rank, 4)):
            function = chance.randrange(len(FUNCTIONS))
            yield CallStatus(
                key=CallKey(caller=self.names[rank], id=1000 + int(now * 4) % 1000 * 10 + number),
                callee=self.names[other],
                function=FUNCTIONS[function],
                kind="PYTHON_CALL",
                stage=chance.choice([Stage.SENT, Stage.BEGUN, Stage.UNSENT]),
                age=TAKES[function] * (1 + 3 * chance.random()),
                bytes=chance.randrange(100, 1 << 20),
                thread=MAIN if number == 0 else None,
                asynchronous=number != 0,
            )

    def _waits(self, rank: int, now: float, query: Query) -> Iterator[WaitStatus]:
        callee = self._ring(rank)
        if callee is not None:
            call = self._stuck(rank, now, Stage.BEGUN, SERVING)
            text = f"{call.function} on {call.callee}"
            yield WaitStatus(
                kind=WaitKind.CALL,
                text=text,
                age=call.age,
                thread=SERVING,
                serving=call.parent,
                call=call.key,
                workers=(call.callee,),
            )
        elif rank == 5:
            absent = tuple(self.names[n] for n in (6, 7) if n < len(self.names))
            yield WaitStatus(
                kind=WaitKind.GATHERING, text="barrier 3: some have not come", age=4.2, thread=MAIN, workers=absent
            )
        elif rank == 4:
            yield WaitStatus(kind=WaitKind.LOCK, text="a lock", age=2.1, thread=LOCKED, holder=MAIN)

    def _threads(self, rank: int, now: float, query: Query) -> Iterator[ThreadStatus]:
        yield ThreadStatus(id=MAIN, name="MainThread", role="main", stack=STACK_OF_CALL)
        for number in range(3):
            yield ThreadStatus(id=2000 + number, name=f"pool-{number}", role="pool", stack=STACK_OF_POOL)
        yield ThreadStatus(
            id=LOCKED, name="pool-3", role="pool", stack=(*STACK_OF_WORK, "cache.py:31 get", "threading.py:327 wait")
        )
        if self._ring(rank) is not None:
            parent = self._stuck(rank, now, Stage.BEGUN, SERVING).parent
            stack = (*STACK_OF_WORK, "locks.py:14 acquire_all", *STACK_OF_CALL[2:])
            yield ThreadStatus(id=SERVING, name="pool-4", role="pool", stack=stack, serving=parent)

    # References: those of rank 3 grow.

    def _owned(self, rank: int, now: float, query: Query) -> Iterator[OwnedReference]:
        count = 12 + (int((now - self.begun) * 2) if rank == 3 else 0)
        for number in range(count):
            yield OwnedReference(
                id=f"{rank}.{number}",
                type="Tensor",
                state="ready" if number else "being made",
                age=float(count - number),
                bytes=4096 * (1 + number % 7),
                device="cpu",
                holders=(self.names[(rank + 1) % len(self.names)],),
                function="cache.remember" if rank == 3 else FUNCTIONS[number % 3],
                site="cache.py:57" if rank == 3 else None,
            )

    def _held(self, rank: int, now: float, query: Query) -> Iterator[HeldReference]:
        owner = (rank - 1) % len(self.names)
        for number in range(12):
            yield HeldReference(id=f"{owner}.{number}", owner=self.names[owner], state="confirmed", age=30.0 - number)

    def _passes(self, rank: int, now: float, query: Query) -> Iterator[PassStatus]:
        for context in (4711, 4712) if rank < 4 else ():
            following = self.names[(rank + 1) % min(4, len(self.names))]
            before = self.names[(rank - 1) % min(4, len(self.names))]
            yield PassStatus(
                context=context,
                number=1,
                started_by=self.names[0],
                phase="gradients" if rank % 2 else "counting",
                age=0.5 + context % 10,
                owes={following: 3 - rank % 3} if rank else {},
                awaits={before: 2} if rank % 2 else {},
            )

    def _links(self, rank: int, now: float, query: Query) -> Iterator[LinkStatus]:
        up = now - self.begun
        for other, name in enumerate(self.names):
            if other != rank:
                weight = 1.0 / (1 + abs(other - rank)) ** 1.5
                slow = rank == 2 and other == 6
                state = "dead" if name in self.dead else "suspected" if name in self.silent else "alive"
                yield LinkStatus(
                    peer=name,
                    state=state,
                    transport="unix" if rank // 8 == other // 8 else "tcp",
                    reason="" if state == "alive" else "no heartbeat for 3.2 s",
                    bytes_sent=int(up * 3e7 * weight),
                    bytes_received=int(up * 2.7e7 * weight),
                    messages_sent=int(up * 400 * weight),
                    messages_received=int(up * 390 * weight),
                    queued_messages=int(80 * weight),
                    queued_bytes=3 << 20 if slow else 0,
                    round_trip=0.042 if slow else 0.00003 + 0.0004 * (rank // 8 != other // 8),
                    reconnects=2 if slow else 0,
                    silent_for=0.1,
                )

    def _events(self, rank: int, now: float, query: Query) -> Iterator[Event]:
        begun = self.begun + rank * 0.01
        me = self.names[rank]
        for other in self._others(rank, 2):
            yield from _since(Event(time=begun, kind=EventKind.JOINED, peer=self.names[other]), query)
        if me not in self.dead:
            for name in sorted(self.dead):
                yield from _since(
                    Event(time=now - 5.0, kind=EventKind.DIED, peer=name, text="its process ended"), query
                )
        first = max(query.since, now - 30.0)
        for place, function in enumerate(FUNCTIONS[: 3 if len(self.names) > 50 else 6]):
            period = 1.0 / min(LOAD[place], 12.0)
            for tick in range(int(first / period) + 1, int(now / period) + 1):
                seconds = TAKES[place] * (0.5 + (tick * 7919 + rank * 31) % 100 / 50)
                failed = (tick * 31 + rank) % 400 == 0
                yield Event(
                    time=tick * period,
                    kind=EventKind.RUN_FAILED if failed else EventKind.RUN_ENDED,
                    peer=self.names[(rank + place + 1) % len(self.names)],
                    call=CallKey(caller=self.names[(rank + place + 1) % len(self.names)], id=tick),
                    function=function,
                    seconds=seconds * 5,
                    thread=2000 + place % 3,
                )

    def _histograms(self, rank: int, now: float, query: Query) -> Iterator[Histogram]:
        up = now - self.begun
        for function, load, takes in zip(FUNCTIONS, LOAD, TAKES, strict=True):
            for measure, factor in (("call", 1.6), ("queue", 0.05), ("run", 1.0)):
                count = int(load * up)
                middle = int(math.log2(takes * factor * 1e9))
                shares = {-2: 0.03, -1: 0.2, 0: 0.45, 1: 0.24, 2: 0.06, 3: 0.015, 5: 0.005}
                yield Histogram(
                    measure=measure,
                    function=function,
                    peer=self.names[(rank + 1) % len(self.names)],
                    count=count,
                    failed=int(up / 40) if function == "data.next_batch" else 0,
                    total=count * takes * factor,
                    longest=takes * factor * 40,
                    buckets={middle + step: int(count * share) for step, share in shares.items() if count * share >= 1},
                )


def _since(event: Event, query: Query) -> Iterator[Event]:
    if event.time > query.since:
        yield event


class Recorded:
    """Snapshots that were made before, told again and again as if time went on: what a group costs is left out."""

    def __init__(self, group: SimulatedGroup) -> None:
        parts = Query(parts=("calls", "waits", "histograms", "events", "threads"), limit=60, since=time.time() - 5)
        self._frame = group.snapshot(parts)
        self.asked = 0

    def snapshot(self, query: Query = Query(), timeout: float = 2.0) -> GroupSnapshot:
        self.asked += 1
        now = time.time()
        return replace(self._frame, time=now, workers=tuple(self._later(each, now) for each in self._frame.workers))

    def _later(self, worker: WorkerSnapshot, now: float) -> WorkerSnapshot:
        passed = now - self._frame.time
        served = worker.calls_served + int(passed * (200 + worker.rank * 37 % 150))
        later = replace(worker, time=now, up=worker.up + passed, calls_served=served, cpu=worker.cpu + passed * 0.4)
        if worker.rank >= 8:  # those of some workers are enough for a curve of latencies
            return later
        return replace(later, histograms=tuple(self._more(each, passed / worker.up) for each in worker.histograms))

    def _more(self, histogram: Histogram, share: float) -> Histogram:
        buckets = {bucket: int(count * (1 + share)) for bucket, count in histogram.buckets.items()}
        return replace(histogram, count=sum(buckets.values()), buckets=buckets)

    def close(self) -> None: ...
