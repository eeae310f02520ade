"""What can happen next in a world, and what must be true in it. Nothing is changed here.

    S1  a value is there while a live worker holds a reference to it, or one is under way from a live worker
    S2  it is freed at most once
    L1  at rest, exactly those references are counted that are held, and nothing else is remembered: so when all are
        dropped, all tables are empty
    L2  nobody waits for ever: at rest every reference held is confirmed, and its value is made or known to have failed

A world is at rest when nothing is under way and every crash is known to all who live. S1 and L2 are checked for values
whose owner lives; H1 and S2 where they could be broken, in `model_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator

from remora.protocol.holder import Held
from remora.testing.model_state import NAMES, Message, Site, World, first_fork, rref_of, show
from remora.testing.model_steps import Step, promise
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.ids import GloballyUniqueId

Move = tuple[str, *tuple[object, ...]]  # the name of a method of Step, and its arguments

# What can happen next.


def events(world: World) -> Iterator[Move]:
    """Moves that will happen if nothing else does. When there are none, the world is at rest."""
    size, sites = world.scenario.workers, world.sites
    for lane, waiting in enumerate(world.lanes):
        if waiting:
            yield "deliver", *divmod(lane, size)
    for loose in sorted(world.loose, key=_order):
        if loose.kind != "serve fetch" or sites[loose.target].status.get(_value_of(loose)) != "waiting":
            yield "take", loose
    for worker in sorted(world.alive):
        for lost in range(size):
            if lost not in world.alive and lost not in sites[worker].lost:
                yield "learn", worker, lost
        for rref, child in sorted(sites[worker].unsent):
            yield "undo", worker, rref, child
    for value, made in enumerate(world.scenario.values):
        if made.unsent and made.creator in world.alive and ("create", value) in world.used - {("give up", value)}:
            if ("give up", value) not in world.used:
                yield "give_up_creation", value


def choices(world: World) -> Iterator[Move]:
    """Moves that programs may make, or fate: they may also never happen."""
    for worker in sorted(world.alive):
        if world.losses and worker in world.scenario.mortal:
            yield "crash", worker
        site = world.sites[worker]
        for rref in sorted(site.handles):
            yield "let_go", worker, rref
        for fork, held in sorted(site.holder.forks.items()):
            if held.in_use and fork not in site.fetching:
                yield "drop", worker, fork
    yield from _creations(world)
    yield from _shares(world)
    yield from _fetches(world)


def _creations(world: World) -> Iterator[Move]:
    for value, made in enumerate(world.scenario.values):
        if made.creator in world.alive and made.creator != made.owner:
            if ("create", value) not in world.used:
                yield "create", value
            elif made.impatient and ("patience", value) not in world.used:
                held = world.sites[made.creator].holder.forks.get(first_fork(world.scenario, value))
                if held is not None and not held.confirmed:
                    yield "lose_patience", value


def _shares(world: World) -> Iterator[Move]:
    offered = set()
    for number, share in enumerate(world.scenario.shares):
        # Of several shares that are alike, the first comes first: which is which makes no difference.
        if ("share", number) in world.used or share.source not in world.alive or share in offered:
            continue
        offered.add(share)
        site = world.sites[share.source]
        for rref in sorted(site.handles):
            yield "share", number, rref, None
        for fork, held in sorted(site.holder.forks.items()):
            if site.sees(fork, held):
                yield "share", number, held.rref, fork


def _fetches(world: World) -> Iterator[Move]:
    for number, worker in enumerate(world.scenario.fetches):
        if ("fetch", number) in world.used or worker not in world.alive:
            continue
        site = world.sites[worker]
        for fork, held in sorted(site.holder.forks.items()):
            if site.sees(fork, held) and fork not in site.fetching:
                yield "fetch", number, fork


def make(world: World, move: Move) -> World:
    """The world after a move. Raises BrokenPromise, or the AssertionError of a machine's own check."""
    step = Step(world)
    name, *arguments = move
    getattr(step, name)(*arguments)
    return step.done()


def _order(loose: Message) -> tuple[object, ...]:
    return loose.kind, loose.source, loose.target, loose.about, str(loose)


def _value_of(got: Message) -> RRefId:
    assert got.rref is not None
    return got.rref


# What must be true.


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
    promise(not is_freed(owner, held.rref), f"S1: {show(held.rref)} was freed, but {show(fork)} is held")
    if held.confirmed and fork not in site.spoilt:
        owned = owner.owner.values.get(held.rref)
        promise(owned is not None and fork in owned.forks, f"S1: {show(fork)} is confirmed and held, but not counted")


def _check_under_way(world: World, each: Message) -> None:
    if each.kind in ("reference", "reference in reply") and each.source in world.alive:
        rref = _value_of(each)
        owner = world.scenario.values[rref.local_id].owner
        if owner in world.alive:
            freed = is_freed(world.sites[owner], rref)
            promise(not freed, f"S1: {show(rref)} was freed, but {show(each.fork)} is on its way")


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
            promise(each.confirmed, f"L2: {show(fork)} is never confirmed")
            promise(each.in_use, f"L1: {show(fork)} was dropped and is still there")
            promise(each.owner.id in world.alive, f"L2: the owner of {show(fork)} is gone, and nobody says so")
            held.setdefault(each.rref, {})[fork] = worker
    for worker in world.alive:
        _check_owner_at_rest(world.sites[worker], held)


def _check_owner_at_rest(site: Site, held: dict[RRefId, dict[ForkId, int]]) -> None:
    promise(not site.owner.mourning, "L1: a loss is never confirmed")
    for rref, owned in site.owner.values.items():
        counted = {fork: holder.id for fork, holder in owned.forks.items()}
        promise(counted == held.get(rref, {}), f"L1: {_list(counted)} of {show(rref)} counted, {_list(held.get(rref))} held")
    promise(site.table == site.owner.values.keys(), "L1: the table keeps what nobody holds")
    for rref in [*site.table, *site.handles]:
        promise(site.status.get(rref) != "waiting", f"L2: {show(rref)} is waited for and will never be made")


def _list(forks: dict[ForkId, int] | None) -> str:
    return ", ".join(f"{show(fork)} ({NAMES[worker]})" for fork, worker in sorted((forks or {}).items())) or "nothing"


# What a move is called.


def describe(move: Move) -> str:
    """A move in words."""
    name, *arguments = move
    if name == "take":
        (loose,) = arguments
        assert isinstance(loose, Message)
        return f"{NAMES[loose.source]} -> {NAMES[loose.target]}: {loose}"
    shown = [show(each) if isinstance(each, GloballyUniqueId) else each for each in arguments]
    return f"{name} {shown}"
