"""Where a fault plan meets a worker: its links are led through the plan, its dials and calls ask it. No plan: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.agent.runtime.pool import WorkerPool
from remora.faults.injector import Injector, Stage
from remora.transport.link import StreamLink

if TYPE_CHECKING:
    from remora.agent.agent import Agent

_injectors: dict[WorkerPool, Injector] = {}  # a pool is one worker's; until that ends


def begin(agent: Agent, plan: str) -> None:
    """Have a worker that is alone in its process follow a plan."""
    install(agent, Stage(agent.me.name, plan, clock=agent.clock).join(agent.me.name))


def install(agent: Agent, injector: Injector) -> None:
    """Have a worker follow a plan. Links that it has already are made anew, so that they pass the plan, too."""
    agent.faults = injector
    agent.listener.handshake_client.barred = injector.barred
    _injectors[agent.pool] = injector
    for peer in agent.peers.all():
        for channel in peer.channels():
            channel.cut(ConnectionError("the link is made anew, under a fault plan"))


def end(agent: Agent) -> None:
    """The worker ended."""
    injector = _injectors.pop(agent.pool, None)
    if injector is not None:
        injector.close()


def interposed(pool: WorkerPool, peer: str, link: StreamLink, leftover: bytes) -> StreamLink:
    """The link to use in the place of a new one."""
    injector = _injectors.get(pool)
    return link if injector is None else injector.insert(link, peer, leftover)
