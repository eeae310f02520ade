"""A plan at work: counts messages, throws the dice, knows what is cut, frozen or dead, and writes down what it did.

No I/O, no threads, no clock: it is told of each message and of the time, and says what is to become of them. The same
messages on the same links meet the same fate: chance depends on the seed, the fault, the two workers and the count alone.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import assert_never

from remora.clock import NEVER
from remora.faults.kinds import Cut, Event, Freeze, Heal, Kill, MessageFault, Partition, WorkerFault
from remora.faults.plan import Plan, write_target
from remora.transport.fault_link import PASS, Fate
from remora.vocabulary.messages import MessageType


@dataclass(frozen=True)
class Record:
    """One thing that was done: when (seconds since the first plan was set), what, and to which message, link or worker."""

    at: float
    deed: str
    what: str
    kind: MessageType | None = None
    count: int = 0

    def __str__(self) -> str:
        message = f" {self.kind.name}" if self.kind is not None else ""
        which = f" #{self.count}" if self.count else ""
        return f"{self.at:9.3f} s  {self.deed}{message} {self.what}{which}"


class PlanRunner:
    """Runs one plan. It has no lock; its owner has one."""

    def __init__(self, plan: Plan, now: float, records: list[Record] | None = None, began: float | None = None) -> None:
        self.plan = plan
        self.records: list[Record] = [] if records is None else records
        self.frozen: dict[str, float] = {}  # until when
        self.killed: set[str] = set()
        self._began = now if began is None else began
        self._rules = [(i, fault) for i, fault in enumerate(plan.faults) if isinstance(fault, MessageFault)]
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._cuts: list[Cut | Heal | Partition] = []  # in the order in which they came about: the last word counts
        self._ahead: list[tuple[float, int, Callable[[float], None]]] = []  # what comes with time
        self._order = count()
        events = [fault for fault in plan.faults if not isinstance(fault, MessageFault)]
        self._counted = [event for event in dict.fromkeys(events) if event.when.after]  # what comes after messages
        for event in events:
            if not event.when.after:
                self._later(now + event.when.at, partial(self._happen, event))
        self.advance(now)

    # Messages.

    def attempt(self, sender: str, receiver: str, kind: int, payload: bytes, now: float) -> bool:
        """A request is about to be sent. Whether the attempt fails."""
        for index, fault in self._rules:
            if fault.deed == "fail" and self._hits(index, fault, sender, receiver, kind, payload, now):
                return True
        return False

    def leaving(self, sender: str, receiver: str, kind: int, numbered: bool, now: float) -> Fate:
        """A frame is on its way out. What becomes of it."""
        fate = PASS
        for index, fault in self._rules:
            if fault.deed == "fail" or (fault.kind is None and not numbered):
                continue
            if self._hits(index, fault, sender, receiver, kind, b"", now):
                fate = _worse(fate, fault)
        return fate

    def _hits(
        self, index: int, fault: MessageFault, sender: str, receiver: str, kind: int, payload: bytes, now: float
    ) -> bool:
        if fault.kind not in (None, kind) or not fault.pair.matches(sender, receiver):
            return False
        key = (index, sender, receiver, payload if fault.which.each else b"")
        self._counts[key] += 1
        seen = self._counts[key]
        if not fault.which.picks(seen):
            return False
        if fault.chance < 1.0:
            dice = random.Random(f"{self.plan.seed}/{index}/{sender}/{receiver}/{seen}")
            if dice.random() >= fault.chance:
                return False
        self._note(now, fault.deed, f"{sender}->{receiver}", MessageType(kind), seen)
        return True

    def passed(self, sender: str, receiver: str, kind: int, numbered: bool, now: float) -> bool:
        """A message has passed. Whether something follows from it."""
        happened = False
        for fault in list(self._counted):
            when = fault.when
            meant = numbered if when.kind is None else when.kind == kind
            if meant and _concerns(fault, sender, receiver):
                self._counts[(fault,)] += 1
                if self._counts[(fault,)] == when.after:
                    self._counted.remove(fault)
                    self._happen(fault, now)
                    happened = True
        return happened

    # Links and workers.

    def severed(self, one: str, other: str) -> bool:
        """Return True if there can be no connection between two workers now."""
        for fault in reversed(self._cuts):
            if isinstance(fault, Partition):
                if fault.separates(one, other):
                    return True
            elif fault.link.matches(one, other) or fault.link.matches(other, one):
                return isinstance(fault, Cut)
        return False

    def _happen(self, fault: Event, now: float) -> None:
        match fault:
            case Cut() | Partition():
                self._cuts.append(fault)
                if fault.lasting is not None:
                    self._later(now + fault.lasting, partial(self._mend, fault))
            case Heal():
                self._cuts.append(fault)
            case Freeze():
                until = NEVER if fault.lasting is None else now + fault.lasting
                self.frozen[fault.worker] = max(until, self.frozen.get(fault.worker, until))
                self._later(until, partial(self._thaw, fault))
            case Kill():
                self.killed.add(fault.worker)
            case _:
                assert_never(fault)
        self._note(now, type(fault).__name__.lower(), write_target(fault))

    def _mend(self, fault: Cut | Partition, now: float) -> None:
        if any(other is fault for other in self._cuts):  # else it was healed before
            self._cuts = [other for other in self._cuts if other is not fault]
            self._note(now, "heal", write_target(fault))

    def _thaw(self, fault: Freeze, now: float) -> None:
        if self.frozen.get(fault.worker, NEVER) <= now:  # else it works again already, or another freeze lasts longer
            del self.frozen[fault.worker]
            self._note(now, "thaw", fault.worker)

    def heal(self, now: float) -> None:
        """Everything that is cut or frozen works again."""
        self._cuts.clear()
        self.frozen.clear()
        self._note(now, "heal", "*")

    # Time.

    def _later(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._ahead, (when, next(self._order), action))

    @property
    def next_time(self) -> float:
        """The next time at which something happens by itself."""
        return self._ahead[0][0] if self._ahead else NEVER

    def advance(self, now: float) -> bool:
        """It is `now`. Whether something happened."""
        happened = False
        while self.next_time <= now:
            heapq.heappop(self._ahead)[2](now)
            happened = True
        return happened

    def _note(self, now: float, deed: str, what: str, kind: MessageType | None = None, count: int = 0) -> None:
        self.records.append(Record(now - self._began, deed, what, kind, count))


def _worse(fate: Fate, fault: MessageFault) -> Fate:
    """Return the fate of a message that this happens to, as well."""
    return Fate(
        copies=0 if fault.deed == "drop" else fate.copies * (2 if fault.deed == "duplicate" else 1),
        delay=fate.delay + fault.seconds,
        damaged=fate.damaged or fault.deed == "corrupt",
        swapped=fate.swapped or fault.deed == "reorder",
    )


def _concerns(fault: Event, one: str, other: str) -> bool:
    """Return True if a message between two workers counts for this fault."""
    if isinstance(fault, WorkerFault):
        return fault.worker in (one, other)
    # (A partition counts no messages.)
    return isinstance(fault, Cut | Heal) and (fault.link.matches(one, other) or fault.link.matches(other, one))
