"""Limits how much of a caller's work is taken on: a caller that does not read its answers must not fill our memory.

There are three ways in which it could, and a bound for each:

    B1  Answers wait to be written. While there are more than OUTBOX_LIMIT bytes of them, no request of that caller begins
        (`room_for`); when half of that is written, they go on.
    B2  What runs asynchronously (a coroutine, a function that returns a future) holds no thread, so any number could be
        under way, and all end before the first answer shows a stalled reader. So WINDOW of them begin (`admit`). For
        twice as many, the caller must have answered a ping, which shows that it reads, while none of those that had begun
        ended, which shows that they wait for something: perhaps for those that have not begun. So functions that wait
        for each other all begin, however many there are, and a caller that reads is held up for a few round trips.
    B3  Requests wait to be run. With more than UNANSWERED_LIMIT of them unanswered, nothing more is read.

No I/O and no threads: a channel is asked to say the ping, and what waits has left a function that lets it go on.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

OUTBOX_LIMIT = 32 << 20
WINDOW = 32
UNANSWERED_LIMIT = 1 << 16
VANGUARD = 16  # how many of those that waited for room look at once whether there is some

Resume = Callable[[], None]


class FlowControlled(Protocol):
    """A channel, as far as flow control knows it."""

    closed: bool

    def unsent_bytes(self) -> int: ...  # the number of bytes that wait to be written
    def ask_to_read(self) -> None: ...  # say something that the caller answers when it reads it (`FlowControl.answered`)
    def reconsider_reading(self) -> None: ...  # act on a change of `paused`


class FlowControl:
    """Limits the work of one caller. There is one for each channel on which requests come in."""

    def __init__(self, channel: FlowControlled) -> None:
        self._channel = channel
        self.parked: deque[Resume] = deque()  # B1
        self._lock = threading.RLock()  # guards: the five fields of B2
        self.held: deque[Resume] = deque()  # what may not begin yet
        self._under_way = 0  # asynchronous requests that have begun
        self._allowed = WINDOW  # at most so many may have
        self._asked = False  # the caller has a ping to answer
        self._one_ended = False  # since then
        self.paused = False  # B3: too many requests are unanswered
        self._taken = 0  # requests (written by the reader alone)
        self.served = 0  # those that were answered: who answers one takes the next of these
        self.answers = itertools.count(1)

    # B1.

    @property
    def congested(self) -> bool:
        """Return True if more waits to be written to the caller than is healthy."""
        return self._channel.unsent_bytes() > OUTBOX_LIMIT and not self._channel.closed

    def room_for(self, resume: Resume) -> bool:
        """Return True if there is room for one more answer; if not, `resume` is called when there is, and asks
        again."""
        channel = self._channel
        if channel.unsent_bytes() <= OUTBOX_LIMIT or channel.closed:
            if self.parked:
                self._release(1)  # a thread that finds room lets the next one look
            return True
        self.parked.append(resume)
        self.go_on()
        return False

    def go_on(self) -> None:
        """Something was written, or the channel is closed: let those go on who may, a few at first. To be called whenever
        something was written and a thread is `parked` or `held`."""
        if self._channel.unsent_bytes() > OUTBOX_LIMIT // 2 and not self._channel.closed:
            return
        self._release(VANGUARD)
        if self.held:
            self._let_begin()

    def _release(self, n: int) -> None:
        try:
            for _ in range(min(n, len(self.parked))):
                self.parked.popleft()()
        except IndexError:
            pass  # others were quicker

    # B2.

    def admit(self, resume: Resume) -> bool:
        """Return True if something asynchronous may begin; if not, `resume` is called when it may. `ended` says that it
        ended."""
        with self._lock:
            if self._under_way < self._allowed and not self.held:
                self._under_way += 1
                return True
            self.held.append(resume)
        self._let_begin()
        return False

    def ended(self) -> None:
        """Count something asynchronous that has ended: its answer is sent or waits to be."""
        with self._lock:
            self._under_way -= 1
            self._one_ended = True
            if not self._under_way:
                self._allowed = WINDOW
        if self.held:
            self._let_begin()

    def answered(self) -> None:
        """The caller answered a ping: it reads."""
        with self._lock:
            if self._asked and not self._one_ended and not self.congested:
                self._allowed = 2 * max(self._allowed, self._under_way)
            self._asked = False
        if self.held:
            self._let_begin()

    def connected_again(self) -> None:
        """Ask again: what was asked on the old link will not be answered."""
        with self._lock:
            self._asked = False
        self.go_on()

    def _let_begin(self) -> None:
        with self._lock:
            ready, ask = self._choose()
        for resume in ready:
            resume()
        if ask:
            self._channel.ask_to_read()

    def _choose(self) -> tuple[list[Resume], bool]:
        """Return those that may begin now, and True if the peer is to be asked for a sign. Holds the lock."""
        if self._channel.closed:
            room = len(self.held)
        elif self.congested:
            self._allowed = WINDOW
            return [], False
        else:
            room = max(min(len(self.held), self._allowed - self._under_way), 0)
        ready: list[Resume] = []
        while self.held and len(ready) < room:  # (a destructor that runs here may take some)
            ready.append(self.held.popleft())
        self._under_way += len(ready)
        ask = bool(self.held) and not self._asked
        if ask:
            self._asked, self._one_ended = True, False
        return ready, ask

    # B3.

    def took(self, n: int) -> None:
        """Count the requests that came in. Called by the reader."""
        self._taken += n
        if self.paused or self._taken - self.served > UNANSWERED_LIMIT:
            self.limit_unanswered()

    def limit_unanswered(self) -> None:
        """Stop or go on reading, by how many requests are unanswered."""
        paused = self._taken - self.served > UNANSWERED_LIMIT
        if paused != self.paused:
            self.paused = paused
            self._channel.reconsider_reading()

    def done(self) -> None:
        """A request was answered, or dropped."""
        self.served = next(self.answers)
        if self.paused:
            self.limit_unanswered()
