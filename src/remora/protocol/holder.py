"""A holder's half of the reference protocol: when a fork may say goodbye to its owner. No I/O, clock or threads.

A fork is one reference to a value of another worker. It is made here by asking for the value (`create`), or arrives in a
message (`adopt`), and while it lives it may be handed on (`share`), which makes a child of it on another worker.

    H1  goodbye is said once per fork, and not before the program dropped it
    H2  nor before the owner counts it: else the goodbye could come first, and the fork would be counted for ever
    H3  nor while a child that was handed on is not counted by the owner: until then only its parent keeps the value
    H4  a child on a lost worker is not waited for, nor one that is made for it later (the answer to a call of its), and
        nothing is said to a lost owner

A fork that came from the owner is counted before it leaves there. One that came from another holder asks to be counted,
and the program sees it only when the answer is there (`confirm`), so a holder that hands on an arrived reference is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.vocabulary.effects import AskOwner, Effect, ForkId, Goodbye, RRefId, TellParent, Worker


@dataclass(slots=True)
class Held:
    """One fork living here."""

    rref: RRefId
    owner: Worker
    parent: Worker | None = None  # whom to tell when the owner counts us; None if it knows, or need not know
    confirmed: bool = False
    in_use: bool = True
    children: dict[ForkId, Worker] = field(default_factory=dict)  # handed on, not counted yet -> to whom


@dataclass(slots=True)
class Holder:
    """The references of one worker to values of others."""

    forks: dict[ForkId, Held] = field(default_factory=dict)
    parents: dict[ForkId, ForkId] = field(default_factory=dict)  # child -> the fork here that it was made from
    gone: set[Worker] = field(default_factory=set)  # lost workers

    def create(self, rref: RRefId, fork: ForkId, owner: Worker) -> list[Effect]:
        """We ask another worker to make a value; the answer to that call is `confirm`. Also in the midst of another step: it
        adds to one table, and others look at a copy of that."""
        self.forks[fork] = Held(rref, owner)
        return []

    def adopt(self, rref: RRefId, fork: ForkId, owner: Worker, sender: Worker) -> list[Effect]:
        """A reference arrived in a message."""
        if sender == owner:
            self.forks[fork] = Held(rref, owner, confirmed=True)
            return []
        self.forks[fork] = Held(rref, owner, parent=sender)
        return [AskOwner(owner, rref, fork)]

    def share(self, fork: ForkId, child: ForkId, to: Worker) -> None:
        """The program hands a reference on: `child` is what arrives at `to`."""
        if to in self.gone:
            return  # H4
        self.forks[fork].children[child] = to
        self.parents[child] = fork

    def confirm(self, fork: ForkId) -> list[Effect]:
        """The owner counts this fork."""
        held = self.forks.get(fork)
        if held is None or held.confirmed:
            return []
        held.confirmed = True
        told: list[Effect] = [] if held.parent is None else [TellParent(held.parent, fork)]
        return told + self._leave(fork, held)

    def accepted(self, child: ForkId) -> list[Effect]:
        """A child is counted by the owner (or was not sent after all)."""
        fork = self.parents.pop(child, None)
        held = None if fork is None else self.forks.get(fork)
        if fork is None or held is None:
            return []
        held.children.pop(child, None)
        return self._leave(fork, held)

    def drop(self, fork: ForkId) -> list[Effect]:
        """The program does not use this fork any more."""
        held = self.forks.get(fork)
        if held is None:
            return []
        held.in_use = False
        return self._leave(fork, held)

    def forget(self, fork: ForkId) -> None:
        """The fork is worthless: its owner is lost, or never heard of it. Nothing is said (H4)."""
        held = self.forks.pop(fork, None)
        if held is not None:
            for child in held.children:
                self.parents.pop(child, None)

    def lost(self, worker: Worker) -> tuple[list[tuple[ForkId, bool]], list[Effect]]:
        """A worker is lost: (forks of its values, worthless now, and whether the program uses each; effects)."""
        self.gone.add(worker)
        forks = self.forks.copy()
        worthless = [(fork, held.in_use) for fork, held in forks.items() if held.owner == worker]
        effects: list[Effect] = [
            TellParent(held.parent, fork)  # it may not know of the loss, and would wait for ever
            for fork, held in forks.items()
            if held.owner == worker and not held.confirmed and held.parent is not None and held.parent not in self.gone
        ]
        for fork, _ in worthless:
            self.forget(fork)
        for held in self.forks.copy().values():
            for child in [child for child, to in held.children.items() if to == worker]:
                effects += self.accepted(child)
        return worthless, effects

    def _leave(self, fork: ForkId, held: Held) -> list[Effect]:
        if held.in_use or not held.confirmed or held.children:
            return []
        goodbye: list[Effect] = [Goodbye(held.owner, held.rref, fork)]  # first: a step that is interrupted is taken again
        del self.forks[fork]
        return goodbye

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        for fork, held in self.forks.items():
            assert held.in_use or not held.confirmed or held.children, f"H1: {fork} should have left"
            assert all(self.parents.get(child) == fork for child in held.children), f"H3: {fork} has lost a child"
        assert set(self.parents.values()) <= set(self.forks), "a child of a fork that is gone"
