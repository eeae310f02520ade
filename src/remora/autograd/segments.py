"""Runs one segment of the local graph on torch's own engine, so that every hook runs once and on the whole gradient.

The engine runs the nodes between where gradients come in and the segment's exits, the exits included, and nothing else.
It computes no gradient for a node that it will not run, though, so what leaves the segment is taken in another way: when
the engine has run a node with such edges, a hook of ours runs it once more, alone, for those. Capturing the gradients at
the nodes outside instead would run the hooks there, on a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from remora.autograd.graph import LeafNode, Node, Reach, Segment
from remora.autograd.leaves import Gathered, Lent
from remora.autograd.nodes import Gradients, Incoming, Recv
from remora.devices import streams

Received = list[tuple[Recv, Gradients]]


def run(
    segment: Segment | Reach,
    incoming: Incoming,
    gathered: Gathered,
    retain_graph: bool,
    leaves: Sequence[torch.Tensor] | None = None,
) -> tuple[Incoming, Received]:
    """Run a segment with the gradients that came into it. Those of leaves are added to `gathered`. Returned are those
    that leave the segment, and those of received tensors. `leaves`: all that the run may touch, if they are more than
    those of the segment."""
    if not incoming:
        return [], [(node.recv, {}) for node in segment.received]
    touched = segment.leaves if leaves is None else leaves
    with Lent(touched, gathered, (*segment.crossings, *segment.received)):
        for node in segment.received:
            node.recv.gradients = {}
        try:
            return _run(segment, incoming, retain_graph)
        finally:
            for node in segment.received:
                node.recv.gradients = None


def _run(segment: Segment | Reach, incoming: Incoming, retain_graph: bool) -> tuple[Incoming, Received]:
    outgoing: Incoming = []
    moments: list[streams.Moment | None] = []  # when what leaves the segment is there, on devices
    if segment.crossings or segment.sharing:
        held = _Held()
        with ExitStack() as stack:
            for node, numbers in segment.crossings.items():
                _tap(node, numbers, outgoing, stack, moments)
            for node in segment.sharing:
                stack.callback(node.register_hook(held.append_shared).remove)
            _backpropagate(segment, incoming, retain_graph)
    else:
        _backpropagate(segment, incoming, retain_graph)
    received: Received = []
    for node in segment.received:
        received.append((node.recv, node.recv.gradients))
    if streams.watched:  # the engine joins the streams of leaves, and not those of what leaves the segment
        for moment in (*moments, *(node.recv.moment for node in segment.received)):
            if moment is not None:
                moment.join([gradients for _, gradients in received])
    return outgoing, received


def _backpropagate(segment: Segment | Reach, incoming: Incoming, retain_graph: bool) -> None:
    """What `torch.autograd.backward` calls in the end. It would first look at symbolic shapes, and import half a second of
    other packages for that in the first pass of a process."""
    edges, gradients = zip(*incoming, strict=True)
    exits = tuple(GradientEdge(node, 0) for node in segment.exits) if segment.crossings else ()
    _engine.run_backward(
        edges, gradients, retain_graph, False, exits, allow_unreachable=True, accumulate_grad=True
    )  # fmt: skip


class _Held(list[Any]):
    """A gradient that a node gives to several leaves is held until the end of the run: torch then makes a copy for each,
    rather than let one of them have the memory that the others were copied from, and that the node may still know."""

    def append_shared(self, computed: tuple[Any, ...], came_in: object) -> None:
        gradients = [id(gradient) for gradient in computed if gradient is not None]
        if len(set(gradients)) < len(gradients):
            self.append(computed)


def _tap(
    node: Node, numbers: list[int], outgoing: Incoming, stack: ExitStack, moments: list[streams.Moment | None]
) -> None:
    """Take the gradients that leave the segment at a node, while `stack` is open.

    The hooks that the program has put behind the node (`grad_fn.register_hook`) must see these gradients, too, and may
    change them; but the engine has not computed them. So our hook stands in for all of those, and runs them itself.
    """

    def stand_in(computed: tuple[Any, ...], came_in: tuple[Any, ...]) -> tuple[Any, ...]:
        complete = computed
        if compiled and any(computed[number] is None for number in numbers):
            alone = _alone(node, came_in)
            complete = tuple(
                _fitted(alone[i], *node.next_functions[i]) if i in numbers else gradient
                for i, gradient in enumerate(computed)
            )
        for hook in theirs.values():
            complete = _as_tuple(hook(complete, came_in), complete)
        for number in numbers:
            if complete[number] is not None:
                outgoing.append((GradientEdge(*node.next_functions[number]), complete[number]))
        if streams.watched:
            moments.append(streams.moment())
        return tuple(complete[i] if gradient is not None else None for i, gradient in enumerate(computed))

    compiled = not hasattr(node, "apply")  # a function written in Python computes everything in any case
    handle = node.register_hook(stand_in)
    hooks = handle.hooks_dict_ref()
    theirs = {key: hook for key, hook in hooks.items() if key != handle.id}
    for key in theirs:
        del hooks[key]
    stack.callback(hooks.update, theirs)
    stack.callback(handle.remove)


def _as_tuple(result: Any, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    if result is None:
        return otherwise
    return result if isinstance(result, tuple) else (result,)


def _fitted(gradient: torch.Tensor | None, node: Node, number: int) -> torch.Tensor | None:
    """A gradient as the engine would pass it on to this input of a node: a node may give one that is broadcast, or of
    another type."""
    if gradient is None:
        return None
    wanted: Any = getattr(node, "variable", None) if isinstance(node, LeafNode) else node._input_metadata[number]
    if gradient.layout is torch.strided and gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient.to(wanted.dtype) if gradient.dtype != wanted.dtype else gradient


def _alone(node: Node, came_in: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a node gives for all its edges. In a run of the engine without exits: there it computes all of them."""
    results: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            results.append(node(*came_in))

    with torch.enable_grad():
        step: torch.Tensor = _Step.apply(_anchor, work)  # type: ignore[no-untyped-call]
    _engine.run_backward((step,), (_one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    computed = results[0]
    return computed if isinstance(computed, tuple) else (computed,)


class _Step(torch.autograd.Function):
    """A node that runs a Python function."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, work: Any) -> torch.Tensor:
        ctx.work = work
        return anchor.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.work()
        return None, None


_engine: Any = torch.autograd.Variable._execution_engine
_anchor = torch.empty((), requires_grad=True)
_one = torch.ones(())
