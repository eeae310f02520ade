"""Remembers the calls that a worker made and served, and what else happened: always on, bounded, and cheap.

A call leaves one tuple at each of its ends, when it is over; of a flood, not all calls do (`Recorder`). The tuple has
numbers and texts that were there anyway, and no object of the program, which must not live a moment longer because it was
recorded. All else is done later, and not by the thread of a call:

    fresh     tuples that have just come; twice a second, and more often under load, the timer thread takes them out
    history   the last few thousand of them, and
    tallies   how often and how long, by function and worker, in buckets of which each is twice as wide as the one before

No lock is waited for. `deque.append` and `deque.popleft` are atomic under the interpreter lock. One thread at a time folds;
another that wants to meanwhile goes on without (`_folding`). Tuples that come too fast push the oldest out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count, pairwise
from operator import itemgetter
from random import random
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

MADE, SERVED = 0, 1  # the two ends of a call
# What else is noted: the values of `remora.observer.model.EventKind`, which is above this file.
JOINED, SUSPECTED, RECOVERED, LEFT, DIED = "joined", "suspected", "recovered", "left", "died"
TIMED_OUT = "timed out"
CONNECTED, DISCONNECTED, REFUSED, FAULT = "connected", "disconnected", "refused", "fault"
UNFOLDED = 8  # times as many fresh tuples as remembered ones are kept until they are folded
DENSE = 256  # tuples that are counted one by one each time; the rest is estimated, so that a flood costs no more
RATE = 500.0  # ends of calls a second that are remembered; of more, a sample
LEAST_TIME = 0.04  # seconds after which it is known how many come in a second
ENOUGH = 512  # fresh tuples: of what comes before the next fold, one of `SOME` is remembered
SOME = 64
MOST_NOTES = 1024
MOST_TALLIES = 2048
SET = 0.01  # seconds by which two clocks differ that were not set, but read one after the other
BUCKETS = 64  # the last begins at 2**63 nanoseconds
OTHERS = "", "(others)"  # the module and name under which functions are counted that are one too many
_TO_NANOSECONDS = 1e9
_END, _FLAGS = itemgetter(0), itemgetter(9)  # of a tuple (`Raw`)


class Ended(NamedTuple):
    """One end of a call that is over. Times are of the worker's clock. On the path of a call a plain tuple is made: to make
    one of these takes several times as long."""

    end: int  # MADE or SERVED
    peer: str  # the other end
    id: int  # the number of the call at its caller
    module: str | None
    name: Any  # of the function: a text, unless the program made something else of it
    came: float  # SERVED: when the request was read
    began: float  # MADE: when the call was made; SERVED: when the function was called
    ended: float
    thread: int  # that waited for it, or ran it; 0: none waited
    flags: int  # of the reply
    bytes: int  # SERVED: of the request
    # MADE: the request that was served meanwhile: its deadline, caller (empty: there was none) and number, and the trace of
    # which the call is a part, if there is one (`remora.agent.calls.call_trace`)
    parent: tuple[float, str, int] | tuple[float, str, int, str] | None


class Note(NamedTuple):
    """Something else that happened."""

    time: float  # of the wall clock
    kind: str  # JOINED …
    peer: str | None
    text: str


class Tally:
    """The distribution of the durations of one thing."""

    __slots__ = ("buckets", "count", "failed", "longest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0
        self.total = 0.0
        self.longest = 0.0
        self.buckets = [0] * BUCKETS  # [k]: from 2**k to 2**(k + 1) nanoseconds

    def add(self, seconds: float, weight: int) -> None:
        """Count so many more, each of which took so long."""
        self.count += weight
        if seconds > 0.0:  # (a clock of a test may stand still)
            self.total += seconds * weight
            if seconds > self.longest:
                self.longest = seconds
            self.buckets[int(seconds * _TO_NANOSECONDS).bit_length() - 1 if seconds < 1e9 else -1] += weight
        else:
            self.buckets[0] += weight


Raw = tuple[int, str, int, str | None, Any, float, float, float, int, int, int, Any]  # the fields of `Ended`
OnFold = Callable[[list[Raw]], None]
OnNote = Callable[[Note], None]
TallyKey = tuple[str, str | None, str, str]  # measure, module, name, peer


class Recorder:
    """The memory of one worker. `failed` is the flag of a reply that is an error. With a size of 0 it records nothing.

    At the end of a call its thread takes a number (`number_made`, `number_served`): so many there are, exactly. It makes a
    tuple if `number & sampling` is zero, and in any case if the call failed, or took longer than `longest_made` or
    `longest_served`. In a flood, to make all of them would cost each call a few hundredths, and they would push out what
    happened a moment ago.
    """

    def __init__(self, size: int, failed: int) -> None:
        self._failed = failed
        self._fresh: deque[Raw] = deque(maxlen=UNFOLDED * size)
        self._history: deque[Raw] = deque(maxlen=size)
        self._notes: deque[Note] = deque(maxlen=MOST_NOTES)
        # By end, module, name and peer; written by the thread that folds.
        self._known: dict[tuple[int, str | None, str, str], tuple[Tally, Tally | None]] = {}
        self._folding = {0: True}  # the thread that takes the entry out folds, and puts it back (`del` is atomic)
        self.size = size
        self._wall = float("-inf")
        self._counters = (count(), count())  # by end
        self.number_made, self.number_served = (each.__next__ for each in self._counters)
        # Written by the thread that folds, by one that subscribes, and by one that finds too many fresh tuples. Whichever
        # comes last, the next fold decides again. Read at the end of each call.
        self.sampling = 0  # one less than the power of two of which one end is remembered
        self.longest_made = self.longest_served = float("inf")  # seconds
        self._sampled_at = time.monotonic()
        self._came = 0  # ends since then
        self._uncounted = [0, 0]  # by end: calls that are in no tally, since no tuple was made of them
        self.made = self.served = self.failures = 0  # calls that are over; written by the thread that folds
        # Who is told; a tuple that is replaced, so that a thread that walks it sees no change.
        self._on_fold: tuple[OnFold, ...] = ()
        self._on_note: tuple[OnNote, ...] = ()

    def subscribe(self, on_fold: OnFold | None = None, on_note: OnNote | None = None) -> None:
        """Have `on_fold` called with all ends of calls from now on, in batches, by the thread that folds, and `on_note` with
        each note, by the thread that makes it. Neither may wait for anything. One thread at a time subscribes."""
        self._on_fold += () if on_fold is None else (on_fold,)
        if self._on_fold:
            self.sampling = 0
        self._on_note += () if on_note is None else (on_note,)

    def unsubscribe(self, on_fold: OnFold | None = None, on_note: OnNote | None = None) -> None:
        """Undo `subscribe`. What is under way may still come."""
        self._on_fold = tuple(each for each in self._on_fold if each != on_fold)
        self._on_note = tuple(each for each in self._on_note if each != on_note)

    def note(self, kind: str, peer: str | None = None, text: str = "") -> None:
        """Remember something that is no call. Any thread, any time."""
        note = Note(time.time(), kind, peer, text)
        if self.size:
            self._notes.append(note)
        for listener in self._on_note:
            listener(note)

    def remember(self, end: Raw) -> None:
        """Remember the end of a call. Any thread, any time."""
        fresh = self._fresh
        fresh.append(end)
        if len(fresh) > ENOUGH and self.sampling < SOME - 1 and not self._on_fold:
            self._sample(SOME - 1)

    def fold(self) -> int:
        """Sort in what has come; return how many calls ended. It takes less than a millisecond."""
        fresh = self._fresh
        if not self.size:
            return 0
        try:
            del self._folding[0]  # (no call: no exception of a signal handler strikes between this and the next `try`)
        except KeyError:
            return 0  # another thread does
        try:
            # No other thread takes from the left, and one that appends to a full deque leaves it full: these are there.
            batch = [fresh.popleft() for _ in range(len(fresh))]
            made, served = map(_next_of, self._counters)
            came = (made - self.made, served - self.served)
            self.made, self.served = made, served
            self._history.extend(batch)
            self._count(batch, came)
            for listener in self._on_fold if batch else ():
                listener(batch)
            self._decide(batch, sum(came))
        finally:
            self._folding[0] = True
        return sum(came)

    def _decide(self, batch: list[Raw], came: int) -> None:
        """Decide of how many ends one is remembered from here on, and from which duration on all are: a call that takes
        longer than those of a moment ago is what the reader looks for."""
        self._came += came
        now = time.monotonic()
        if (passed := now - self._sampled_at) < LEAST_TIME:
            return
        times = int(self._came / (passed * RATE))
        self._sampled_at, self._came = now, 0
        if batch:
            self.longest_made, self.longest_served = _longest(batch, MADE), _longest(batch, SERVED)
        self._sample((1 << times.bit_length()) - 1)

    def _sample(self, sampling: int) -> None:
        """Remember less from here on, unless all is wanted, as by a trace. Write first, then look: `subscribe` says first
        that all is wanted, and writes then, so the later of the two sees the other."""
        self.sampling = sampling
        if self._on_fold:
            self.sampling = 0

    def _count(self, batch: list[Raw], new: tuple[int, int]) -> None:
        """Count what has come, `new` by end. Of more than `DENSE` tuples so many are drawn, each for its neighbours, too,
        and for ends of which none was made: then how often each function was called, and how long it took, is an estimate.
        How many there were is exact, and how many failed.

        What is done for each tuple is done by C code.
        """
        known, failed, size = self._known, self._failed, len(batch)
        served = sum(map(_END, batch))  # (SERVED is 1, and MADE is 0)
        self._uncounted[MADE] += new[MADE] - (size - served)
        self._uncounted[SERVED] += new[SERVED] - served
        if size <= DENSE:
            drawn = [(each, 1) for each in batch]
        else:
            edges = [n * size // DENSE for n in range(DENSE + 1)]
            drawn = [(batch[first + int(random() * (end - first))], end - first) for first, end in pairwise(edges)]
        for (end, peer, _, module, name, came, began, ended, _, _, _, _), weight in self._weighted(drawn):
            try:
                call, queue = known[end, module, name, peer]
            except (KeyError, TypeError):  # (the program may have made something of a name that cannot be hashed)
                call, queue = self._tallies_of(end, module, name, peer)
            call.add(ended - began, weight)
            if queue is not None:
                queue.add(began - came, weight)
        if any(flags & failed for flags in set(map(_FLAGS, batch))):
            for end, peer, _, module, name, _, _, _, _, flags, _, _ in batch:
                if flags & failed:
                    self._tallies_of(end, module, name, peer)[0].failed += 1
                    self.failures += 1

    def _weighted(self, drawn: list[tuple[Raw, int]]) -> list[tuple[Raw, int]]:
        """Return what was drawn, each with its share of the ends of which no tuple was made: these went well, and were
        quick."""
        for end, longest in ((MADE, self.longest_made), (SERVED, self.longest_served)) if self.sampling else ():
            quick = [
                n
                for n, (each, _) in enumerate(drawn)
                if each[0] == end and each[7] - each[6] <= longest and not each[9] & self._failed
            ]
            owed = self._uncounted[end]
            if quick and owed > 0:
                self._uncounted[end] = 0
                for place, n in enumerate(quick):
                    share = owed * (place + 1) // len(quick) - owed * place // len(quick)
                    drawn[n] = (drawn[n][0], drawn[n][1] + share)
        return drawn

    def _tallies_of(self, end: int, module: str | None, name: object, peer: str) -> tuple[Tally, Tally | None]:
        """The tallies of a function: how long it took, and how long it waited for its turn."""
        if not isinstance(name, str):
            module, name = OTHERS
        if (end, module, name, peer) not in self._known and len(self._known) >= MOST_TALLIES:
            module, name = OTHERS
        return self._known.setdefault((end, module, name, peer), (Tally(), Tally() if end == SERVED else None))

    # Views, for any thread.

    def wall(self, now: float) -> float:
        """Return the time of the wall clock when the worker's clock was at zero; `now` is what it says. The same each time,
        as long as neither clock is set: an event then has the same time whenever it is looked at."""
        found = time.time() - now
        if abs(found - self._wall) > SET:
            self._wall = found
        return self._wall

    def ends(self) -> list[Raw]:
        """Return the ends of calls that are remembered, oldest first: thousands, so they are plain tuples still."""
        self.fold()
        return copied(self._history) + copied(self._fresh)

    def calls(self) -> list[Ended]:
        """Return the ends of calls that are remembered, oldest first."""
        return [Ended._make(each) for each in self.ends()]

    def notes(self) -> list[Note]:
        """Return what else is remembered, oldest first."""
        return copied(self._notes)

    def tallies(self) -> list[tuple[TallyKey, Tally]]:
        """Return how often and how long, by measure ("call", "queue" or "run"), function and worker."""
        self.fold()
        found: list[tuple[TallyKey, Tally]] = []
        for (end, module, name, peer), (call, queue) in self._known.copy().items():
            found.append((("call" if end == MADE else "run", module, name, peer), call))
            if queue is not None:
                found.append((("queue", module, name, peer), queue))
        return found


def copied(queue: deque[T]) -> list[T]:
    """Return a copy of a queue to which other threads append."""
    while True:
        try:
            return list(queue)
        except RuntimeError:  # it changed in the midst of that
            continue


def _longest(batch: list[Raw], end: int) -> float:
    """Return how long the longest took; if there was none, all are remembered."""
    return max((each[7] - each[6] for each in batch if each[0] == end), default=0.0)


def _next_of(counter: count[int]) -> int:
    """Return what a counter would give next, without taking it: how often it was asked."""
    return int(repr(counter)[len("count(") : -1])
