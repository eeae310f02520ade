"""The walk through every world that a scenario can lead to, breadth first. A model of a machine has the rules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Move = tuple[Any, ...]


class Broken(Exception):
    """A promise was broken."""


class NotWalked(Exception):
    """A world beyond the scenario: it needs more threads than there are."""


class World(Protocol):
    """A state of everything, with the way that led to it: the moves, the last one first, each with those before it."""

    trace: tuple[Any, ...]


W = TypeVar("W", bound=World)


@dataclass(frozen=True)
class Rules(Generic[W]):
    """The moves of a world, the world after a move, and what the future of a world depends on."""

    moves: Callable[[W], Iterable[Move]]
    make: Callable[[W, Move], W]
    key: Callable[[W], Hashable]
    described: Callable[[W, Move], str]


@dataclass
class Finding:
    """What a walk found."""

    name: str
    states: int = 0
    cut: int = 0  # worlds that were not walked
    broken: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "\n".join(f"    {number:2d}. {move}" for number, move in enumerate(self.trace, 1))
        return f"{self.name}: {self.states} states, {self.cut} cut {self.broken}\n{steps}"


def walk(name: str, start: W, rules: Rules[W], most: int) -> Finding:
    """Go to every world, breadth first: the counterexample is the shortest."""
    collects = gc.isenabled()
    gc.disable()  # worlds have no cycles, and all of them are kept: to look for cycles takes most of the time
    try:
        return _walk(Finding(name), start, rules, most)
    finally:
        if collects:
            gc.enable()


def _walk(found: Finding, start: W, rules: Rules[W], most: int) -> Finding:
    seen, frontier = {rules.key(start)}, [start]
    while frontier:
        farther = []
        for world in frontier:
            move: Move = ()
            try:
                for move in rules.moves(world):
                    try:
                        after = rules.make(world, move)
                    except NotWalked:
                        found.cut += 1
                        continue
                    mark = rules.key(after)
                    if mark not in seen:
                        seen.add(mark)
                        farther.append(after)
            except (Broken, AssertionError) as error:
                found.states, found.broken = len(seen), str(error)
                found.trace = (*_told(world), rules.described(world, move) if move else "at rest")
                return found
            if len(seen) > most:
                raise ValueError(f"{found.name} is too large to be explored")
        frontier = farther
    found.states = len(seen)
    return found


def _told(world: World) -> tuple[str, ...]:
    steps: list[str] = []
    trace = world.trace
    while trace:
        trace, move = trace
        steps.append(move)
    return tuple(reversed(steps))
