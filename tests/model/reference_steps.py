"""The moves of a model world: messages arrive, programs use references, workers crash."""

from __future__ import annotations

from remora.vocabulary.effects import ForkId, RRefId
from tests.model.reference_driver import Driver
from tests.model.reference_state import KEYS, Message, Share, Site, first_fork, rref_of, shared_fork

GONE = Site()  # what is left of a worker that crashed


class Step(Driver):
    """One move: one of the methods below, once."""

    def deliver(self, source: int, target: int) -> None:
        """The first message of a lane is read."""
        lane = source * self.scenario.workers + target
        first, *rest = self.lanes[lane]
        self.lanes[lane] = tuple(rest)
        self.receive(first)

    def take(self, loose: Message) -> None:
        """A loose message is read."""
        self.loose -= {loose}
        self.receive(loose)

    # What programs do.

    def create(self, value: int) -> None:
        """`remote`: a value is asked for, and the reference to it is there at once."""
        made, rref, fork = self.scenario.values[value], rref_of(self.scenario, value), first_fork(self.scenario, value)
        self.used |= {("create", value)}
        site = self.site(made.creator)
        if made.owner not in site.lost:
            self.perform(made.creator, site.holder.create(rref, fork, KEYS[made.owner]))
            if not made.unsent:
                self.send("create", made.creator, made.owner, rref=rref, fork=fork)

    def give_up_creation(self, value: int) -> None:
        """The creator learns that the call which makes a value was not sent."""
        made, rref, fork = self.scenario.values[value], rref_of(self.scenario, value), first_fork(self.scenario, value)
        self.used |= {("give up", value)}
        self.site(made.creator).holder.forget(fork)
        self.send("never made", made.creator, made.owner, rref=rref, fork=fork)

    def lose_patience(self, value: int) -> None:
        """The creator does not wait for the answer any more. Its reference is spoilt; the owner may know of it."""
        creator, fork = self.scenario.values[value].creator, first_fork(self.scenario, value)
        self.used |= {("patience", value)}
        site = self.site(creator)
        site.spoilt |= {fork}
        self.perform(creator, site.holder.confirm(fork))

    def share(self, number: int, rref: RRefId, parent: ForkId | None) -> None:
        """A reference is packed into a message: a fork that lives here, or (None) a value that is owned here."""
        self.used |= {("share", number)}
        share, child = self.scenario.shares[number], shared_fork(self.scenario, number)
        site, to = self.site(share.source), KEYS[share.target]
        told = True
        if parent is None:
            self.keep(site, rref)
            self.perform(share.source, site.owner.share(rref, child, to))
        elif share.target == self.scenario.values[rref.local_id].owner and not share.reply:
            told = False  # our goodbye cannot overtake it
        else:
            site.holder.share(parent, child, to)
        if share.fails or (share.target in site.lost and not share.reply):
            site.unsent |= {(rref, child)}
        else:
            self._post(share, rref, child, told)

    def _post(self, share: Share, rref: RRefId, child: ForkId, told: bool) -> None:
        if share.reply:
            self.let_loose("reference in reply", share.source, share.target, rref=rref, fork=child, told=told)
        else:
            self.send("reference", share.source, share.target, rref=rref, fork=child, told=told)

    def undo(self, worker: int, rref: RRefId, child: ForkId) -> None:
        """A message with a reference in it was not sent after all."""
        site = self.site(worker)
        site.unsent -= {(rref, child)}
        if self.scenario.values[rref.local_id].owner == worker:
            self.perform(worker, site.owner.delete(rref, child))
        else:
            self.perform(worker, site.holder.accepted(child))

    def drop(self, worker: int, fork: ForkId) -> None:
        """Garbage collection of a reference."""
        self.perform(worker, self.site(worker).holder.drop(fork))

    def let_go(self, worker: int, rref: RRefId) -> None:
        """Garbage collection of a reference on the owner."""
        site = self.site(worker)
        site.handles[rref] -= 1
        if not site.handles[rref]:
            del site.handles[rref]

    def fetch(self, number: int, fork: ForkId) -> None:
        """`to_here`: the reference is kept until the answer comes."""
        worker = self.scenario.fetches[number]
        self.used |= {("fetch", number)}
        site = self.site(worker)
        held = site.holder.forks[fork]
        site.fetching |= {(held.rref, fork)}
        self.send("fetch", worker, held.owner.id, rref=held.rref, fork=fork)

    # Crashes.

    def crash(self, worker: int) -> None:
        """A worker is gone. Nobody knows yet; what was sent to it is lost, and what its program did does not matter."""
        self.alive -= {worker}
        self.losses -= 1
        self.sites[worker] = GONE
        shares = self.scenario.shares
        self.used = frozenset(each for each in self.used if each[0] != "share" or shares[each[1]].source != worker)
        for source in range(self.scenario.workers):
            self.lanes[source * self.scenario.workers + worker] = ()
        self.loose = frozenset(each for each in self.loose if each.target != worker)
