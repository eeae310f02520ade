"""Finds out if anything happens in a world of workers in one process. It looks, from any thread, and changes nothing.

A world is still if nothing can happen any more unless time passes or a thread from outside does something: no timer
is due, no bytes are on their way, nothing waits to be done, and every thread that runs code of the program waits.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterable

from remora.agent.agent import Agent
from remora.faults.injector import Stage


class Stillness:
    """Looks at one world, and reports what is under way there.

    It asks for the agents of the living workers, for the stage of the fault plan, if there ever was one, and for the number
    of threads that run a part of a worker's program, or are about to, without those that sleep.
    """

    def __init__(
        self,
        agents: Callable[[], list[Agent]],
        stage: Callable[[], Stage | None],
        actors: Callable[[set[threading.Thread]], int],
    ) -> None:
        self._agents = agents
        self._stage = stage
        self._actors = actors

    def under_way(self) -> str:
        """Return what Remora does or could do now; empty if nothing."""
        stage = self._stage()
        if stage is not None and not stage.idle:
            return "the fault plan is at work"
        for agent in self._agents():
            if not agent.timers.idle:
                return f"a timer of {agent.me.name} is due"
            if not agent.coroutines.idle:
                return f"a coroutine of {agent.me.name} is at work"
            if _have_bytes(agent.listener.descriptors()):
                return f"a connection is pending at {agent.me.name}"
            if self._is_spoken_to(agent):
                return f"{agent.me.name} has something to read"
        return ""

    def _is_spoken_to(self, agent: Agent) -> bool:
        found = False
        for peer in agent.peers.all():
            for channel in peer.channels():
                link = channel.link
                if not channel.paused and link is not None and _have_bytes([link.sock]):
                    channel.watch(again=True)  # else no thread might read it before the next tick
                    found = True
        return found

    def at_work(self, asleep: set[threading.Thread]) -> dict[str, int]:
        """Return the number of threads that run code of the program, or for it, by worker."""
        found = {agent.me.name: agent.pool.busy(asleep) for agent in self._agents()}
        found["the program"] = self._actors(asleep)
        return found

    def messages(self) -> int:
        """Return the number of messages that have arrived; signs of life are none."""
        peers = [peer for agent in self._agents() for peer in agent.peers.all()]
        return sum(channel.session.received for peer in peers for channel in peer.channels())


def _have_bytes(socks: Iterable[socket.socket]) -> bool:
    """Return True if there is something to read from one of them, or one is being closed: then something happens."""
    poll = select.poll()
    try:
        for sock in socks:
            poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True
