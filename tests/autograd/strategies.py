"""Draws random programs; says how likely what is, nothing of what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.autograd.language import (
    HOOK_KINDS,
    LEAF_HOOK_KINDS,
    SHAPES,
    STYLES,
    TARGETS,
    Backward,
    Body,
    Call,
    Calls,
    Counted,
    Hook,
    Leaf,
    Op,
    Program,
    Step,
    refuses,
    values_added,
)
from tests.autograd.operations import OPERATIONS

PARAMETERS = 2
# What stops a gradient: in a program that leaves nothing unused there is none of these.
STOPS = {"detach", "no_grad", "refuse"}


class _Writer:
    """Writes one body, step by step."""

    def __init__(
        self, draw: Callable[[Any], Any], workers: int, arguments: int, depth: int, tidy: bool, mined: bool
    ) -> None:
        self.draw = draw
        self.workers = workers
        self.depth = depth  # how deep calls may still nest
        self.tidy = tidy  # leave nothing unused
        self.mined = mined
        self.without = (STOPS if tidy else set()) | {"mine"}
        self.steps: list[Step] = []
        self.values = arguments

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.values += values_added(step)

    def value(self) -> int:
        """One of the values, rather one of the latest."""
        recent = st.integers(0, min(2, self.values - 1))
        return self.values - 1 - int(self.draw(recent | st.integers(0, self.values - 1)))

    def some_values(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self.value() for _ in range(self.draw(st.integers(least, most))))

    def write(self, most_steps: int, always_call: bool = False) -> None:
        self.add(Leaf(self.draw(st.integers(0, PARAMETERS - 1))))
        for _ in range(self.draw(st.integers(0, most_steps))):
            self.add_step()
        if always_call:
            self.add(self.calls())
            for _ in range(self.draw(st.integers(0, 2))):
                self.add_step()

    def add_step(self) -> None:
        step = self.step()
        self.add(step)
        if isinstance(step, Op | Counted) and self.draw(st.sampled_from([False, False, True])):
            self.add(Hook(self.values - 1, self.draw(st.sampled_from(HOOK_KINDS))))

    def step(self) -> Step:
        kinds = ["op", "op", "op", "leaf", "hook", "counted"] + (["calls"] * 3 if self.depth else [])
        match self.draw(st.sampled_from(kinds)):
            case "op":
                return self.op()
            case "leaf":
                return Leaf(self.draw(st.integers(0, PARAMETERS - 1)))
            case "counted":
                return Counted(self.value(), self.value())
            case "hook":
                return Hook(self.value(), self.draw(st.sampled_from(HOOK_KINDS)))
            case _:
                return self.calls()

    def calls(self) -> Calls:
        return Calls(tuple(self.call() for _ in range(self.draw(st.sampled_from([1, 1, 1, 2, 3])))))

    def op(self) -> Op:
        name = self.draw(st.sampled_from(sorted(OPERATIONS.keys() - self.without) + ["mine"] * 4 * self.mined))
        arity = OPERATIONS[name].arity
        return Op(name, self.some_values(arity or 1, arity or 3))

    def call(self) -> Call:
        inputs = self.some_values(1 if self.tidy else self.draw(st.sampled_from([1, 1, 1, 0])), 3)
        baggage = self.draw(st.sampled_from([False, False, True]))
        inner = _Writer(self.draw, self.workers, len(inputs) + baggage, self.depth - 1, self.tidy, self.mined)
        inner.write(4)
        results = inner.outcome(st.sampled_from([1, 1, 1, 0]))
        return Call(
            self.draw(st.integers(0, self.workers - 1)),
            inputs,
            Body(len(inputs), tuple(inner.steps), results),
            self.draw(st.sampled_from(STYLES)),
            self.draw(st.sampled_from(TARGETS)),
            self.draw(st.sampled_from(SHAPES)),
            not self.tidy and self.draw(st.sampled_from([False] * 7 + [True])),
            baggage,
        )

    def outcome(self, least: st.SearchStrategy[int]) -> tuple[int, ...]:
        """Some values, for whom the work was done; if all is to be used, or by luck, one into which all others go."""
        if self.tidy:
            return self.all_in_one()
        some = self.some_values(self.draw(least), 3)
        return (*some, *self.all_in_one()) if self.draw(st.booleans()) else some

    def all_in_one(self) -> tuple[int, ...]:
        """One more value, into which all others go."""
        self.add(Op("cat", tuple(range(self.values))))
        return (self.values - 1,)


@st.composite
def programs(draw: Callable[[Any], Any], tidy: bool = False, mined: bool = False) -> Program:
    """A random program; `tidy`: each result is used in each pass; `mined`: a pass may come to functions that raise."""
    workers = draw(st.integers(2, 4))
    writer = _Writer(draw, workers, 0, draw(st.integers(1, 3)), tidy, mined)
    for last in [False] * draw(st.sampled_from([0, 0, 0, 1, 2])) + [True]:
        writer.write(4, always_call=True)
        if not last:
            writer.add(_backward(writer, workers, retain=True))
    writer.add(_backward(writer, workers, retain=draw(st.booleans())))
    hooks = st.tuples(
        st.integers(0, workers - 1), st.integers(0, PARAMETERS - 1), st.sampled_from(LEAF_HOOK_KINDS)
    )
    leaf_hooks = tuple(draw(st.lists(hooks, max_size=4)))
    program = Program(workers, PARAMETERS, Body(0, tuple(writer.steps)), leaf_hooks)
    if refuses(program):  # within a process that hook runs even if no gradient came
        program = replace(program, leaf_hooks=tuple(hook for hook in leaf_hooks if hook[2] != "after"))
    return program


def _backward(writer: _Writer, workers: int, retain: bool) -> Backward:
    roots = writer.outcome(st.just(1))
    at = writer.draw(st.sampled_from([None] * 3 + list(range(workers))))
    return Backward(roots, retain, at)
