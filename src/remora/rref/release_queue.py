"""The queue of references that destructors let go of. A destructor only appends: it takes no lock and sends nothing.

A thread of the pool empties the queue every few milliseconds. A thread that makes one reference after the other, and drops
them, empties it now and then itself: its goodbyes share a write with what it sends anyway, and no other thread takes the
interpreter from it.

No lock guards the queue. Any number of threads may take from it: `deque.popleft` gives each fork to one of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from remora.agent.agent import Agent
from remora.vocabulary.effects import ForkId

log = logging.getLogger("remora")

INTERVAL = 0.005  # seconds between two runs of the pool, so that goodbyes share a message
INLINE_LENGTH = 8  # a thread that makes references empties a queue of that length or more


class ReleaseQueue:
    """The pool passes what was put into the queue to `release` soon."""

    def __init__(self, agent: Agent, release: Callable[[list[ForkId]], None]) -> None:
        self.closed = False  # no timer is started any more
        self._agent = agent
        self._release = release
        self._dropped: deque[ForkId] = deque()
        self._timer = False  # the timer will have the pool run again
        self._drained_inline = False  # a thread of the program has emptied the queue since the last timer
        self._round = 0  # goes up when a run finds nothing, and ends
        self._asked = -1  # the round in which the pool was asked to run

    def put(self, fork: ForkId) -> None:
        """Let go of a reference soon. For destructors."""
        self._dropped.append(fork)
        now = self._round  # read after the append: a run that ends in this round sees the fork
        if self._asked != now:
            self._agent.pool.call_soon(self._run)
            self._asked = now  # after the call: if an exception strikes before it, the next destructor asks again

    def drain_inline(self) -> None:
        """Empty the queue on the current thread, which is in the midst of sending, unless the queue is short."""
        if len(self._dropped) >= INLINE_LENGTH and not self.closed:
            self._drained_inline = True
            try:
                self.empty()
            except Exception:  # the caller makes another reference, and must not fail because of these
                log.exception("references that were dropped could not be let go")

    def empty(self) -> None:
        """Let go of what is in the queue. Other threads may do so at the same time."""
        while self._dropped:
            batch: list[ForkId] = []
            try:
                try:
                    batch.extend(iter(self._dropped.popleft, None))  # in C: no fork is in neither of the two
                except IndexError:
                    pass  # it is empty
                self._release(batch)
            except BaseException:  # of a signal handler: to let go of one twice does no harm
                self._dropped.extend(batch)
                raise

    def check(self) -> None:
        """Called at each tick: an exception may have struck a destructor before it asked the pool to run."""
        if self._dropped:
            self._agent.pool.call_soon(self._run)

    def _run(self) -> None:
        """Empty the queue, and run again soon; end when the queue is found empty. So goodbyes in quick succession share a
        message."""
        if not self._dropped:
            self._round += 1
            if not self._dropped:  # read again: a fork that came before the round ended has asked for nothing
                return
        if not self.closed and not self._timer:
            self._timer = True
            self._agent.timers.soon(INTERVAL, self._on_timer)
        self.empty()

    def _on_timer(self) -> None:
        if self._drained_inline and not self.closed:  # the forks that are there now came a short time ago
            self._drained_inline = False
            self._agent.timers.soon(INTERVAL, self._on_timer)
            return
        self._timer = False
        self._agent.pool.call_soon(self._run)
