"""What can happen next in a world of workers that hold references, and what it is called. What it does: `model_steps`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remora.vocabulary.effects import ForkId, RRefId
from tests.model.reference_state import NAMES, Message, Site, World, first_fork, rref_of, show
from tests.model.reference_steps import Step

Move = tuple[str, *tuple[Any, ...]]  # the name of a method of Step, and its arguments


def make(world: World, move: Move) -> World:
    """The world after a move. Raises BrokenPromise, or the AssertionError of a machine's own check."""
    step = Step(world)
    name, *arguments = move
    getattr(step, name)(*arguments)
    return step.done()


def events(world: World) -> Iterator[Move]:
    """Moves that will happen if nothing else does. When there are none, the world is at rest."""
    for lane, waiting in enumerate(world.lanes):
        if waiting:
            yield "deliver", *divmod(lane, world.scenario.workers)
    for loose in sorted(world.loose, key=_order):
        if loose.kind != "serve fetch" or world.sites[loose.target].status.get(loose.rref) != "waiting":
            yield "take", loose
    for worker in sorted(world.alive):
        site = world.sites[worker]
        for lost in range(world.scenario.workers):
            if lost not in world.alive and lost not in site.lost:
                yield "learn", worker, lost
        for rref, child in sorted(site.unsent):
            yield "undo", worker, rref, child
    yield from _given_up(world)


def _given_up(world: World) -> Iterator[Move]:
    for value, made in enumerate(world.scenario.values):
        asked = made.unsent and ("create", value) in world.used and made.creator in world.alive
        if asked and ("give up", value) not in world.used:
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
            if held.in_use and (held.rref, fork) not in site.fetching:
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
        for fork, rref in _visible(site):
            yield "share", number, rref, fork


def _fetches(world: World) -> Iterator[Move]:
    for number, worker in enumerate(world.scenario.fetches):
        if ("fetch", number) not in world.used and worker in world.alive:
            site = world.sites[worker]
            for fork, rref in _visible(site):
                if (rref, fork) not in site.fetching:
                    yield "fetch", number, fork


def _visible(site: Site) -> list[tuple[ForkId, RRefId]]:
    return sorted((fork, held.rref) for fork, held in site.holder.forks.items() if site.sees(fork, held))


def _order(loose: Message) -> tuple[object, ...]:
    return loose.kind, loose.source, loose.target, loose.about, loose.fork


def describe(world: World, move: Move) -> str:
    """A move in words."""
    name, *arguments = move
    match name, arguments:
        case "deliver", [source, target]:
            return _arrives(world.lanes[source * world.scenario.workers + target][0])
        case "take", [loose]:
            return _arrives(loose)
        case "learn", [worker, lost]:
            return f"{NAMES[worker]} learns that {NAMES[lost]} is lost"
        case "crash", [worker]:
            return f"{NAMES[worker]} crashes"
        case "undo", [worker, rref, fork]:
            return f"{NAMES[worker]} takes {show(fork)} back: its message was not sent"
        case "let_go", [worker, rref]:
            return f"{NAMES[worker]} drops a reference to its own {show(rref)}"
        case "drop", [worker, fork]:
            return f"{NAMES[worker]} drops {show(fork)}"
        case "share", [number, rref, parent]:
            return _shared(world, number, rref, parent)
        case "fetch", [number, fork]:
            return f"{NAMES[world.scenario.fetches[number]]} fetches through {show(fork)}"
        case _, [value]:
            made = world.scenario.values[value]
            rref, fork = rref_of(world.scenario, value), first_fork(world.scenario, value)
            what = {"create": f"asks {NAMES[made.owner]} for {show(rref)}, held as {show(fork)}"}
            what["give_up_creation"] = f"finds that it could not ask for {show(rref)}"
            what["lose_patience"] = f"does not wait for {show(rref)} to be made any more"
            return f"{NAMES[made.creator]} {what[name]}"
    raise ValueError(move)


def _arrives(got: Message) -> str:
    return f"{NAMES[got.source]} -> {NAMES[got.target]}: {got}"


def _shared(world: World, number: int, rref: RRefId, parent: ForkId | None) -> str:
    share = world.scenario.shares[number]
    held = "" if parent is None else f", held as {show(parent)}"
    how = "in a reply" if share.reply else "in a call"
    return f"{NAMES[share.source]} shares {show(rref)}{held}, with {NAMES[share.target]} {how}"
