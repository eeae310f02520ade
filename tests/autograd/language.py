"""A small language for programs that compute over several workers: what can be written, not what it means.

A program is a value. Its `repr` is Python that builds it again, so a failing one can be pasted into the corpus.
Values are tensors (see `operations`), named by their number in the body that made them: first the arguments, then the
baggage if there is any, then what each step adds, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from tests.autograd.operations import OPERATIONS

Style = Literal["sync", "async", "remote", "passed", "twice", "lent"]
Target = Literal["plain", "coroutine", "future"]
Shape = Literal["list", "dict", "nested"]
STYLES: tuple[Style, ...] = ("sync", "async", "remote", "passed", "twice", "lent")
TARGETS: tuple[Target, ...] = ("plain", "coroutine", "future")
SHAPES: tuple[Shape, ...] = ("list", "dict", "nested")
HookKind = Literal["look", "bend", "before node", "after node", "bend node"]
HOOK_KINDS: tuple[HookKind, ...] = ("look", "bend", "before node", "after node", "bend node")
LeafHookKind = Literal["look", "bend", "after", "after node"]
LEAF_HOOK_KINDS: tuple[LeafHookKind, ...] = ("look", "bend", "after", "after node")


class _Printed:
    """Prints without the names of fields, and without those that have their default."""

    def __repr__(self) -> str:
        shown = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        defaults = [field.default for field in fields(self)]  # type: ignore[arg-type]
        while shown and shown[-1] == defaults[-1]:
            shown.pop()
            defaults.pop()
        return f"{type(self).__name__}({', '.join(map(repr, shown))})"


@dataclass(frozen=True, repr=False)
class Op(_Printed):
    """A local operation on values; see `operations`."""

    name: str
    inputs: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Leaf(_Printed):
    """The n-th parameter of the worker that runs this."""

    index: int


@dataclass(frozen=True, repr=False)
class Hook(_Printed):
    """Hang a hook on a value (adds no value): one that looks at the gradient, one that bends it, or one on its node."""

    value: int
    kind: HookKind = "look"


@dataclass(frozen=True, repr=False)
class Counted(_Printed):
    """The product of two values, by a function that takes note of each run of its backward."""

    one: int
    other: int


@dataclass(frozen=True, repr=False)
class Call(_Printed):
    """Have worker `to` run a body.

    Styles: `remote` fetches the result; `passed` has a third worker fetch it and return it; `twice` fetches it two times
    and adds the two; `lent` passes the arguments as a reference that the callee fetches. Targets are the kinds of
    function: plain, `async def`, or one that returns a future. `baggage`: other things travel along, both ways.
    """

    to: int
    inputs: tuple[int, ...]
    body: Body
    style: Style = "sync"
    target: Target = "plain"
    shape: Shape = "list"
    no_grad: bool = False
    baggage: bool = False


@dataclass(frozen=True, repr=False)
class Calls(_Printed):
    """Calls that are made at once and then waited for."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, repr=False)
class Backward(_Printed):
    """One pass from the sums of some values; the program's own body only. `at`: from a loss that worker computes."""

    roots: tuple[int, ...]
    retain: bool = False
    at: int | None = None


Step = Op | Leaf | Hook | Counted | Calls | Backward


@dataclass(frozen=True, repr=False)
class Body(_Printed):
    """What one function does: steps, and which values it returns."""

    arguments: int
    steps: tuple[Step, ...]
    results: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class Program(_Printed):
    """Workers with some parameters each, hooks on parameters, and what worker 0 does."""

    workers: int
    parameters: int
    body: Body
    leaf_hooks: tuple[tuple[int, int, LeafHookKind], ...] = ()


def values_added(step: Step) -> int:
    """How many values a step adds to those of its body."""
    match step:
        case Op(name, inputs):
            return OPERATIONS[name].outputs(len(inputs))
        case Leaf() | Counted():
            return 1
        case Calls(calls):
            return sum(len(call.body.results) for call in calls)
        case Hook() | Backward():
            return 0


def refuses(program: Program) -> bool:
    """Whether some function of the program may refuse to give a gradient."""
    return any(isinstance(step, Op) and step.name == "refuse" for step in steps_in(program.body))


def calls_in(body: Body) -> Iterator[Call]:
    """Every call that a body makes, and those made in turn."""
    for step in body.steps:
        for call in step.calls if isinstance(step, Calls) else ():
            yield call
            yield from calls_in(call.body)


def steps_in(body: Body) -> Iterator[Step]:
    """Every step of a body and of the bodies it calls."""
    yield from body.steps
    for call in calls_in(body):
        yield from call.body.steps
