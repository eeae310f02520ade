"""References that destructors let go of: a list that a thread of the crew looks at soon. Takes no lock, sends nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from remora.agent.agent import Agent
from remora.vocabulary.effects import ForkId

GATHER = 0.005  # seconds


class Dropping:
    """`let_go` is called soon, on a thread of the crew, when there is something on the list."""

    def __init__(self, agent: Agent, let_go: Callable[[], None]) -> None:
        self.closed = False  # nobody looks again by itself
        self._agent = agent
        self._let_go = let_go
        self._dropped: deque[ForkId] = deque()
        self._timer = False  # it will look again by itself
        self._due = False  # a thread of the crew was asked to look at them

    def soon(self, fork: ForkId) -> None:
        """For destructors."""
        self._dropped.append(fork)
        if not self._due:
            self._due = True
            self._agent.crew.serve_quickly(self._look)

    def batches(self) -> Iterator[list[ForkId]]:
        """What is on the list, which may grow meanwhile."""
        while self._dropped:
            batch = []
            while self._dropped:
                batch.append(self._dropped.popleft())
            yield batch

    def _look(self) -> None:
        """While there is something each time we look, we come back soon, so that goodbyes in quick succession share a
        message."""
        if not self._dropped:
            self._due = False
            if not self._dropped:
                return
            self._due = True  # one came in between
        if not self.closed and not self._timer:
            self._timer = True
            self._agent.timers.soon(GATHER, self._look_again)
        self._let_go()

    def _look_again(self) -> None:
        self._timer = False
        self._agent.crew.serve_quickly(self._look)
