"""A backward pass without tensors: workers with real ledgers and real errands, and messages that arrive in any order.

A world is what the programs of some workers left behind: messages that were sent, and on each worker which of its sources
(the roots, messages it sent) lead to which messages it received. Messages are numbered in the order they were sent, and
gradients flow from later ones to earlier ones, so there is no circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from remora.autograd.countdown import Countdown
from remora.autograd.ledger import Ledger

ROOTS = -1  # the source on worker 0 where the pass begins


@dataclass(frozen=True)
class World:
    """`messages[m]` = (sender, receiver); `leads[source]` = the messages received by its worker that it leads to."""

    messages: tuple[tuple[int, int], ...]
    leads: dict[int, frozenset[int]]

    def worker_of(self, source: int) -> int:
        return 0 if source == ROOTS else self.messages[source][0]

    def taking_part(self) -> set[int]:
        """The sources that a gradient will come to: what the search finds."""
        found, stack = set(), [ROOTS]
        while stack:
            source = stack.pop()
            if source not in found:
                found.add(source)
                stack.extend(self.leads[source])
        return found


class Worker:
    """One worker's book: its sources, and its segments with the received messages in each."""

    def __init__(self, world: World, number: int, participants: set[int]) -> None:
        self.bits = {source: bit for bit, source in enumerate(sorted(participants)) if world.worker_of(source) == number}
        self.bits = {source: bit for bit, source in enumerate(sorted(self.bits))}
        self.segments: dict[int, list[int]] = {1 << bit: [] for bit in self.bits.values()}
        for message, (_, receiver) in enumerate(world.messages):
            label = sum(1 << bit for source, bit in self.bits.items() if message in world.leads[source])
            if receiver == number and label:
                self.segments.setdefault(label, []).append(message)
        after = {
            label: {other for other in self.segments if other != label and other & label == other} for label in self.segments
        }
        self.ledger = Ledger(len(self.bits), after)


class Run:
    """One run of a pass. `events` are what can happen next: parcels and answers under way, segments being run."""

    def __init__(self, world: World, fails: tuple[int, int] | None = None) -> None:
        self.world = world
        self.fails = fails  # (worker, label) of a segment that raises
        participants = world.taking_part()
        self.workers = {
            number: Worker(world, number, participants) for number in {world.worker_of(source) for source in participants}
        }
        self.delivered: list[int] = []
        self.reports: list[str | None] = []
        self.complete_when_reported = False
        self.events: dict[str, Callable[[], None]] = {}
        countdown: Countdown[str] = Countdown(self._report)
        self._arrive(0, [ROOTS], countdown)
        countdown.finish()

    def _report(self, failure: str | None) -> None:
        self.reports.append(failure)
        self.complete_when_reported = all(worker.ledger.done for worker in self.workers.values())

    def _arrive(self, number: int, sources: list[int], countdown: Countdown[str]) -> None:
        worker = self.workers[number]
        self._start(number, worker.ledger.arrive(worker.bits[source] for source in sources), countdown)

    def _start(self, number: int, ready: list[int], countdown: Countdown[str]) -> None:
        for label in ready:
            countdown.begin()
            self.events[f"worker {number} has run {label:b}"] = lambda label=label: self._ran(number, label, countdown)

    def _ran(self, number: int, label: int, countdown: Countdown[str]) -> None:
        if self.fails == (number, label):
            countdown.finish(f"worker {number} failed")
            return
        worker = self.workers[number]
        for message in worker.segments[label]:
            countdown.begin()
            self.events[f"gradient of {message} arrives"] = partial(self._gradient_arrives, message, countdown)
        self._start(number, worker.ledger.ran(label), countdown)
        worker.ledger.check()
        countdown.finish()

    def _gradient_arrives(self, message: int, parent: Countdown[str]) -> None:
        self.delivered.append(message)

        def answer(failure: str | None) -> None:
            self.events[f"answer for {message} arrives"] = lambda: parent.finish(failure)

        countdown: Countdown[str] = Countdown(answer)
        self._arrive(self.world.messages[message][0], [message], countdown)
        countdown.finish()

    def step(self, name: str) -> None:
        """Let one thing happen."""
        self.events.pop(name)()

    def check_end(self) -> None:
        """Nothing is under way any more."""
        assert len(self.reports) == 1, "the worker that began is told once"
        if self.fails is not None:
            assert self.reports == [f"worker {self.fails[0]} failed"]
            return
        assert self.reports == [None]
        assert self.complete_when_reported, "it was told before the pass had ended everywhere"
        assert sorted(self.delivered) == sorted(self.world.taking_part() - {ROOTS}), "one gradient for each message"
        assert all(worker.ledger.done for worker in self.workers.values())

    def segments(self) -> list[tuple[int, int]]:
        """All segments of all workers."""
        return [(number, label) for number, worker in self.workers.items() for label in worker.segments]


def every_order(make: Callable[[], Run]) -> Iterator[Run]:
    """Every order in which the events of a run can happen, as far as it makes a difference; each run at its end."""
    seen: set[tuple[object, ...]] = set()
    stack: list[tuple[str, ...]] = [()]
    while stack:
        path = stack.pop()
        run = make()
        for name in path:
            run.step(name)
        books = tuple((n, w.ledger.arrived, frozenset(w.ledger.run)) for n, w in sorted(run.workers.items()))
        state = (frozenset(run.events), books, tuple(run.reports))
        if state in seen:
            continue
        seen.add(state)
        if not run.events:
            yield run
        stack.extend((*path, name) for name in run.events)
