"""Walks every interleaving of small worlds of the reference protocol, breadth first, and shows the shortest counterexample.

    python -m tests.model.reference_explorer            all scenarios, the large ones too: minutes
    python -m tests.model.reference_explorer losses     those with "losses" in their name

A world is a few workers with the real machines (`remora.protocol.owner` and `holder`); see `model_state` for what it is
made of, `model_moves` for what may happen in it, `model_promises` for what must be true.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from tests.model.reference_driver import BrokenPromise
from tests.model.reference_moves import Move, choices, describe, events, make
from tests.model.reference_promises import check, check_rest
from tests.model.reference_scenarios import LARGE, SMALL
from tests.model.reference_state import Scenario, World, beginning, world_key

MOST_MOVES = 256  # out of one world

Progress = Callable[["Finding"], None]


@dataclass(slots=True)
class Finding:
    """What an exploration found so far."""

    scenario: Scenario
    states: int = 1
    depth: int = 0  # moves to the farthest world seen
    seconds: float = 0.0
    broken: str = ""  # the promise that was broken first
    trace: Sequence[str] = ()  # the moves that lead there; none are fewer

    def __str__(self) -> str:
        found = f"{self.scenario.name:58s} {self.states:8d} states, {self.depth:3d} deep, {self.seconds:6.1f} s"
        if not self.broken:
            return found
        steps = "\n".join(f"    {number:2d}. {move}" for number, move in enumerate(self.trace, 1))
        return f"{found}\n  BROKEN after {len(self.trace)} moves: {self.broken}\n{steps}"


class Exploration:
    """One scenario. The path to a world is kept as numbers of moves, and walked again when it must be shown."""

    def __init__(self, scenario: Scenario) -> None:
        self.found = Finding(scenario)
        self._numbers: dict[Hashable, int] = {}
        self._start = beginning(scenario)
        self._seen = {world_key(self._start, self._numbers)}
        self._came = array("q", [0])  # for each world, the one it came from and the number of the move
        self._began = time.monotonic()

    def run(self, progress: Progress | None = None) -> Finding:
        """Walk until a promise is broken or everything was seen."""
        frontier: list[tuple[int, World]] = [(0, self._start)]
        with _no_garbage():
            while frontier and not self.found.broken:
                frontier = self._widen(frontier, progress)
                self.found.depth += bool(frontier)
        self._tell(None)
        return self.found

    def _widen(self, frontier: list[tuple[int, World]], progress: Progress | None) -> list[tuple[int, World]]:
        """All worlds that are one move farther, and new."""
        found: list[tuple[int, World]] = []
        for index, world in frontier:
            number = -1
            try:
                moves = _moves(world)
                if len(moves) > MOST_MOVES:
                    raise ValueError(f"{self.found.scenario.name} is too large to be explored")
                for number, move in enumerate(moves):
                    after = make(world, move)
                    key = world_key(after, self._numbers)
                    if key not in self._seen:
                        check(after)
                        self._seen.add(key)
                        found.append((len(self._came), after))
                        self._came.append(index * MOST_MOVES + number)
                        if len(self._came) % 4096 == 0:
                            self._tell(progress)
            except (BrokenPromise, AssertionError) as error:
                self._break(str(error) or repr(error), index, number)
                return []
        return found

    def _tell(self, progress: Progress | None) -> None:
        self.found.states = len(self._seen)
        self.found.seconds = time.monotonic() - self._began
        if progress is not None:
            progress(self.found)

    def _break(self, text: str, index: int, last: int) -> None:
        numbers = [] if last < 0 else [last]
        while index:
            index, number = divmod(self._came[index], MOST_MOVES)
            numbers.append(number)
        trace, world = [], self._start
        for number in reversed(numbers):
            move = _moves(world, at_rest=False)[number]
            trace.append(describe(world, move))
            if len(trace) < len(numbers):
                world = make(world, move)
        self.found.broken, self.found.trace = text, trace


def _moves(world: World, at_rest: bool = True) -> list[Move]:
    """All moves out of a world; what must be true at rest is checked where nothing will happen by itself."""
    due = list(events(world))
    if not due and at_rest:
        check_rest(world)
    return [*due, *choices(world)]


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


def explore(scenario: Scenario, progress: Progress | None = None) -> Finding:
    """Every world that a scenario can lead to."""
    return Exploration(scenario).run(progress)


# How often a move is taken on a random walk, beside one of weight 1: else all is dropped before anything happened.
WEIGHTS = {"drop": 0.1, "let_go": 0.05, "crash": 0.03, "learn": 0.3, "lose_patience": 0.2}


def wander(scenario: Scenario, random: Random, length: int) -> tuple[World, Sequence[str]]:
    """A random walk through a scenario that is too large to explore. In the end everything is dropped and comes to rest.
    Returns the last world and the moves that led there; raises BrokenPromise with them."""
    world, trace = beginning(scenario), list[str]()
    try:
        while moves := _moves(world):
            if len(trace) >= length:
                moves = [*events(world), *(move for move in choices(world) if move[0] in ("drop", "let_go"))][:1]
                if not moves:
                    break
            (move,) = random.choices(moves, [WEIGHTS.get(move[0], 1.0) for move in moves])
            trace.append(describe(world, move))
            world = make(world, move)
            check(world)
    except (BrokenPromise, AssertionError) as error:
        raise BrokenPromise("\n".join([str(error) or repr(error), *trace])) from error
    return world, trace


def main(names: Sequence[str]) -> int:
    """Explore the scenarios whose names contain one of `names`; all, if there are none."""
    shown = [each for each in (*SMALL, *LARGE) if not names or any(name in each.name for name in names)]
    total = broken = 0
    for scenario in shown:
        found = explore(scenario, _show_progress)
        sys.stderr.write("\r\033[K" if sys.stderr.isatty() else "")
        print(found, flush=True)
        total += found.states
        broken += bool(found.broken)
    print(f"{len(shown)} scenarios, {total} states, {broken} broken")
    return 1 if broken or not shown else 0


def _show_progress(found: Finding) -> None:
    if sys.stderr.isatty():
        rate = found.states / max(found.seconds, 1e-9)
        sys.stderr.write(f"\r\033[K{found.scenario.name}: {found.states} states, {found.depth} deep, {rate:.0f}/s")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
