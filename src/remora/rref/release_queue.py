"""References that destructors let go of: a list that somebody looks at soon. Takes no lock, sends nothing.

A thread of the pool does, every few milliseconds. But a thread that makes one reference after the other, and drops them,
looks at the list itself now and then: its goodbyes go along with what it sends anyway, and nobody takes the interpreter
from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from remora.agent.agent import Agent
from remora.vocabulary.effects import ForkId

log = logging.getLogger("remora")

GATHER = 0.005  # seconds
FEW = 8  # so many may wait for the pool


class ReleaseQueue:
    """`let_go` is called soon, on a thread of the pool, when there is something on the list."""

    def __init__(self, agent: Agent, let_go: Callable[[], None]) -> None:
        self.closed = False  # nobody looks again by itself
        self._agent = agent
        self._let_go = let_go
        self._dropped: deque[ForkId] = deque()
        self._timer = False  # it will look again by itself
        self._relieved = False  # a thread of the program has looked since
        self._round = 0  # goes up when a look finds nothing, and ends
        self._asked = -1  # the round in which a thread of the pool was asked to look

    def soon(self, fork: ForkId) -> None:
        """For destructors."""
        self._dropped.append(fork)
        now = self._round  # read after the append: a look that ends in this round sees the fork
        if self._asked != now:
            self._agent.pool.call_soon(self._look)
            self._asked = now  # after it was asked: an exception that strikes before has it asked once more

    def drain_inline(self) -> None:
        """The current thread is in the midst of sending: if the list is not short, let it see to that."""
        if len(self._dropped) >= FEW and not self.closed:
            self._relieved = True
            try:
                self._let_go()
            except Exception:  # it is not the business of whoever makes another one
                log.exception("references that were dropped could not be let go")

    def batches(self) -> Iterator[list[ForkId]]:
        """What is on the list, which may grow meanwhile, and which others may look at, too."""
        while batch := self._take():
            yield batch

    def _take(self) -> list[ForkId]:
        batch: list[ForkId] = []
        try:
            while True:
                batch.append(self._dropped.popleft())
        except IndexError:
            return batch
        except BaseException:  # of a signal handler
            self.put_back(batch)
            raise

    def put_back(self, batch: list[ForkId]) -> None:
        """They are still to be let go."""
        self._dropped.extend(batch)

    def look_after(self) -> None:
        """Called at each tick: an exception may have struck a destructor before it asked a thread to look."""
        if self._dropped:
            self._agent.pool.call_soon(self._look)

    def _look(self) -> None:
        """While there is something each time we look, we come back soon, so that goodbyes in quick succession share a
        message."""
        if not self._dropped:
            self._round += 1
            if not self._dropped:  # looked at once more: what came before the round ended has asked for nothing
                return
        if not self.closed and not self._timer:
            self._timer = True
            self._agent.timers.soon(GATHER, self._look_again)
        self._let_go()

    def _look_again(self) -> None:
        if self._relieved and not self.closed:  # what is there now has not been there for long
            self._relieved = False
            self._agent.timers.soon(GATHER, self._look_again)
            return
        self._timer = False
        self._agent.pool.call_soon(self._look)
