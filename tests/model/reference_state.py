"""A few workers as one value: their reference machines, what is under way between them, what their programs may do.

The machines are the real ones of `remora.protocol`; around them is only what the promises are about. No moves here.

Between two workers there are two ways. Requests of one to the other travel on a *lane*, in order. Everything else is
*loose* and arrives in any order: replies (their order is not relied on), and requests that are not acted on by the
thread that reads them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owned, Owner
from remora.vocabulary.effects import ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId, WorkerKey

NAMES = "ABCDEFGH"
KEYS = tuple(WorkerKey(id, "first start") for id in range(len(NAMES)))
FIRST_FORK = 100  # numbers below are values'
NOTHING = GloballyUniqueId(-1, -1)


@dataclass(frozen=True, slots=True)
class Made:
    """A value, and how it comes to be."""

    owner: int
    creator: int  # who calls `remote`; the owner itself for `RRef(value)`
    unsent: bool = False  # the call that makes it is given up before it left
    impatient: bool = False  # its creator may give up waiting for the answer


@dataclass(frozen=True, slots=True)
class Share:
    """Something a program may do once: hand a reference it has to another worker, or to itself."""

    source: int
    target: int
    reply: bool = False  # as the answer to a call, not as an argument of one
    fails: bool = False  # the message is packed and then not sent


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world before its first move, and what may happen in it."""

    name: str
    workers: int
    values: tuple[Made, ...]
    shares: tuple[Share, ...] = ()
    fetches: tuple[int, ...] = ()  # workers; each entry is one `to_here`
    mortal: tuple[int, ...] = ()
    losses: int = 0  # how many of the mortal crash, at most


@cache
def rref_of(scenario: Scenario, value: int) -> RRefId:
    """The id of a value."""
    return GloballyUniqueId(scenario.values[value].creator, value)


@cache
def first_fork(scenario: Scenario, value: int) -> ForkId:
    """The fork that the creator of a value holds."""
    return GloballyUniqueId(scenario.values[value].creator, FIRST_FORK + value)


@cache
def shared_fork(scenario: Scenario, share: int) -> ForkId:
    """The fork that a share makes. Numbered by the script, so that it does not matter what was done first."""
    return GloballyUniqueId(scenario.shares[share].source, FIRST_FORK + len(scenario.values) + share)


Kind = Literal[
    "create", "reference", "fork request", "child accept", "user delete", "never made", "heard", "fetch",  # in lanes
    "confirm", "fetched", "gone", "serve fetch", "reference in reply",  # loose
]  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """What is under way. There is one of each (`message`), so it is compared by identity."""

    kind: Kind
    source: int
    target: int
    rref: RRefId = NOTHING
    fork: ForkId = NOTHING
    told: bool = True  # of a reference that comes home: whether its parent waits to be told
    about: int = -1  # who is lost

    def __str__(self) -> str:
        what = [show(self.rref), show(self.fork), "" if self.about < 0 else NAMES[self.about]]
        return f"{self.kind} {' '.join(filter(None, what))}".strip()


message = cache(Message)


def show(id: GloballyUniqueId) -> str:
    """How a value or a fork is called in a counterexample: v0; b1, the fork that worker B numbered 1."""
    if id.local_id >= FIRST_FORK:
        return f"{NAMES[id.created_on].lower()}{id.local_id - FIRST_FORK}"
    return "" if id is NOTHING else f"v{id.local_id}"


Status = Literal["waiting", "made", "failed"]


@dataclass(slots=True)
class Site:
    """One worker: its machines, its table of values and what its program has in hand."""

    owner: Owner = field(default_factory=Owner)
    holder: Holder = field(default_factory=Holder)
    lost: frozenset[int] = frozenset()  # workers it knows to be lost
    status: dict[RRefId, Status] = field(default_factory=dict)  # of values of its own, as far as it heard of them
    table: frozenset[RRefId] = frozenset()  # those that are kept for others
    handles: dict[RRefId, int] = field(default_factory=dict)  # those its own program has in hand
    spoilt: frozenset[ForkId] = frozenset()  # references that its program cannot use: their creation failed
    unsent: frozenset[tuple[RRefId, ForkId]] = frozenset()  # shared in messages that were not sent, not yet taken back
    fetching: frozenset[tuple[RRefId, ForkId]] = frozenset()  # the program waits for these values
    number: int = -1  # of this state, once it was asked for

    def clone(self) -> Site:
        """One that may be changed."""
        return Site(
            clone_owner(self.owner), clone_holder(self.holder), self.lost, dict(self.status), self.table,
            dict(self.handles), self.spoilt, self.unsent, self.fetching,
        )  # fmt: skip

    def sees(self, fork: ForkId, held: Held) -> bool:
        """Whether the program may use a reference: it is confirmed, or made here."""
        return held.in_use and fork not in self.spoilt and (held.confirmed or held.parent is None)


