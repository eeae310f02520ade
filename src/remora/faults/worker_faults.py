"""Applies a fault plan to one worker: before it dials, before it sends, and on each of its links."""

from __future__ import annotations

from remora.faults.injector import Injector
from remora.transport.link import StreamLink

REMADE = "the link is made anew, under a fault plan"


class WorkerFaults:
    """The faults of one worker. The parts that a plan can disturb have this object from their constructors."""

    def __init__(self) -> None:
        # The part of this worker in the plan that it follows. One assignment replaces it, and `Agent.inject` then cuts the
        # links that are there. A thread that makes a link at that moment looks here again afterwards (`Channel.attach`).
        self.injector: Injector | None = None

    def follow(self, injector: Injector) -> None:
        """Have what is sent and the links that are made from now on pass a plan."""
        self.injector = injector

    def refuse(self, peer: str, kind: int, payload: bytes) -> bool:
        """Return True if the attempt to send this request fails by plan."""
        found = self.injector
        return found is not None and found.stage.attempt(found.me, peer, kind, payload)

    def bar(self, peer: str) -> bool:
        """Return True if the plan lets no connection to that peer be made."""
        found = self.injector
        return found is not None and found.stage.severed(found.me, peer)

    def interpose(self, peer: str, link: StreamLink, leftover: bytes) -> StreamLink:
        """Return the link to use in the place of a new one."""
        return link if self.injector is None else self.injector.insert(link, peer, leftover)

    def close(self) -> None:
        """Let go of the links: the worker ended."""
        if self.injector is not None:
            self.injector.close()
