"""Leads the links of a worker through its fault plan. Without a plan it does nothing."""

from __future__ import annotations

from remora.agent.runtime.pool import WorkerPool
from remora.faults.injector import Injector
from remora.transport.link import StreamLink

_injectors: dict[WorkerPool, Injector] = {}  # a pool is one worker's; until that ends


def lead_through(pool: WorkerPool, injector: Injector) -> None:
    """Have the links that this worker makes from now on pass a plan."""
    _injectors[pool] = injector


def end(pool: WorkerPool) -> None:
    """The worker ended."""
    injector = _injectors.pop(pool, None)
    if injector is not None:
        injector.close()


def interposed(pool: WorkerPool, peer: str, link: StreamLink, leftover: bytes) -> StreamLink:
    """Return the link to use in the place of a new one."""
    injector = _injectors.get(pool)
    return link if injector is None else injector.insert(link, peer, leftover)