def clone_owner(owner: Owner) -> Owner:
    """A copy that shares nothing that can change."""
    values = {rref: Owned(dict(each.forks), each.made, each.awaited, each.creator) for rref, each in owner.values.items()}
    unconfirmed_losses = {worker: set(waiting) for worker, waiting in owner.unconfirmed_losses.items()}
    return Owner(values, unconfirmed_losses, set(owner.confirmed_losses), set(owner.unmade))


def clone_holder(holder: Holder) -> Holder:
    """A copy that shares nothing that can change."""
    forks = {
        fork: Held(each.rref, each.owner, each.parent, each.confirmed, each.in_use, dict(each.children))
        for fork, each in holder.forks.items()
    }
    return Holder(forks, dict(holder.parents), set(holder.gone))


@dataclass(slots=True)
class World:
    """All workers and all messages at one moment. Never changed: a move makes another one, which shares the rest."""

    scenario: Scenario
    sites: tuple[Site, ...]
    lanes: tuple[tuple[Message, ...], ...]  # by source * workers + target
    loose: frozenset[Message] = frozenset()
    alive: frozenset[int] = frozenset()
    used: frozenset[tuple[str, int]] = frozenset()  # what programs have done already
    losses: int = 0  # how many may still crash


def beginning(scenario: Scenario) -> World:
    """The world before the first move: each value made by its owner is in the hands of the owner's program."""
    sites = [Site() for _ in range(scenario.workers)]
    for value, made in enumerate(scenario.values):
        if made.owner == made.creator:
            rref = rref_of(scenario, value)
            sites[made.owner].handles[rref] = 1
            sites[made.owner].status[rref] = "made"
    lanes = ((),) * scenario.workers**2
    alive = frozenset(range(scenario.workers))
    return World(scenario, tuple(sites), lanes, frozenset(), alive, frozenset(), scenario.losses)


# Two worlds with the same key have the same future. Forks are numbered throughout a scenario, so a number will do.


def world_key(world: World, numbers: dict[Hashable, int]) -> Hashable:
    """What tells worlds apart. `numbers` gives each part of a world a number, so that keys are small."""
    sites = []
    for site in world.sites:
        if site.number < 0:
            site.number = numbers.setdefault(_site_key(site), len(numbers))
        sites.append(site.number)
    rest = (world.lanes, world.loose, (world.alive, world.used, world.losses))
    return *sites, *(numbers.setdefault(part, len(numbers)) for part in rest)


def _site_key(site: Site) -> Hashable:
    owner, holder = site.owner, site.holder
    return (
        tuple(sorted((r.local_id, v.made, v.awaited, *_holders(v.forks)) for r, v in owner.values.items())),
        tuple(sorted((lost.id, *sorted(each.id for each in waiting)) for lost, waiting in owner.unconfirmed_losses.items())),
        frozenset(owner.confirmed_losses), frozenset(owner.unmade), frozenset(holder.gone),
        tuple(sorted(_held_key(f, h) for f, h in holder.forks.items())),
        tuple(sorted((child.local_id, fork.local_id) for child, fork in holder.parents.items())),
        tuple(sorted((r.local_id, status) for r, status in site.status.items())),
        tuple(sorted((r.local_id, count) for r, count in site.handles.items())),
        site.lost, site.table, site.spoilt, site.unsent, site.fetching,
    )  # fmt: skip


def _held_key(fork: ForkId, held: Held) -> tuple[int, ...]:
    parent = -1 if held.parent is None else held.parent.id
    flags = held.confirmed + 2 * held.in_use
    return fork.local_id, held.rref.local_id, held.owner.id, parent, flags, *_holders(held.children)


def _holders(forks: dict[ForkId, Worker]) -> list[int]:
    return sorted(fork.local_id * len(NAMES) + worker.id for fork, worker in forks.items())
