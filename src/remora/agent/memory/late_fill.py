"""Holds messages that came before their shared memory was filled. No thread waits for a request or for a future's reply:
one thread of the worker polls all of them.

A lender sends a small message first and then copies its tensors (`shm.LateFill`), which takes some microseconds. If the
lender is stopped in between, or never copies, the message waits: until it is filled, until its deadline, until the lender is
gone, and for `borrower.FILL_LIMIT` seconds at most. Meanwhile it occupies neither a slot of the pool nor a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from remora.agent.runtime.current import blocking_region
from remora.clock import NEVER
from remora.transport.shm.borrower import SPIN_LIMIT, Filling, Hole

LONGEST_PAUSE = 0.02  # seconds from one look at messages that wait to the next

Resume = Callable[[], None]


class Owner(Protocol):
    """The owner of the memory of a peer's messages (`agent.memory.shared.PeerSharedMemory`)."""

    name: str
    ended: bool

    def now(self) -> float: ...
    def refuse(self, why: str) -> None: ...


@dataclass(eq=False, slots=True)
class LateMemory:
    """The memory of one message, which may not be filled yet, or not mapped."""

    _filling: Filling
    _owner: Owner
    _messages: LateMessages
    deadline: float = NEVER  # of the call

    @property
    def settled(self) -> bool:
        """Return True if `wait` returns at once: the memory is filled, or will never be."""
        return self._filling.told or self._filling.overdue or not self._is_worthwhile()

    def _is_worthwhile(self) -> bool:
        return not self._owner.ended and self._owner.now() < self.deadline

    def settled_or_later(self, deadline: float, resume: Resume) -> bool:
        """Return True if `wait` returns at once, now or within a millisecond. If not, call `resume` when it does."""
        self.deadline = deadline
        if self._filling.wait_briefly() or self.settled:
            return True
        self._messages.add(self, resume)
        return False

    def wait(self, deadline: float) -> str:
        """Wait until all of it can be used. Return the reason if it cannot."""
        self.deadline = deadline
        owner, filling = self._owner, self._filling
        try:
            if filling.wait_briefly():
                return "" if filling.wait(self._is_worthwhile) else "this process was forked"
            with blocking_region():  # (a synchronous caller)
                if filling.wait(self._is_worthwhile):
                    return ""
        except Hole as error:
            owner.refuse(str(error))
            return f"the memory that {owner.name} shares cannot be used ({error})"
        if owner.ended:
            return f"{owner.name} ended while it copied them"
        if filling.overdue:
            owner.refuse("it was not filled")
            return f"{owner.name} has not copied them into its shared memory"
        return f"{owner.name} had not copied them into its shared memory at the deadline of the call"


class LateMessages:
    """The messages of one worker that wait for their memory."""

    def __init__(self, serve: Callable[[Resume], None]) -> None:
        self._serve = serve  # runs a function on a thread of the worker, also while the worker stops
        self._waiting: dict[LateMemory, Resume] = {}
        self._turn = threading.Lock()  # held by the thread that polls the messages; no thread waits for it

    def add(self, memory: LateMemory, resume: Resume) -> None:
        """Call `resume` when the memory of a message is filled, or will never be."""
        self._waiting[memory] = resume  # first: the polling thread sees it, or leaves the turn to the next
        self._serve(self._look_after)

    def _look_after(self) -> None:
        pause = SPIN_LIMIT
        while self._waiting and self._turn.acquire(False):
            try:
                with blocking_region():
                    time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                for memory in [each for each in list(self._waiting) if each.settled]:
                    resume = self._waiting.pop(memory, None)
                    if resume is not None:
                        self._serve(resume)
            finally:
                self._turn.release()
