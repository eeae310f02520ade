"""Corrects the clocks of workers by what must be true: a function begins after its call was made and ends before the answer.

Round trips say what a worker's clock is, with an error that may be larger than a call takes. The calls themselves say more:
each bounds the difference of two clocks from below and from above. The corrections keep these bounds, and begin at what
the round trips say (difference constraints, solved by the algorithm of Bellman and Ford). Calls say nothing of all clocks
together, so the median of the changes is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low as median
from typing import NamedTuple

INFINITE = float("inf")
ROUNDING = 1e-6  # seconds: a wall clock, as a number, has steps of a quarter of a microsecond


class Pair(NamedTuple):
    """The two ends of a call, in the times of their own clocks."""

    caller: str
    callee: str
    begin: float  # the caller's beginning minus the callee's: the callee's clock is ahead by at most minus this
    end: float  # the caller's end minus the callee's; infinite: there is none


@dataclass(slots=True)
class _Bounds:
    """Of how much the clock of one worker may be ahead of that of another one."""

    least: float = -INFINITE
    most: float = INFINITE


def corrections(estimates: Mapping[str, float], pairs: Iterable[Pair]) -> dict[str, float]:
    """By worker: what to subtract from its times. `estimates` are those of the round trips. If no solution keeps all the
    bounds, because a clock drifted or was set, the corrections keep most of them."""
    edges: dict[tuple[str, str], _Bounds] = {}
    for pair in pairs:
        if pair.caller in estimates and pair.callee in estimates:
            found = edges.setdefault((pair.caller, pair.callee), _Bounds())
            found.most = min(found.most, -pair.begin)
            found.least = max(found.least, -pair.end)
    for each in edges.values():
        if each.least > each.most:  # a clock drifted or was set meanwhile: the middle is wrong by the least
            each.least = each.most = (each.least + each.most) / 2
    solved, kept = _solve(estimates, edges, 0.25)  # away from the borders of the bounds, if that can be
    return solved if kept else _solve(estimates, edges, 0.0)[0]


def _solve(
    estimates: Mapping[str, float], edges: Mapping[tuple[str, str], _Bounds], margin: float
) -> tuple[dict[str, float], bool]:
    """Corrections, and whether they keep all the bounds. `margin`: how far from the borders, as a part of the room that
    the bounds leave."""
    constraints: list[tuple[str, str, float]] = []  # (a, b, w): the change of b is at most that of a plus w
    for (caller, callee), bounds in edges.items():
        guess = estimates[callee] - estimates[caller]
        room = bounds.most - bounds.least
        spare = margin * room if 0.0 < room < INFINITE else 0.0
        if bounds.most < INFINITE:
            constraints.append((caller, callee, bounds.most - spare - guess))
        if bounds.least > -INFINITE:
            constraints.append((callee, caller, guess - bounds.least - spare))
    change = dict.fromkeys(estimates, 0.0)
    changed = True
    for _ in range(len(change) + 1):
        changed = False
        for before, after, most in constraints:
            if change[before] + most < change[after] - ROUNDING:
                change[after] = change[before] + most
                changed = True
        if not changed:
            break
    for together in _components(change, edges):
        usual = median(change[name] for name in together)  # the calls say nothing of it: most clocks are believed
        for name in together:
            change[name] -= usual
    return {name: estimates[name] + change[name] for name in estimates}, not changed


def _components(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The workers that calls connect."""
    found = {name: {name} for name in names}
    for pair in edges:
        first, second = found[pair[0]], found[pair[1]]
        if first is not second:
            first |= second
            found.update(dict.fromkeys(second, first))
    return list({id(each): each for each in found.values()}.values())
