"""The owner's half of the reference protocol: who holds a value, and when it may be freed. No I/O, clock or threads.

A value is counted by its forks: one for each reference that lives on another worker. The owner learns of a fork in one of
three ways: it is asked to make the value (`create`), it hands a reference out itself (`share`), or the new holder asks to
be counted (`request`). It forgets a fork when its holder says goodbye (`delete`) or is lost.

    O1  a value is freed once, and only when no fork of it is counted
    O2  a fork of a lost worker is counted until every other worker has confirmed the loss (`heard`): what the lost
        worker had shared before, its new holders have asked for by then, because a worker confirms a loss only after
        everything that came from the lost worker, on the same ordered session on which it asks
    O3  a worker that waits for a value that will never be made is told (`NeverMade`)
    O4  a value that our own program waits for is kept until it is made, or never will be, even if no fork is counted:
        else the call that makes it, when it comes, would make another one
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.vocabulary.effects import AskSurvivors, Effect, ForkId, Free, NeverMade, RRefId, Worker


@dataclass(slots=True)
class Owned:
    """One value: the forks that are counted, each with its holder."""

    forks: dict[ForkId, Worker] = field(default_factory=dict)
    made: bool = False  # the value exists, or the call that makes it has arrived, or it is known that it never will
    awaited: bool = False  # a reference to it came home before it was made
    creator: Worker | None = None  # who is going to have it made, if that is known and not only by its number


@dataclass(slots=True)
class Owner:
    """The values of one worker that others hold."""

    values: dict[RRefId, Owned] = field(default_factory=dict)
    unconfirmed_losses: dict[Worker, set[Worker]] = field(default_factory=dict)  # lost worker -> those to confirm it
    confirmed_losses: set[Worker] = field(default_factory=set)  # lost, and confirmed by all survivors
    unmade: set[RRefId] = field(default_factory=set)  # never to be made: their creators said so, and live

    def create(self, rref: RRefId, fork: ForkId, creator: Worker) -> list[Effect]:
        """The call that makes a value arrived."""
        owned = self.values.setdefault(rref, Owned())
        owned.made = True
        owned.forks[fork] = creator
        return []

    def share(self, rref: RRefId, fork: ForkId, holder: Worker) -> list[Effect]:
        """We hand out a reference to a value of ours: it is counted before it leaves. It may have to be made yet (O3)."""
        owned = self.values.setdefault(rref, Owned(made=True))
        owned.forks[fork] = holder
        return self._drop_if_lost(rref, fork, holder)

    def request(self, rref: RRefId, fork: ForkId, holder: Worker, creator: Worker | None = None) -> list[Effect]:
        """A new holder asks to be counted. It may come before the call that makes the value. `creator`: the living worker
        that has it made; not a former one of the same number."""
        owned = self.values.setdefault(rref, Owned())
        owned.creator = creator
        owned.forks[fork] = holder
        return self._give_up_if_doomed(rref, owned) + self._drop_if_lost(rref, fork, holder)

    def received_by_owner(self, rref: RRefId, sender: Worker, creator: Worker | None = None) -> list[Effect]:
        """A reference to a value of ours arrived: our own program waits for the value, if it is not there (O4)."""
        known = rref in self.values
        owned = self.values.setdefault(rref, Owned())
        owned.creator = creator
        if owned.made:
            return []
        owned.awaited = True
        if not known and rref.created_on != sender.id:
            # Only an answer of its creator can overtake the call that makes a value. Others are counted, or mistaken.
            return self._give_up(rref, owned)
        return self._give_up_if_doomed(rref, owned)

    def delete(self, rref: RRefId, fork: ForkId) -> list[Effect]:
        """A holder says goodbye, or what we shared was not sent after all."""
        owned = self.values.get(rref)
        if owned is None:
            return []
        owned.forks.pop(fork, None)
        return self._settle(rref, owned)

    def never_made(self, rref: RRefId, fork: ForkId) -> list[Effect]:
        """The creator says goodbye to a value whose making it could not ask for (O3)."""
        self.unmade.add(rref)  # those it shared the reference with may ask later
        owned = self.values.get(rref)
        if owned is None or owned.made:
            return self.delete(rref, fork)
        owned.forks.pop(fork, None)
        return self._give_up(rref, owned)

    def lost(self, worker: Worker, survivors: set[Worker]) -> list[Effect]:
        """A worker is lost. Its forks stay counted until the survivors have confirmed it (O2)."""
        if worker in self.confirmed_losses or worker in self.unconfirmed_losses:
            return []
        effects: list[Effect] = []
        for waiting in self.unconfirmed_losses.values():
            waiting.discard(worker)
        # The worker that says who survives may not know yet of all the losses that we know of.
        lost = {worker, *self.confirmed_losses, *self.unconfirmed_losses}
        asked = survivors - lost if self._concerns(worker) else set()
        self.unconfirmed_losses[worker] = asked
        if asked:
            effects.append(AskSurvivors(worker, frozenset(asked)))
        for other in list(self.unconfirmed_losses):
            effects += self._drop_when_confirmed(other)
        return effects

    def heard(self, survivor: Worker, worker: Worker) -> list[Effect]:
        """A survivor confirms the loss of a worker: nothing that worker sent it is still to come."""
        if worker in self.unconfirmed_losses:
            self.unconfirmed_losses[worker].discard(survivor)
            return self._drop_when_confirmed(worker)
        return []

    def _concerns(self, worker: Worker) -> bool:
        """Return True if the lost worker may have handed on a reference to a value of ours."""
        return any(worker in owned.forks.values() for owned in self.values.values())

    def _drop_when_confirmed(self, worker: Worker) -> list[Effect]:
        if self.unconfirmed_losses[worker]:
            return []
        del self.unconfirmed_losses[worker]
        self.confirmed_losses.add(worker)
        self.unmade = {rref for rref in self.unmade if rref.created_on != worker.id}
        effects: list[Effect] = []
        for rref, owned in list(self.values.items()):
            held = [fork for fork, holder in owned.forks.items() if holder == worker]
            for fork in held:
                del owned.forks[fork]
            if not owned.made and (owned.creator == worker or (owned.creator is None and rref.created_on == worker.id)):
                effects += self._give_up(rref, owned)
            elif held:
                effects += self._settle(rref, owned)
        return effects

    def _give_up_if_doomed(self, rref: RRefId, owned: Owned) -> list[Effect]:
        doomed = rref in self.unmade or (
            any(worker.id == rref.created_on for worker in self.confirmed_losses)
            if owned.creator is None
            else owned.creator in self.confirmed_losses
        )
        return self._give_up(rref, owned) if doomed and not owned.made else []

    def _give_up(self, rref: RRefId, owned: Owned) -> list[Effect]:
        owned.made = True
        return [NeverMade(rref), *self._settle(rref, owned)]

    def _drop_if_lost(self, rref: RRefId, fork: ForkId, holder: Worker) -> list[Effect]:
        return self.delete(rref, fork) if holder in self.confirmed_losses else []

    def _settle(self, rref: RRefId, owned: Owned) -> list[Effect]:
        if owned.forks or (owned.awaited and not owned.made):
            return []
        freed: list[Effect] = [Free(rref)]  # first: a step that is interrupted is taken again
        del self.values[rref]
        return freed

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        for rref, owned in self.values.items():
            awaited = owned.awaited and not owned.made
            assert owned.forks or awaited, f"O1: {rref} is kept though no worker holds it"
            lost = self.confirmed_losses.intersection(owned.forks.values())
            assert not lost, f"O2: {rref} is held by {lost}, whose loss is confirmed"
