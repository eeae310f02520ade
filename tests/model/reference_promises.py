"""What must be true in a world of workers that hold references. Nothing is changed here.

    S1  a value is there while a live worker holds a reference to it, or one is under way from a live worker
    S2  it is freed at most once
    L1  at rest, exactly those references are counted that are held, and nothing else is remembered: so when all are
        dropped, all tables are empty
    L2  nobody waits for ever: at rest every reference held is confirmed, and its value is made or known to have failed

A world is at rest when nothing is under way and every crash is known to all who live. S1 and L2 are about values whose
owner lives. S2, and the promises O and H of the machines, are checked where they could be broken, in `model_driver` and
by the machines themselves.
"""

from __future__ import annotations

from remora.protocol.holder import Held
from remora.vocabulary.effects import ForkId, RRefId
from tests.model.reference_driver import promise
from tests.model.reference_state import NAMES, Message, Site, World, show


def check(world: World) -> None:
    """The promises that hold at any moment."""
    for worker in world.alive:
        for fork, held in world.sites[worker].holder.forks.items():
            if held.in_use and held.owner.id in world.alive:
                _check_held(world, world.sites[worker], fork, held)
    for loose in world.loose:
        _check_under_way(world, loose)
    for lane in world.lanes:
        for each in lane:
            _check_under_way(world, each)


def _check_held(world: World, site: Site, fork: ForkId, held: Held) -> None:
    owner = world.sites[held.owner.id]
    promise(not is_freed(owner, held.rref), "S1: {} was freed, but {} is held", held.rref, fork)
    if held.confirmed and fork not in site.spoilt:
        owned = owner.owner.values.get(held.rref)
        counted = owned is not None and fork in owned.forks
        promise(counted, "S1: {} is confirmed and held, but not counted", fork)


def _check_under_way(world: World, each: Message) -> None:
    if each.kind in ("reference", "reference in reply") and each.source in world.alive:
        owner = world.scenario.values[each.rref.local_id].owner
        if owner in world.alive:
            freed = is_freed(world.sites[owner], each.rref)
            promise(not freed, "S1: {} was freed, but {} is on its way", each.rref, each.fork)


def is_freed(owner: Site, rref: RRefId) -> bool:
    """Whether a value was made and is not kept for others any more."""
    return rref not in owner.table and owner.status.get(rref) == "made"


def check_rest(world: World) -> None:
    """The promises that hold when nothing is under way."""
    held: dict[RRefId, dict[ForkId, int]] = {}
    for worker in world.alive:
        site = world.sites[worker]
        promise(not site.fetching, f"L2: {NAMES[worker]} waits for a value for ever")
        promise(not site.holder.parents, f"L1: {NAMES[worker]} waits for ever for a child to be counted")
        for fork, each in site.holder.forks.items():
            promise(each.confirmed, "L2: {} is never confirmed", fork)
            promise(each.in_use, "L1: {} was dropped and is still there", fork)
            promise(each.owner.id in world.alive, "L2: the owner of {} is gone, and nobody says so", fork)
            held.setdefault(each.rref, {})[fork] = worker
    for worker in world.alive:
        _check_owner_at_rest(world.sites[worker], held)


def _check_owner_at_rest(site: Site, held: dict[RRefId, dict[ForkId, int]]) -> None:
    promise(not site.owner.unconfirmed_losses, "L1: a loss is never confirmed")
    for rref, owned in site.owner.values.items():
        counted, really = {fork: holder.id for fork, holder in owned.forks.items()}, held.get(rref, {})
        if counted != really:
            promise(False, f"L1: of {show(rref)} is counted: {_list(counted)}; is held: {_list(really)}")
    promise(site.table == site.owner.values.keys(), "L1: the table keeps what nobody holds")
    for rref in [*site.table, *site.handles]:
        promise(site.status.get(rref) != "waiting", "L2: {} is waited for and will never be made", rref)


def _list(forks: dict[ForkId, int]) -> str:
    return ", ".join(f"{show(fork)} by {NAMES[worker]}" for fork, worker in sorted(forks.items())) or "nothing"
