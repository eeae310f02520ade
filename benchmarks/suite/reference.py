"""Remote values: one made and fetched, `remote()` and `to_here()`; and what a hundred thousand of them cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.calls import nothing
from benchmarks.measure import Reading, Setting, Unit, latencies, time_each
from benchmarks.suite.memory import resident

MANY = 100_000
MAKING_LIMIT = 25.0  # seconds; who has not made them all by then is measured by those it has made
DROPPING_LIMIT = 60.0
BATCH = 1000

_made: list[None] = []  # appending is atomic, which counting is not
_gone: list[None] = []


class Thing:
    """A value that is counted, on the owner."""

    __slots__ = ()

    def __init__(self) -> None:
        _made.append(None)

    def __del__(self) -> None:
        _gone.append(None)


def alive() -> int:
    """Runs on the owner."""
    return len(_made) - len(_gone)


def measure(setting: Setting) -> list[Reading]:
    rpc, (peer, *_) = setting.rpc, setting.peers

    def make_and_fetch() -> None:
        rpc.remote(peer, nothing).to_here()

    time_each(make_and_fetch, setting.effort(200, 50))
    return latencies(time_each(make_and_fetch, setting.effort(1000, 400)))


def many(setting: Setting) -> Iterator[Reading]:
    rpc, (peer, *_) = setting.rpc, setting.peers
    before = resident(), rpc.rpc_sync(peer, resident)
    begun = time.perf_counter()
    references = _make(rpc, peer, setting.effort(MANY, 10_000), begun + MAKING_LIMIT)
    made, number = time.perf_counter(), len(references)
    yield Reading("number", number, Unit.COUNT)
    yield Reading("make one", (made - begun) / number, Unit.SECONDS)
    yield Reading("holder's memory", (resident() - before[0]) / number, Unit.BYTES)
    yield Reading("owner's memory", (rpc.rpc_sync(peer, resident) - before[1]) / number, Unit.BYTES)
    begun = time.perf_counter()
    references.clear()
    _wait_until_alive(rpc, peer, 0, begun + DROPPING_LIMIT)
    yield Reading("drop one", (time.perf_counter() - begun) / number, Unit.SECONDS)


def _make(rpc: Any, peer: str, number: int, deadline: float) -> list[Any]:
    """So many references, or fewer if time runs out; all their values exist when this returns."""
    references: list[Any] = []
    while len(references) < number and time.perf_counter() < deadline:
        references += [rpc.remote(peer, Thing) for _ in range(BATCH)]
        _wait_until_alive(rpc, peer, len(references), deadline + DROPPING_LIMIT)
    return references


def _wait_until_alive(rpc: Any, peer: str, number: int, deadline: float) -> None:
    while (living := rpc.rpc_sync(peer, alive)) != number:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{living} values are alive on the owner, not {number}")
        time.sleep(0.001)
