"""Decides who reads a link: a thread that waits for a reply, or the pool. No I/O, clock or threads.

To wake a thread takes longer than most calls do. So a thread that waits for a reply reads the link itself: it is the
*reader*, and has a role that one thread has at a time. The poller looks away meanwhile. A thread that finds another one
reading *parks*: it sleeps until the reader, or the pool, meets its reply. What the reader leaves unread is for the
poller, which tells a thread of the pool. Where threads come to wait again and again, the channel is *waiter-owned*: after
a reader left, the poller does not look either, for the next waiter is about to come. A timer gives that up. This machine
decides what the poller watches for, when it is asked again, which thread completes a reply, and when a reader that does
not go on is replaced:

    R1  a reply that is in the socket while a thread waits for it is read, in finitely many steps; so is a request; and what
        waits to be written is written
    R2  at most one thread sorts at a time
    R3  a waiter whose reply was read by another thread, or whose call ended otherwise, is woken
    R4  no thread spins: the poller does not tell again and again of bytes that no thread can read, and a reader is not woken
        again and again
    R5  messages are sorted in the order of their arrival
    R6  after the end no thread is parked, nothing is armed, and no reply is left uncompleted

R2 and R5 rest on one critical section, *sorting*, in which a link is read and the messages sorted. The role is no critical
section: it is held while a thread waits, and a signal handler on top of that thread may take long. The pool then reads in
its stead (`tick`). A reader that was woken and goes on to wait renews its role, so a role that two ticks saw has not
moved. The pool reads from a reader that only waited for long once: that one is woken (`replaced`), and the next tick
tells the two apart.

The events of a link, and what decides:

    Sent         `sent` (a thread will read the reply); `sent_async`, then `owned` (there is a future of it)
    WaiterCame   `came`; then it takes the role and reads, or parks and has the poller look (`watch`)
    WaiterLeft   `left`, `left_async`, `left_to_frame_below`
    Readable     `Registration.told`; then a pool thread takes the role, or `may_replace` and `replaced`; at last `was_read`
    ReplyFor     `disposal`, `must_pass_on`
    Tick         `tick` and `watch_again`, twice a second; `is_deserted`, then `give_up`, by the timer of waiter-owned
      channels
    Closed       `is_deserted`, `must_pass_on`; the registration is removed, and the link severed, which wakes the reader

The state is shared by all threads and has no lock. No method calls anything between a comparison and the write that
depends on it, so the interpreter does not switch threads there. And each side first *says* what it does, in one step, and
then *looks* at what the other side said, in the next; so the second of two threads sees the first:

    a thread that parks says so (`notify_ids`, `parked`), then looks whether the poller looks (`watch`)
    a reader that leaves gives the role back, then looks whether a thread is parked (`left_async`) or waits (`left`)
    a call is in `low_priority` for as long as it is pending, or shorter; else a reader that leaves would count too few
      that wait
    a thread that decides what the poller watches for says that this is undecided (`Registration.decide`), then looks
      whether a thread has the role (`wanted_events`); a pool thread gives the role back, then looks whether that is
      decided (`was_read`)
    a thread that changes what is to be watched for says that this is unsure, then tries to decide; a thread that has decided
      looks whether it is unsure. Each registration has a turn of its own for that: `unsure` is of one link, too
    a pool thread that finds the role taken says that it was told (`again`), then looks once more whether it is taken
    a thread that defers a reply does so, then looks whether a thread parked or wants to be told meanwhile; that one says so,
      then looks whether the reply is deferred
    a thread that relies on the timer says that the channel is waiter-owned (`owned`), then looks whether the timer still
      counts it; the timer ceases to count it (`is_deserted`), then says that it is not waiter-owned (`give_up`)
    a thread puts a call on the list, then looks whether the channel is closed; a thread closes it, then fails what is on
      the list

What an exception of a signal handler leaves undone, the next tick does. A method returns what is to be done, in that
order, or nothing. `tests/model/test_reader_explorer.py` walks small scenarios in every interleaving, and breaks one rule
at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

READ, WRITE = 1, 2  # what a poller can watch for
UNDECIDED = -1
LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The limits within which waiters are counted on. Times are in seconds."""

    # From one look of the timer to the next. A call that its thread left to be written waits so long at most, if that thread
    # does not come back; and twice as long a reply that was deferred. To set a timer for each call would wake a thread,
    # which takes as long as a call: one that runs every 4 ms takes less than a hundredth of a processor.
    round: float = 0.004
    # A thread that came within this time is expected to come again. With it 16 calls kept in flight are 48,000 to 58,000 a
    # second, and 11,000 to 20,000 without it. What a program does between two waits, a training step at most, fits in.
    memory: float = 0.02


USUAL = Thresholds()


