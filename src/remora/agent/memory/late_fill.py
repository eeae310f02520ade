"""Messages that came before their shared memory was filled. No thread waits for a request or for a future's reply: one
thread of the worker looks after all of them.

A lender sends a small message first and copies its tensors then (`shm.LateFill`), which takes some microseconds. If it is
stopped in between, or never meant to, the message waits: until it is filled, until its deadline, until the lender is gone,
and for `loans.FILL_LIMIT` seconds at most. It keeps no place among the jobs meanwhile, and no thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from remora.agent.runtime.pool import blocking_region
from remora.clock import NEVER
from remora.transport.shm.borrower import PATIENCE, Filling, Hole

LONGEST_PAUSE = 0.02  # seconds from one look at messages that wait to the next

Resume = Callable[[], None]


class Owner(Protocol):
    """What the memory of a peer's messages belongs to (`agent.bulk.PeerSharedMemory`)."""

    name: str
    ended: bool
    now: Callable[[], float]

    def refuse(self, why: str) -> None: ...


class LateMemory:
    """The memory of one message, which may not be filled yet, or not mapped."""

    __slots__ = ("_filling", "_messages", "_owner", "deadline")

    def __init__(self, filling: Filling, owner: Owner, messages: LateMessages) -> None:
        self._filling = filling
        self._owner = owner
        self._messages = messages
        self.deadline = NEVER  # of the call

    @property
    def settled(self) -> bool:
        """Whether `wait` returns at once: it is filled, or not worth waiting for."""
        return self._filling.told or self._filling.overdue or not self._is_worthwhile()

    def _is_worthwhile(self) -> bool:
        return not self._owner.ended and self._owner.now() < self.deadline

    def settled_or_later(self, deadline: float, resume: Resume) -> bool:
        """Whether `wait` returns at once, now or within a millisecond. If not, `resume` is called when it does."""
        self.deadline = deadline
        if self._filling.wait_briefly() or self.settled:
            return True
        self._messages.add(self, resume)
        return False

    def wait(self, deadline: float) -> str:
        """Wait until all of it can be used. Why it cannot, if it cannot."""
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
        self._serve = serve  # has a thread of the worker call something, though it may be going home
        self._waiting: dict[LateMemory, Resume] = {}
        self._turn = threading.Lock()  # of the thread that looks after them; no thread waits for it

    def add(self, memory: LateMemory, resume: Resume) -> None:
        """Have `resume` called when the memory of a message is there, or not worth waiting for."""
        self._waiting[memory] = resume  # first: a thread that looks after them sees it, or leaves the turn to the next
        self._serve(self._look_after)

    def _look_after(self) -> None:
        pause = PATIENCE
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
