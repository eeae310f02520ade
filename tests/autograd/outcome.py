"""What a program yields: results, gradients after each pass, what each hook saw; and how two outcomes differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = dict[str, Tensor | None]  # by worker and parameter; None: there is none


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    results: list[Tensor]
    passes: list[Gradients]
    seen: dict[str, list[Tensor]]

    @classmethod
    def of(
        cls, results: list[Tensor], passes: list[Gradients], seen: Iterable[tuple[str, Tensor]]
    ) -> Outcome:
        by_hook: dict[str, list[Tensor]] = defaultdict(list)
        for where, gradient in seen:
            by_hook[where].append(gradient)
        return cls([result.detach() for result in results], passes, dict(by_hook))


def without_zeros(outcome: Outcome) -> Outcome:
    """The same, as if a gradient of zeros were none. For programs with functions that refuse to give a gradient: within
    a process, a function behind one of those runs all the same and may make zeros of nothing; behind a call, it does not
    run at all."""

    def anything(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None or not gradient.any() else gradient

    return Outcome(
        outcome.results,
        [{name: anything(gradient) for name, gradient in each.items()} for each in outcome.passes],
        {where: kept for where, seen in outcome.seen.items() if (kept := [each for each in seen if each.any()])},
    )


def differences(expected: Outcome, actual: Outcome) -> Iterator[str]:
    """In words, every way in which an outcome is not the expected one."""
    yield from _compared("results", expected.results, actual.results)
    if len(expected.passes) != len(actual.passes):
        yield f"passes: {len(expected.passes)} expected, {len(actual.passes)} made"
    for number, (theirs, ours) in enumerate(zip(expected.passes, actual.passes, strict=False)):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from _compared(f"after pass {number}, gradient of {name}", [theirs.get(name)], [ours.get(name)])
    for where in sorted(expected.seen.keys() | actual.seen.keys()):
        yield from _compared(f"hook at {where}", expected.seen.get(where, []), actual.seen.get(where, []))


def _compared(
    what: str, expected: list[Tensor | None] | list[Tensor], actual: list[Tensor | None] | list[Tensor]
) -> Iterator[str]:
    if len(expected) != len(actual):
        yield f"{what}: {len(expected)} expected, {len(actual)} found: {_short(expected)}, {_short(actual)}"
    elif not all(map(same, expected, actual)):
        yield f"{what}: {_short(expected)} expected, {_short(actual)} found"


def same(expected: Tensor | None, actual: Tensor | None) -> bool:
    """Whether two gradients are equal but for the order in which their parts were added."""
    if expected is None or actual is None:
        return expected is actual
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)  # parts of a program may use single precision


def _short(values: Iterable[Tensor | None]) -> str:
    return str([None if value is None else [round(x, 5) for x in value.flatten().tolist()] for value in values])
