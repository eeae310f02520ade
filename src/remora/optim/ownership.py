"""Assigns the parameters of an optimizer to their owners, with a number for each. Computes, and makes no calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from remora.optim.local import Options
from remora.rpc import RRef
from remora.vocabulary.ids import WorkerInfo

T = TypeVar("T")


@dataclass
class Share:
    """The parameters that one worker owns: those of each group, and the place of each among all parameters."""

    owner: WorkerInfo
    parameters: list[list[RRef[Any]]]
    positions: list[int] = field(default_factory=list)

    def part_of(self, state: Mapping[Any, T]) -> dict[Any, T]:
        """The state of these parameters, numbered as on their owner, out of the state of all. What is under other keys than
        numbers is of no parameter, and so of all owners."""
        part = {number: state[place] for number, place in enumerate(self.positions) if place in state}
        return part | {key: each for key, each in state.items() if not isinstance(key, int)}

    def placed(self, part: Mapping[Any, T]) -> dict[Any, T]:
        """The state of these parameters, numbered as among all, out of that of their owner."""
        return {self.positions[key] if isinstance(key, int) else key: each for key, each in part.items()}


def numbered(options: Sequence[Options], groups: Sequence[Sequence[object]]) -> list[Options]:
    """The groups with numbers in place of parameters, as in a state."""
    numbers = itertools.count()
    return [{**each, "params": [next(numbers) for _ in group]} for each, group in zip(options, groups, strict=True)]


def groups_of(parameters: Iterable[Any]) -> list[Options]:
    """Parameter groups, each with a list of references: what torch optimizers take, and as they take it."""
    given = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": _references(group["params"])} for group in groups]
    if not any(group["params"] for group in groups):
        raise ValueError("optimizer got an empty parameter list")
    return groups


def _references(parameters: Any) -> list[RRef[Any]]:
    found = [parameters] if isinstance(parameters, RRef) else list(parameters)
    for each in found:
        if not isinstance(each, RRef):
            raise TypeError(f"a DistributedOptimizer takes references to parameters (RRef), not {type(each).__qualname__}")
    return found


def shares_of(groups: Sequence[Options]) -> list[Share]:
    """One share for each owner, in the order in which they are met."""
    shares: dict[WorkerInfo, Share] = {}
    place = 0
    for number, group in enumerate(groups):
        for rref in group["params"]:
            owner = rref.owner()
            share = shares.setdefault(owner, Share(owner, [[] for _ in groups]))
            share.parameters[number].append(rref)
            share.positions.append(place)
            place += 1
    return list(shares.values())
