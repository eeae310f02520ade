"""Explores small worlds of the reference protocol (`tests.model.explorer`), and wanders through large ones.

    python -m tests.model.reference_explorer            all scenarios, the large ones too: minutes
    python -m tests.model.reference_explorer losses     those with "losses" in their name

A world is a few workers with the real machines (`remora.protocol.owner` and `holder`); see `model_state` for what it is
made of, `model_moves` for what may happen in it, `model_promises` for what must be true.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from random import Random

from tests.model.explorer import BrokenPromise, Exploration, Finding, Progress, Rules
from tests.model.reference_moves import Move, choices, describe, events, make
from tests.model.reference_promises import check, check_rest
from tests.model.reference_scenarios import LARGE, SMALL
from tests.model.reference_state import Scenario, World, beginning, world_key


def _moves(world: World) -> list[Move]:
    """All moves out of a world; what must be true at rest is checked where nothing will happen by itself."""
    due = list(events(world))
    if not due:
        check_rest(world)
    return [*due, *choices(world)]


def explore(scenario: Scenario, progress: Progress | None = None) -> Finding:
    """Every world that a scenario can lead to."""
    key = partial(world_key, numbers={})
    return Exploration(scenario.name, beginning(scenario), Rules(_moves, make, key, describe, check)).run(progress)


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
