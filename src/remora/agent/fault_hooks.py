"""Where a fault plan meets the links of a worker: they are led through the plan. No plan: nothing."""

from __future__ import annotations

from remora.agent.runtime.pool import WorkerPool
from remora.faults.injector import Injector
from remora.transport.link import StreamLink

REMADE = "the link is made anew, under a fault plan"

_injectors: dict[WorkerPool, Injector] = {}  # a pool is one worker's; until that ends


def lead_through(pool: WorkerPool, injector: Injector) -> None:
    """Have the links that this worker makes from now on pass a plan."""
    _injectors[pool] = injector


def end(pool: WorkerPool) -> None:
    """The worker ended."""
    injector = _injectors.pop(pool, None)
    if injector is not None:
        injector.close()


def injector_of(pool: WorkerPool) -> Injector | None:
    """The part of this worker in a fault plan, if there is a plan."""
    return _injectors.get(pool)


def interposed(pool: WorkerPool, peer: str, link: StreamLink, leftover: bytes) -> StreamLink:
    """The link to use in the place of a new one."""
    injector = injector_of(pool)
    return link if injector is None else injector.insert(link, peer, leftover)
