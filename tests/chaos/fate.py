"""What happens to the workers: kills, freezes, restarts, cut cables; and the account of it in the end."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests import hosts
from tests.chaos import life
from tests.chaos.ledger import Ledger
from tests.hosts import Hosts
from tests.workers import Workers

RANKS = 5
SHORT_CUT, LONG_CUT = (0.3, 1.5), (4.5, 6.0)  # a host may be away for four seconds
FREEZE = (0.5, 6.0)


@dataclass
class Account:
    """What was done, and what came of it."""

    seed: int
    seconds: float
    faults: Counter[str]
    ledger: Ledger
    ended: set[str]  # lives that were cut short, as rank.life
    left_over: dict[str, dict[str, int]] = field(default_factory=dict)

    def complaints(self) -> list[str]:
        """All that must not be."""
        ledger = self.ledger
        found = [f"ran twice: {key}" for key in ledger.repeated()]
        found += [f"no outcome: {key}" for key in ledger.without_outcome(self.ended)]
        found += [f"wrong: {words}" for words in ledger.wrong()]
        found += ledger.untrue()
        found += [f"left over on {name}: {counts}" for name, counts in self.left_over.items() if any(counts.values())]
        return found

    def __str__(self) -> str:
        verdicts, errors = self.ledger.verdicts(), self.ledger.errors()
        abandoned = len(self.ledger.asked) - len(self.ledger.got)
        return "\n".join(
            [
                f"seed                      {self.seed}, {self.seconds:.0f} s, {RANKS} workers",
                f"faults injected           {sum(self.faults.values())}: {_listed(self.faults)}",
                f"calls made                {len(self.ledger.asked)}",
                f"  answered                {verdicts['right']}",
                f"  ended with an error     {sum(errors.values())}: {_listed(errors)}",
                f"  of callers that died    {abandoned - len(self.ledger.without_outcome(self.ended))}",
                f"  lost without an error   {len(self.ledger.without_outcome(self.ended))}",
                f"  repeated                {len(self.ledger.repeated())}",
                f"  wrong or untrue         {len(self.ledger.wrong()) + len(self.ledger.untrue())}",
                f"left over in the end      {sum(sum(counts.values()) for counts in self.left_over.values())}",
            ]
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {times}" for name, times in counts.most_common()) or "none"


class Fate:
    """Runs one story. `with_hosts`: each worker on a host of its own, whose cable can be pulled."""

    def __init__(self, seconds: float, seed: int, with_hosts: bool) -> None:
        self.seconds = seconds
        self.seed = seed
        self._chance = random.Random(seed)
        self._hosts = Hosts(RANKS) if with_hosts else None
        self._lives = [0] * RANKS
        self._faults: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._workers: Workers
        self._folder: Path

    def run(self) -> Account:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="remora-chaos-")))
            if self._hosts is not None:
                stack.enter_context(self._hosts)
            self._workers = stack.enter_context(Workers(RANKS, join=False))
            self._everybody(self._begin)
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                self._strike()
            self._everybody(lambda rank: self._workers.start(rank, life.end))
            left_over = self._let_it_settle()
            self._everybody(lambda rank: self._workers.start(rank, life.leave))
            return Account(
                self.seed, self.seconds, self._faults, Ledger().read(self._folder), self._ended, left_over
            )

    # One fault after the other.

    def _strike(self) -> None:
        deeds: list[Callable[[int], None]] = [self._kill, self._freeze, self._break, self._break]
        if self._hosts is not None:
            deeds += [self._cut_shortly, self._cut_for_long, self._flap]
        deed, rank = self._chance.choice(deeds), self._chance.randrange(RANKS)
        self._faults[deed.__name__.strip("_").replace("_", " ")] += 1
        deed(rank)
        time.sleep(self._chance.uniform(0.1, 0.5))

    def _kill(self, rank: int) -> None:
        self._workers.kill(rank)
        self._ended.add(f"{rank}.{self._lives[rank]}")
        time.sleep(self._chance.choice([0.0, 0.0, 1.0]))
        self._lives[rank] += 1
        self._workers.add(rank)
        self._begin(rank).result(timeout=40.0)

    def _freeze(self, rank: int) -> None:
        self._workers.stop(rank)
        time.sleep(self._chance.uniform(*FREEZE))
        self._workers.cont(rank)

    def _break(self, rank: int) -> None:
        for each in range(RANKS):
            self._workers.run(each, life.break_links, self._chance.randrange(1 << 30))

    def _cut_shortly(self, rank: int) -> None:
        self._cut(rank, self._chance.uniform(*SHORT_CUT))

    def _cut_for_long(self, rank: int) -> None:
        """So long that the others give it up. What it does then is its own business: it is ended, and comes anew."""
        self._cut(rank, self._chance.uniform(*LONG_CUT))
        self._kill(rank)

    def _flap(self, rank: int) -> None:
        for _ in range(10):
            self._cut(rank, self._chance.uniform(0.01, 0.05))
            time.sleep(self._chance.uniform(0.01, 0.05))

    def _cut(self, rank: int, seconds: float) -> None:
        assert self._hosts is not None
        self._hosts.cut(rank)
        time.sleep(seconds)
        self._hosts.heal(rank)

    # Beginning and end.

    def _begin(self, rank: int):  # type: ignore[no-untyped-def]
        number = self._lives[rank]
        book = str(self._folder / f"book-{rank}-{number}")
        place = None if self._hosts is None else (self._hosts.namespace(rank), self._hosts.address(rank))
        method = self._workers.init_method
        return self._workers.start(rank, life.begin, rank, number, book, method, place, self.seed)

    def _everybody(self, start: Callable[[int], object]) -> None:
        for pending in [start(rank) for rank in range(RANKS)]:
            pending.result(timeout=60.0)  # type: ignore[attr-defined]

    def _let_it_settle(self) -> dict[str, dict[str, int]]:
        deadline = time.monotonic() + 15.0
        while True:
            found = {f"worker{rank}": self._workers.run(rank, life.left_over) for rank in range(RANKS)}
            if not any(any(counts.values()) for counts in found.values()) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


def run(seconds: float, seed: int, with_hosts: bool | None = None) -> Account:
    """One story of that length."""
    return Fate(seconds, seed, not hosts.why_not() if with_hosts is None else with_hosts).run()
