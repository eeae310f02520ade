"""What the workers of the demo do: one function for each kind of call, and the functions they call on each other.

An act runs on every worker at the same time. It makes calls until its time is up, checks every answer and reports each
call to its `Ledger`. Nothing here knows about screens or processes.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WORKERS = 4
WAVE = 200
KB, MB = 10**3, 10**6


@dataclass
class Ledger:
    """What one worker did in one act."""

    latencies: list[float] = field(default_factory=list)
    busy: float = 0.0  # seconds in which at least one call was under way
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    shown: str = ""

    def check(self, what: str, answer: object, expected: object) -> None:
        if answer != expected:
            self.wrong.append(f"{what} gave {answer!r}, not {expected!r}")


@dataclass(frozen=True)
class Stage:
    """Where an act finds itself: the module with the calls, its own rank, and until when it should go on."""

    module: str
    rank: int
    deadline: float

    @property
    def rpc(self) -> Any:
        return importlib.import_module(self.module)

    @property
    def others(self) -> list[str]:
        return [name_of(self.rank + step) for step in range(1, WORKERS)]

    def time_left(self) -> bool:
        return time.monotonic() < self.deadline


def name_of(rank: int) -> str:
    return f"worker{rank % WORKERS}"


def timed(ledger: Ledger, call: Callable[..., Any], *args: Any) -> Any:
    begun = time.perf_counter()
    answer = call(*args)
    elapsed = time.perf_counter() - begun
    ledger.latencies.append(elapsed)
    ledger.busy += elapsed
    return answer


# --- called remotely ---


def add(a: int, b: int) -> int:
    return a + b


def relay(module: str, rank: int, hops: int) -> list[str]:
    """Calls the next worker, which calls the next: the names on the way back."""
    if hops == 0:
        return [name_of(rank)]
    rpc = importlib.import_module(module)
    onward: list[str] = rpc.rpc_sync(name_of(rank + 1), relay, args=(module, rank + 1, hops - 1))
    return [name_of(rank), *onward]


def increment(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def average(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


# --- the acts ---


def all_to_all(stage: Stage, ledger: Ledger) -> None:
    """Everyone calls everyone and waits for each answer."""
    rpc_sync = stage.rpc.rpc_sync
    for number, peer in enumerate(itertools.cycle(stage.others)):
        answer = timed(ledger, rpc_sync, peer, add, (number, 1))
        ledger.check(f"add on {peer}", answer, number + 1)
        if not stage.time_left():
            return


def nested(stage: Stage, ledger: Ledger) -> None:
    """A call that makes a call that makes a call, once round the ring and home again."""
    rpc_sync = stage.rpc.rpc_sync
    way = [name_of(stage.rank + step) for step in range(1, WORKERS + 1)]
    arguments = (stage.module, stage.rank + 1, WORKERS - 1)
    while stage.time_left():
        ledger.check("the ring", timed(ledger, rpc_sync, way[0], relay, arguments), way)


def fan_out(stage: Stage, ledger: Ledger) -> None:
    """Many calls under way at once, to all the others."""
    rpc_async, peers = stage.rpc.rpc_async, list(itertools.islice(itertools.cycle(stage.others), WAVE))
    clock = time.perf_counter
    while stage.time_left():
        begun = clock()
        futures = []
        for number, peer in enumerate(peers):
            started = clock()
            future = rpc_async(peer, add, args=(number, number))
            future.add_done_callback(lambda _, started=started: ledger.latencies.append(clock() - started))
            futures.append(future)
        answers = torch.futures.wait_all(futures)
        ledger.busy += clock() - begun
        ledger.check("a wave", answers, [2 * number for number in range(WAVE)])


def tensors(size: int) -> Callable[[Stage, Ledger], None]:
    """Tensors of `size` bytes go out, are changed on the other side and come back."""

    def act(stage: Stage, ledger: Ledger) -> None:
        rpc_sync, tensor = stage.rpc.rpc_sync, torch.arange(size // 4, dtype=torch.int32)
        for peer in itertools.cycle(stage.others):
            answer = timed(ledger, rpc_sync, peer, increment, (tensor,))
            ledger.bytes += 2 * size
            ledger.check(f"{size} bytes to {peer}", torch.equal(answer, tensor + 1), True)
            if not stage.time_left():
                return

    return act


def exception(stage: Stage, ledger: Ledger) -> None:
    """A function raises on another worker: the caller sees what, where and on whom."""
    if stage.rank != 0:
        return
    try:
        timed(ledger, stage.rpc.rpc_sync, "worker2", average, ([],))
    except Exception as error:
        ledger.latencies.append(0.0)
        ledger.shown = f"{type(error).__name__}\n{getattr(error, 'remote_traceback', '') or error}"
    ledger.check("average of nothing", "division by zero" in ledger.shown and "in average" in ledger.shown, True)


@dataclass(frozen=True)
class Act:
    """One line of the table."""

    title: str
    seconds: float
    run: Callable[[Stage, Ledger], None]


ACTS = {
    "sync": Act("rpc_sync, all to all", 1.5, all_to_all),
    "nested": Act("nested, four hops", 1.5, nested),
    "fan-out": Act(f"rpc_async, {WAVE} at once", 1.5, fan_out),
    "4 KB": Act("tensors of 4 KB", 1.0, tensors(4 * KB)),
    "1 MB": Act("tensors of 1 MB", 1.0, tensors(1 * MB)),
    "16 MB": Act("tensors of 16 MB", 1.5, tensors(16 * MB)),
    "exception": Act("an exception, seen from afar", 0.0, exception),
}
