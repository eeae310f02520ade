"""What a worker of a model world does with a message, and with what its machines ask for: a mirror of `remora.rref`.

A crash loses what the crashed worker sent and nobody has read: it stays under way and is not delivered. Whoever learns of
the crash reads nothing more from there. So "lost from some point on" is the same as "learned before it was read".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from remora.vocabulary.effects import (
    AskOwner,
    AskSurvivors,
    Effect,
    ForkId,
    Free,
    Goodbye,
    NeverMade,
    RRefId,
    TellParent,
)
from remora.vocabulary.ids import GloballyUniqueId
from tests.model.explorer import BrokenPromise
from tests.model.reference_state import KEYS, NOTHING, Kind, Message, Site, World, message, show


def promise(kept: bool, text: str, *about: GloballyUniqueId) -> None:
    """A promise that must be kept here. The text names what it is about."""
    if not kept:
        raise BrokenPromise(text.format(*map(show, about)))


class Driver:
    """One move under way. It copies what it touches."""

    def __init__(self, world: World) -> None:
        self.scenario = world.scenario
        self.sites = list(world.sites)
        self.lanes = list(world.lanes)
        self.loose = world.loose
        self.alive = world.alive
        self.used = world.used
        self.losses = world.losses
        self._touched: set[int] = set()

    def done(self) -> World:
        """The world after the move."""
        for worker in self._touched:
            self.sites[worker].owner.check()
            self.sites[worker].holder.check()
        sites, lanes = tuple(self.sites), tuple(self.lanes)
        return World(self.scenario, sites, lanes, self.loose, self.alive, self.used, self.losses)

    def site(self, worker: int) -> Site:
        """A worker, to be changed."""
        if worker not in self._touched:
            self._touched.add(worker)
            self.sites[worker] = self.sites[worker].clone()
        return self.sites[worker]

    # What travels.

    def send(
        self, kind: Kind, source: int, target: int,
        rref: RRefId = NOTHING, fork: ForkId = NOTHING, told: bool = True, about: int = -1,
    ) -> None:  # fmt: skip
        """Put a request into its lane. To a worker known to be lost nothing is sent; one that crashed reads nothing."""
        if target in self.alive and target not in self.sites[source].lost:
            lane = source * self.scenario.workers + target
            self.lanes[lane] += (message(kind, source, target, rref, fork, told, about),)

    def let_loose(
        self, kind: Kind, source: int, target: int,
        rref: RRefId = NOTHING, fork: ForkId = NOTHING, told: bool = True, about: int = -1,
    ) -> None:  # fmt: skip
        """Send something that is not ordered with anything else."""
        if target in self.alive and target not in self.sites[source].lost:
            self.loose |= {message(kind, source, target, rref, fork, told, about)}

    def perform(self, worker: int, effects: Iterable[Effect]) -> None:
        """Carry out what the machines of a worker asked for."""
        site = self.site(worker)
        for effect in effects:
            match effect:
                case AskOwner(owner, rref, fork):
                    if owner.id in site.lost:
                        site.holder.forget(fork)
                    self.send("fork request", worker, owner.id, rref=rref, fork=fork)
                case TellParent(parent, fork):
                    self.send("child accept", worker, parent.id, fork=fork)
                case Goodbye(owner, rref, fork):
                    self.send("user delete", worker, owner.id, rref=rref, fork=fork)
                case Free(rref):
                    promise(rref in site.table, "S2: {} is freed twice", rref)
                    self._free(site, rref)
                case NeverMade(rref):
                    if rref in site.table and site.status.get(rref, "waiting") == "waiting":
                        site.status[rref] = "failed"
                case AskSurvivors(lost, survivors):
                    for survivor in survivors:
                        self.let_loose("gone", worker, survivor.id, about=lost.id)
                case _:
                    assert_never(effect)

    def _free(self, site: Site, rref: RRefId) -> None:
        site.table -= {rref}
        if site.status[rref] == "waiting":
            promise(rref not in site.handles, "L2: {} is forgotten while the program of its owner waits for it", rref)
        if site.status[rref] != "made" and rref not in site.handles:
            del site.status[rref]  # it was only a placeholder

    def keep(self, site: Site, rref: RRefId) -> None:
        """Have a value in the table; a placeholder for it, if it is not made yet."""
        site.table |= {rref}
        site.status.setdefault(rref, "waiting")

    # What arrives.

    def receive(self, got: Message) -> None:
        """What the reader of a message does with it."""
        me, source, rref, fork = got.target, got.source, got.rref, got.fork
        site = self.site(me)
        match got.kind:
            case "create":
                self.perform(me, site.owner.create(rref, fork, KEYS[source]))
                self.keep(site, rref)
                if site.status[rref] == "waiting":
                    site.status[rref] = "made"
                self.let_loose("confirm", me, source, fork=fork)
            case "reference" | "reference in reply":
                self._arrive(site, got)
            case "fork request":
                self.keep(site, rref)
                self.perform(me, site.owner.request(rref, fork, KEYS[source]))
                self.let_loose("confirm", me, source, fork=fork)
            case "user delete":
                owned = site.owner.values.get(rref)
                promise(owned is not None and fork in owned.forks, "H1: goodbye of {}, which is not counted", fork)
                self.perform(me, site.owner.delete(rref, fork))
            case "never made":
                self.perform(me, site.owner.never_made(rref, fork))
            case "child accept":
                self.perform(me, site.holder.accepted(fork))
            case "confirm":
                self.perform(me, site.holder.confirm(fork))
            case "gone":
                self.asked_about(me, source, got.about)
            case "heard":
                self.perform(me, site.owner.heard(KEYS[source], KEYS[got.about]))
            case "fetch":
                # Served by a thread of the pool, some time later.
                self.loose |= {message("serve fetch", source, me, rref, fork, True, -1)}
            case "serve fetch":
                # What was never asked for may be fetched by its creator: the answer is an error.
                never = self.scenario.values[rref.local_id].unsent and source == rref.created_on
                promise(rref in site.table or never, "S1: {} is fetched and not there", rref)
                self.let_loose("fetched", me, source, rref, fork)
            case "fetched":
                site.fetching -= {(rref, fork)}
            case _:
                assert_never(got.kind)

    def _arrive(self, site: Site, got: Message) -> None:
        me, source, rref, fork = got.target, got.source, got.rref, got.fork
        owner = self.scenario.values[rref.local_id].owner
        if owner == me:
            self.received_by_owner(site, got)
        else:
            self.perform(me, site.holder.adopt(rref, fork, KEYS[owner], KEYS[source]))

    def received_by_owner(self, site: Site, got: Message) -> None:
        """A reference arrived on the owner of its value, whose program has the value in hand now."""
        me, source, rref, fork = got.target, got.source, got.rref, got.fork
        # The answer of a creator may overtake the call that makes a value, or that call is not sent.
        unmade = rref.created_on == source and site.status.get(rref) != "made"
        promise(rref in site.table or unmade, "S1: {} came home and is not there", rref)
        site.handles[rref] = site.handles.get(rref, 0) + 1
        self.keep(site, rref)
        self.perform(me, site.owner.received_by_owner(rref, KEYS[source]))
        if source == me:
            self.perform(me, site.owner.delete(rref, fork))
        elif got.told:
            self.send("child accept", me, source, fork=fork)

    # Losses.

    def learn(self, worker: int, lost: int) -> None:
        """A worker learns that another one is lost: it reads nothing more from there."""
        site = self.site(worker)
        site.lost |= {lost}
        self.lanes[lost * self.scenario.workers + worker] = ()
        self.loose = frozenset(each for each in self.loose if (each.source, each.target) != (lost, worker))
        # Who is lost is noticed by several threads: it may be told here that somebody survived who is known not to.
        survivors = {KEYS[other] for other in range(self.scenario.workers) if other not in (worker, lost)}
        values = self.scenario.values
        site.fetching = frozenset(each for each in site.fetching if values[each[0].local_id].owner != lost)
        _, effects = site.holder.lost(KEYS[lost])
        self.perform(worker, [*effects, *site.owner.lost(KEYS[lost], survivors)])

    def asked_about(self, worker: int, owner: int, lost: int) -> None:
        """An owner wants to know when we know of a loss, behind everything that we had to say."""
        if lost not in self.site(worker).lost:
            self.learn(worker, lost)
        self.send("heard", worker, owner, about=lost)
