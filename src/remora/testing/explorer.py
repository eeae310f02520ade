"""Walks every interleaving of a small world, breadth first."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from remora.testing.model_promises import Move, check, check_rest, choices, describe, events, make
from remora.testing.model_state import Scenario, World, beginning, world_key
from remora.testing.model_steps import BrokenPromise


@dataclass
class Finding:
    scenario: Scenario
    states: int
    seconds: float
    broken: str = ""
    trace: tuple[str, ...] = ()
    complete: bool = True
    depth: int = 0


def explore(scenario: Scenario, limit: int = 10**9) -> Finding:
    began = time.monotonic()
    numbers: dict[Hashable, int] = {}
    start = beginning(scenario)
    seen = {world_key(start, numbers)}
    came: list[tuple[int, Move | None]] = [(-1, None)]
    frontier: list[tuple[int, World]] = [(0, start)]
    depth = 0

    def finding(broken: str = "", trace: tuple[str, ...] = (), complete=True) -> Finding:
        return Finding(scenario, len(seen), time.monotonic() - began, broken, trace, complete, depth)

    def path(index: int) -> list[Move]:
        moves = []
        while index:
            index, move = came[index]
            moves.append(move)
        return moves[::-1]

    while frontier:
        nxt = []
        for index, world in frontier:
            due = list(events(world))
            try:
                if not due:
                    check_rest(world)
                move = None
                for move in (*due, *choices(world)):
                    after = make(world, move)
                    key = world_key(after, numbers)
                    if key not in seen:
                        seen.add(key)
                        check(after)
                        nxt.append((len(came), after))
                        came.append((index, move))
            except (BrokenPromise, AssertionError) as error:
                moves = path(index) + ([move] if move else [])
                return finding(str(error), tuple(map(describe, moves)))
            if len(seen) > limit:
                return finding(complete=False)
        frontier = nxt
        depth += 1
    return finding()
