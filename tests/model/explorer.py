"""Walks every interleaving of a small world, breadth first, and shows the shortest counterexample. It knows no machine.

A model says what a world is (`Rules`): which moves lead out of it, and which world each of them leads to. Worlds with equal
keys are one. The path to a world is kept as numbers of moves, and walked again when it must be shown: so moves must come in
the same order each time.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

W = TypeVar("W")

MOST_MOVES = 256  # out of one world
MOST_STATES = 4_000_000
SHOWN_EVERY = 4096  # states


class BrokenPromise(Exception):
    """A promise is broken in a world that can be reached."""


class Unreachable(Exception):
    """A move leads to a world that is not walked: it would need more than the scenario has."""


def _keeps_all(world: object) -> None:
    """Nothing is checked but what the moves themselves check."""


@dataclass(frozen=True)
class Rules(Generic[W]):
    """What a model says of its worlds. A broken promise is a `BrokenPromise`, or an AssertionError of the machine."""

    moves: Callable[[W], Sequence[Any]]  # all that may happen in a world; at rest, what must be true there is checked
    make: Callable[[W, Any], W]  # the world after a move
    key: Callable[[W], Hashable]  # what the future of a world depends on
    described: Callable[[W, Any], str]
    check: Callable[[W], None] = _keeps_all  # in each world that is new
    most: int = MOST_STATES  # a scenario with more states is too large to be explored


@dataclass(slots=True)
class Finding:
    """What an exploration found so far."""

    name: str
    states: int = 1
    depth: int = 0  # moves to the farthest world seen
    cut: int = 0  # moves that lead to worlds that are not walked
    seconds: float = 0.0
    broken: str = ""  # the promise that was broken first
    trace: Sequence[str] = ()  # the moves that lead there; none are fewer

    def __str__(self) -> str:
        found = f"{self.name:58s} {self.states:8d} states, {self.depth:3d} deep, {self.cut} cut, {self.seconds:6.1f} s"
        if not self.broken:
            return found
        steps = "\n".join(f"    {number:2d}. {move}" for number, move in enumerate(self.trace, 1))
        return f"{found}\n  BROKEN after {len(self.trace)} moves: {self.broken}\n{steps}"


Progress = Callable[[Finding], None]


class Exploration(Generic[W]):
    """The walk through all worlds that one beginning can lead to."""

    def __init__(self, name: str, start: W, rules: Rules[W]) -> None:
        self.found = Finding(name)
        self._rules = rules
        self._start = start
        self._seen = {rules.key(start)}
        self._came = array("q", [0])  # for each world, the one it came from and the number of the move
        self._began = time.monotonic()

    def run(self, progress: Progress | None = None) -> Finding:
        """Walk until a promise is broken or everything was seen."""
        frontier: list[tuple[int, W]] = [(0, self._start)]
        with _no_garbage():
            while frontier and not self.found.broken:
                frontier = self._widen(frontier, progress)
                self.found.depth += bool(frontier)
        self._tell(None)
        return self.found

    def _widen(self, frontier: list[tuple[int, W]], progress: Progress | None) -> list[tuple[int, W]]:
        """All worlds that are one move farther, and new."""
        rules, seen, came = self._rules, self._seen, self._came
        found: list[tuple[int, W]] = []
        for index, world in frontier:
            number = -1
            try:
                moves = rules.moves(world)
                if len(moves) > MOST_MOVES or len(came) > rules.most:
                    raise ValueError(f"{self.found.name} is too large to be explored")
                for number, move in enumerate(moves):
                    try:
                        after = rules.make(world, move)
                    except Unreachable:
                        self.found.cut += 1
                        continue
                    key = rules.key(after)
                    if key not in seen:
                        rules.check(after)
                        seen.add(key)
                        found.append((len(came), after))
                        came.append(index * MOST_MOVES + number)
                        if len(came) % SHOWN_EVERY == 0:
                            self._tell(progress)
            except (BrokenPromise, AssertionError) as error:
                self.found.broken = str(error) or repr(error)
                self.found.trace = self._path(index, number)
                return []
        return found

    def _tell(self, progress: Progress | None) -> None:
        self.found.states = len(self._seen)
        self.found.seconds = time.monotonic() - self._began
        if progress is not None:
            progress(self.found)

    def _path(self, index: int, last: int) -> list[str]:
        """The moves that lead to a world, and the last one, out of it; a negative number if it is at rest."""
        numbers = [] if last < 0 else [last]
        while index:
            index, number = divmod(self._came[index], MOST_MOVES)
            numbers.append(number)
        trace, world = list[str](), self._start
        for number in reversed(numbers):
            move = self._rules.moves(world)[number]
            trace.append(self._rules.described(world, move))
            if len(trace) < len(numbers):
                world = self._rules.make(world, move)
        return trace


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Worlds have no cycles, and there are many of them: looking for cycles takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