class Effect(Enum):
    """One thing that a decision asks for."""

    ARM = auto()  # decide what the poller watches for (`wanted_events`), and ask it for that; for nothing: disarm it
    ARM_AGAIN = auto()  # the same, and ask it in any case
    COMPLETE = auto()  # the current thread completes the call
    POOL = auto()  # a thread of the pool does
    DEFER = auto()  # a waiter that comes for it does, or the pool when the timer says so
    PASS_ON = auto()  # the pool completes what was deferred
    FLUSH = auto()  # write what waits to be written
    WAKE = auto()  # have the reader look up from the link
    ROUND = auto()  # see to it that the timer runs


ARM, ARM_AGAIN, COMPLETE, POOL, DEFER, PASS_ON, FLUSH, WAKE, ROUND = Effect

Effects = tuple[Effect, ...]

NOTHING: Effects = ()
TO_ARM: Effects = (ARM,)
TO_ROUND: Effects = (ROUND,)
TO_WAKE: Effects = (WAKE,)
TO_ARM_AND_WAKE: Effects = (ARM, WAKE)
TO_ARM_AGAIN: Effects = (ARM_AGAIN,)
TO_GIVE_UP: Effects = (FLUSH, ARM_AGAIN, PASS_ON)


class Registration:
    """A link in the poller, as far as it matters for what the poller watches for.

    `armed` is written by the thread that decides: one at a time. The other two are written by any thread, and each write
    says that something is to be done once more, so none is lost.
    """

    __slots__ = ("again", "armed", "unsure")

    def __init__(self) -> None:
        self.armed = 0  # what the poller was asked to watch for, or UNDECIDED
        self.again = False  # the poller is asked again in any case: what it said was its last word, or was not made use of
        self.unsure = False  # what the poller should watch for is to be decided again

    def told(self, events: int, lasts: bool) -> None:
        """The poller told a pool thread. It tells again by itself only if it was asked for something that `lasts`: for READ
        alone, and nothing but that happened."""
        if events != READ or self.armed != READ or not lasts:
            self.again = True

    def decide(self) -> int:
        """A thread begins to decide what to watch for. What it is now."""
        armed = self.armed
        self.unsure = False
        self.armed = UNDECIDED
        return armed

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        assert UNDECIDED <= self.armed <= READ | WRITE, "R1: the poller was asked for what it does not know"

    def must_ask(self, events: int, armed: int, unread: bool) -> bool:
        """Return True to ask the poller for `events`. `unread`: the link may hold more than was read, of which a
        poller that watches already does not tell again."""
        if events == armed and not self.again and not unread:
            return False
        self.again = False
        return True


class Reader:
    """The state of the threads around one link: who waits, who is counted on, and whether the poller need look."""

    __slots__ = (
        "counted", "deferred", "deferred_long", "last_waiter_at", "low_priority", "notify_ids", "parked", "pending", "seen",
        "stalled", "thresholds", "unwatched", "waiter_owned", "woken",
    )  # fmt: skip

    def __init__(self, thresholds: Thresholds = USUAL) -> None:
        self.thresholds = thresholds
        # Written by any thread; a reader reads the replies, or none is due.
        self.unwatched = False
        # Sets and dicts, changed by any thread in one operation each.
        self.pending: dict[int, Any] = {}  # calls that are not answered
        self.low_priority: set[int] = set()  # calls whose replies may wait until a thread looks
        self.notify_ids: set[int] = set()  # calls whose replies must be noticed though no thread may come to read
        self.parked: set[Any] = set()  # threads that wait for futures and cannot read
        self.deferred: dict[int, Any] = {}  # replies that were read, for the waiters that come for them
        self.deferred_long: dict[int, Any] = {}  # … for one look of the timer, at least
        # Written by waiters; by the timer only `counted` and `waiter_owned`.
        self.last_waiter_at = LONG_AGO
        self.counted = False  # the timer looks at this channel
        self.waiter_owned = False  # waiters read and write: the poller and the pool need not
        # Roles. A reader that was woken and goes on to wait has a new one, so a role is told from the next of the same
        # thread.
        self.seen: object | None = None  # the last tick saw it (written by the tick alone)
        self.stalled: object | None = None  # two ticks saw it: the pool may read in its stead
        self.woken: object | None = None  # it was told that the pool did

    # The poller.

    def wanted_events(self, holder: object | None, is_sorting: bool, has_outbox: bool, paused: bool) -> int:
        """Return what the poller is to watch for. `holder`: the role, if a thread has it; `is_sorting`: a thread sorts;
        `paused`: flow control does not let us read. The thread that reads has this decided again when it leaves. If it
        does not go on, the pool reads in its stead; but not if it stopped in the midst of sorting, where no other
        thread could read, and would be told of the same bytes for ever."""
        events = WRITE if has_outbox else 0
        if self.unwatched or paused or (holder is not None and (holder is not self.stalled or is_sorting)):
            return events
        return events | READ

    # Sent.

    def sent(self) -> Effects:
        """A thread is about to send a call and to read the reply: the poller need not wake another one for it. Undone when
        another reply is due (`watch`, `left`), and by the next tick, so that the end of an idle link is noticed."""
        if self.unwatched:
            return NOTHING
        self.unwatched = True
        return TO_ARM

    def sent_async(self, now: float) -> Effects:
        """A call is about to be sent, and a thread will have a future of it. If a thread came to wait a moment ago, it will
        come again."""
        if now - self.last_waiter_at > self.thresholds.memory:
            if not self.unwatched:
                return NOTHING
            self.unwatched = False
            return TO_ARM
        self.counted = True
        return TO_ROUND

    def owned(self) -> Effects:
        """The timer will run: from here on calls rely on it. It may have run, and given the channel up, before this."""
        self.waiter_owned = True
        if self.counted:
            return NOTHING
        self.waiter_owned = self.unwatched = False
        return TO_GIVE_UP

    # A waiter comes, parks and leaves.

    def came(self, now: float) -> None:
        """A thread waits for futures."""
        self.last_waiter_at = now

    def watch(self) -> Effects:
        """A reply is due that no thread may come to read: it was sent, or its thread has parked."""
        if not self.unwatched:
            return NOTHING
        self.unwatched = False
        return TO_ARM

    def watch_again(self) -> Effects:
        """The same, and the poller may have been asked by a thread that was struck, or have told one: at each tick."""
        self.unwatched = False
        return TO_ARM_AGAIN

    def left(self) -> Effects:
        """A thread that read the reply to its own call has given the role back."""
        if len(self.pending) > len(self.low_priority):
            self.unwatched = False
        return NOTHING if self.unwatched else TO_ARM  # (a new link was not armed while we had the role)

    def left_async(self, has_outbox: bool) -> Effects:
        """A thread that read the replies to its futures has given the role back."""
        self.unwatched = self.waiter_owned and not self.notify_ids and not self.parked
        return NOTHING if self.unwatched and not has_outbox else TO_ARM

    def left_to_frame_below(self) -> Effects:
        """A signal handler on top of the reader has read for itself. It may have met the reply of the interrupted frame,
        which waits at the link."""
        return TO_WAKE

    # The pool.

    def may_replace(self, holder: object | None) -> bool:
        """A pool thread was told, and found the role taken: whether it reads in the stead of that thread."""
        return holder is not None and holder is self.stalled

    def replaced(self, holder: object | None, has_met: bool) -> Effects:
        """A pool thread has read in the stead of the reader. If it has met a message that the reader may wait for
        (`has_met`), the reader has to see that, once. The poller looks away first: what wakes the reader is an answer of
        the peer, and a pool thread would read that, too. A reader that only waited for long goes on with a new role; if
        it does not, the next tick lets the pool read for good."""
        if not has_met or holder is self.woken:
            return NOTHING
        self.woken = holder
        self.stalled = None
        return TO_ARM_AND_WAKE

    def was_read(self, registration: Registration, unread: bool, has_outbox: bool, paused: bool) -> Effects:
        """A pool thread has read, and given the role back. A thread that found it reading has parked."""
        if len(self.pending) > len(self.low_priority):
            self.unwatched = False
        if registration.armed == READ and not (registration.again or unread or has_outbox or self.unwatched or paused):
            return NOTHING
        return TO_ARM

    # A reply was met.

    def disposal(self, is_quiet: bool, is_empty: bool, is_mine: bool, is_notified: bool) -> Effect:
        """The current thread, which waits for futures, has met the reply to a call. `is_quiet`: no code of the program runs
        when it is completed; `is_empty`: there is nothing to unpickle; `is_mine`: the thread waits for it; `is_notified`: a
        thread wants to hear of it and does not come to read."""
        if is_quiet and (is_empty or is_mine):
            return COMPLETE
        if is_notified or not is_quiet or not self.waiter_owned or self.parked:
            return POOL
        return DEFER

    def must_pass_on(self, closed: bool) -> bool:
        """Return True if what is deferred goes to the pool now: no thread would come for it, or one is parked that
        waits for it."""
        return bool(self.deferred or self.deferred_long) and (closed or bool(self.parked) or not self.waiter_owned)

    # Time passes.

    def tick(self, holder: object | None) -> Effects:
        """Note the role. `holder`: that role, if a thread has it and calls are not answered. A thread that has had it
        since the last tick may not go on, if a signal handler interrupted it: the pool reads, too."""
        effects = NOTHING
        if holder is not None and holder is self.seen and holder is not self.stalled:
            self.stalled = holder
            self.unwatched = False
            effects = TO_ARM_AGAIN
        self.seen = holder
        return effects

    def is_deserted(self, now: float, closed: bool) -> bool:
        """The timer looks at a channel that it counts. Whether no thread is expected any more."""
        if not closed and now - self.last_waiter_at <= self.thresholds.memory:
            return False
        self.counted = False
        return True

    def give_up(self) -> Effects:
        """No thread comes any more: the poller and the pool do everything, as on any other channel."""
        self.waiter_owned = False
        self.unwatched = False
        return TO_GIVE_UP

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        assert not self.deferred.keys() & self.deferred_long.keys(), "R3: a reply is deferred twice"
