"""Runs one segment of the local graph on torch's own engine, so that every hook runs once and on the whole gradient.

The engine can either *capture* the gradients of ends, without running them, or *run* all nodes between where gradients come
in and some exits, these included. What is captured never comes to the accumulators of leaves, which would add it to `.grad`.
But what a node gives to another segment, whose nodes must not see it before it is whole, cannot be captured there: that
would run their hooks. So a segment with such edges is run up to the nodes they leave from, and the gradients are *tapped*
at those. The engine computes no gradient for a node that it will not come to; a hook of ours has the node compute those.

A run that takes long sends the gradients of received tensors while it goes on. What is captured is seen at its end; so there
the engine runs the nodes of those tensors, because an edge leads from each to an anchor, which is captured in their stead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from remora.autograd.claims import BorrowedGrad, Claim, set_up_gate
from remora.autograd.graph import Capturing, Ends, Joined, LeafNode, Node, Place, Reach, Segment, looking
from remora.autograd.leaves import Gathered
from remora.autograd.nodes import Gradients, Incoming, Recv, RecvNode, Start, anchor, in_front_of
from remora.devices import streams

Received = list[tuple[Recv, Gradients]]
Runnable = Segment | Reach | Joined
Send = Callable[[Recv, Gradients], None]  # the gradients of received tensors, to where those came from

LARGE = 1 << 18  # elements: a gradient of which to add it takes much longer than to run a hook


def run(
    segment: Runnable,
    incoming: Incoming,
    gathered: Gathered,
    retain_graph: bool,
    borrowed: Sequence[torch.Tensor] | None = None,
    send: Send | None = None,
) -> tuple[Incoming, Received]:
    """Run a segment with the gradients that came into it. Those of leaves are added to `gathered`. Returned are those
    that go on to other segments, and those of received tensors, unless they can be given to `send` as they come. `borrowed`:
    all leaves whose `.grad` the accumulators of this one may look at, if they are more than its own."""
    leaving: Incoming = []
    if segment.taps:
        ends, inner = _parted(incoming, segment)
        tapped = _run_tapped(segment, inner, retain_graph) if inner else []
        del inner, incoming
        own, leaving = _parted(tapped, segment)
        incoming = ends + own
        del tapped, own, ends
    received: dict[Node, Gradients] = {node: {} for node in segment.received}
    if segment.native or segment.run_received:
        native = [each for each in incoming if _is_native(each[0], segment)]
        if native:
            incoming = [each for each in incoming if not _is_native(each[0], segment)]
            _run_native(segment, native, gathered, borrowed, received)
    if incoming:
        if send is not None and isinstance(segment, Joined) and segment.received:

            def send_now(node: Node, gradients: Gradients) -> None:
                del received[node]
                send(node.recv, gradients)

            with Claim(segment.received), _collecting(segment.received, lambda node: partial(send_now, node)):
                _capture(segment, incoming, gathered, retain_graph, received, [anchor])
        else:
            _capture(segment, incoming, gathered, retain_graph, received)
    return leaving, [(node.recv, gradients) for node, gradients in received.items()]


def _parted(incoming: Incoming, segment: Runnable) -> tuple[Incoming, Incoming]:
    """Those that come in at ends of the segment, and the others."""
    ends: Incoming = []
    others: Incoming = []
    for each in incoming:
        start = each[0]
        if isinstance(start, torch.Tensor):
            is_end = id(start) in segment.leaves or id(start) in segment.native
        else:
            is_end = isinstance(start.node, RecvNode) and start.node in segment.received
        (ends if is_end else others).append(each)
    return ends, others


def _is_native(start: Start, segment: Runnable) -> bool:
    if isinstance(start, torch.Tensor):
        return id(start) in segment.native
    return start.node in segment.run_received


# Capturing.


def _capture(
    segment: Runnable,
    incoming: Incoming,
    gathered: Gathered,
    retain_graph: bool,
    received: dict[Node, Gradients],
    anchors: Sequence[torch.Tensor] = (),
) -> None:
    """Run the segment up to its ends, and take the gradients that come there. With an anchor, the nodes of received tensors
    are run in place of that."""
    leaves: list[torch.Tensor] = []
    outputs = [] if anchors else list(segment.outputs)
    if segment.run_received:
        outputs = [edge for edge in outputs if edge[0] not in segment.run_received]
    with Capturing() as ends:
        with looking:
            for leaf, node, number in segment.leaves.values():
                if leaf.requires_grad:  # the program may have frozen it since
                    leaves.append(leaf)
                    ends.append(leaf if node is None else GradientEdge(*node.next_functions[number]))
        ends += (GradientEdge(*edge) for edge in outputs)
        ends += anchors
        starts, gradients = _unzipped(incoming)
        large = any(leaf.numel() >= LARGE for leaf in leaves)
        if large:
            _let_memory_be_reused()
        early = large and isinstance(segment, Segment)
        with _taking_early(segment.leaves.values(), gathered) if early else nullcontext():
            captured = _run_capturing(ends, starts, gradients, retain_graph) if starts and ends else []
    if not captured:
        return
    del captured[len(captured) - len(anchors) :]
    for node, number in reversed(outputs):
        gradient = captured.pop()
        if gradient is not None:
            received[node][number] = gradient
    del gradients
    incoming.clear()
    gathered.add(leaves, captured)


def _let_memory_be_reused() -> None:
    """For the allocator of glibc. It cuts aligned memory out of a larger piece, and each thread keeps the offcuts, seven of
    each size. Between two of those, memory that is free again is a few bytes too small for the next gradient of the same
    size. That gets fresh memory, up to eight times in a thread, and to make its pages takes longer than to compute it. The
    offcuts of these tensors are so many that the thread keeps no more of them."""
    _ = [torch.empty(1 << 16, dtype=torch.uint8, device="cpu") for _ in range(16)]


def _run_capturing(ends: Ends, starts: Any, gradients: Any, retain_graph: bool) -> list[torch.Tensor | None]:
    return list(
        _engine.run_backward(
            starts, gradients, retain_graph, False, tuple(ends), allow_unreachable=True, accumulate_grad=False
        )
    )


def _unzipped(incoming: Incoming) -> tuple[tuple[Start, ...], tuple[torch.Tensor, ...]]:
    """The gradients that come in, as the engine takes them; without leaves that the program has frozen."""
    pairs = [each for each in incoming if not isinstance(each[0], torch.Tensor) or each[0].requires_grad]
    return tuple(start for start, _ in pairs), tuple(gradient for _, gradient in pairs)


# Where a leaf is large, gradients are added where they leave the last node before their leaf, the small ones beside it, too.
# Captured ones would all be there at the end of the run, and their memory, given back and taken anew in each run, would cost
# more time than to add them.


@contextmanager
def _taking_early(places: Iterable[Place], gathered: Gathered) -> Iterator[None]:
    """The gradients that nodes give for leaves are added at once, and the engine gets none for those. A leaf that has other
    edges gets the rest at the end. The nodes are claimed: torch does not let a thread hang a hook on a node that another
    one runs."""
    before: dict[Node, dict[int, torch.Tensor]] = {}
    for leaf, node, number in places:
        if node is not None and leaf.requires_grad and _may_be_taken_early(leaf):
            before.setdefault(node, {})[number] = leaf
    with Claim(before), ExitStack() as stack:
        for node, leaves in before.items():
            stack.callback(node.register_hook(_Taker(leaves, gathered)).remove)
        yield


def _may_be_taken_early(leaf: torch.Tensor) -> bool:
    """A hook of the leaf would have to see its gradient; on devices the order of streams is kept for a whole run; and to
    look for a NaN the engine needs what a node gives."""
    return not leaf._backward_hooks and leaf.device.type == "cpu" and not torch.is_anomaly_enabled()


class _Taker:
    """A hook behind a node. It leaves alone what other threads run: a local pass may come through the node, too."""

    __slots__ = ("_gathered", "_leaves", "_thread")

    def __init__(self, leaves: dict[int, torch.Tensor], gathered: Gathered) -> None:
        self._leaves = leaves
        self._gathered = gathered
        self._thread = threading.get_ident()

    def __call__(self, computed: tuple[Any, ...], came_in: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread:
            return None
        rest = list(computed)
        for number, leaf in self._leaves.items():
            gradient = computed[number]
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dtype is leaf.dtype:
                self._gathered.add([leaf], [_as_for(leaf, gradient)])
                rest[number] = None
        return tuple(rest)


# Running.


def _run_up_to(exits: Sequence[Node], incoming: Incoming, retain_graph: bool) -> None:
    starts, gradients = _unzipped(incoming)
    if starts:
        edges = tuple(GradientEdge(node, 0) for node in exits)
        _engine.run_backward(starts, gradients, retain_graph, False, edges, allow_unreachable=True, accumulate_grad=True)


def _run_native(
    segment: Runnable,
    incoming: Incoming,
    gathered: Gathered,
    borrowed: Sequence[torch.Tensor] | None,
    received: dict[Node, Gradients],
) -> None:
    """Run ends themselves, with all that hangs on them."""
    leaves = [leaf for leaf in segment.native.values() if leaf.requires_grad]
    looked_at = leaves if borrowed is None else borrowed
    for leaf in looked_at:
        set_up_gate(leaf)
    nodes = [*segment.run_received, *(in_front_of(leaf).grad_fn.next_functions[0][0] for leaf in leaves)]  # type: ignore[union-attr]
    collecting = _collecting(segment.run_received, lambda node: received[node].update)
    with Claim((*looked_at, *segment.run_received)), BorrowedGrad(looked_at, gathered), collecting:
        _run_up_to(nodes, incoming, retain_graph=True)  # an end keeps nothing that could be freed
    if streams.watched:
        gathered.touch()
        for node in segment.run_received:
            if node.recv.point is not None:
                node.recv.point.join(received[node])


@contextmanager
def _collecting(nodes: Sequence[Node], take: Callable[[Node], Callable[[Gradients], object]]) -> Iterator[None]:
    """The gradients of these nodes of received tensors go to the functions that `take` returns."""
    for node in nodes:
        node.recv.collecting = threading.get_ident(), take(node)
    try:
        yield
    finally:
        for node in nodes:
            node.recv.collecting = None


def _run_tapped(segment: Runnable, incoming: Incoming, retain_graph: bool) -> Incoming:
    """Run the segment without its ends; the gradients that leave it, for its ends and for others."""
    outgoing: Incoming = []
    points: list[streams.StreamPoint | None] = []  # when they are there, on devices
    with Claim(segment.taps), ExitStack() as stack:
        for node, numbers in segment.taps.items():
            _tap(node, numbers, outgoing, stack, points)
        _run_up_to(segment.exits, incoming, retain_graph)
    for point in points:  # the engine joins the streams of what it captures, and not those of what is tapped
        if point is not None:
            point.join([gradient for _, gradient in outgoing])
    return outgoing


def _tap(
    node: Node, numbers: list[int], outgoing: Incoming, stack: ExitStack, points: list[streams.StreamPoint | None]
) -> None:
    """Take the gradients that leave the segment at a node, while `stack` is open.

    The hooks that the program has put behind the node (`grad_fn.register_hook`) must see these gradients, too, and may
    change them; but the engine has not computed them. So our hook stands in for all of those, and runs them itself.
    """

    def stand_in(computed: tuple[Any, ...], came_in: tuple[Any, ...]) -> tuple[Any, ...]:
        ours = threading.get_ident() == thread or _on_devices(came_in)  # there all passes share a thread
        complete = computed
        if ours and compiled and any(computed[number] is None for number in numbers):
            alone = _alone(node, numbers, came_in)
            complete = tuple(
                _fitted(alone[i], node, i) if i in numbers else gradient for i, gradient in enumerate(computed)
            )
        for hook in theirs.values():
            complete = _as_tuple(hook(complete, came_in), complete)
        if not ours:
            return complete  # the program runs a pass of its own through this node
        for number in numbers:
            if complete[number] is not None:
                outgoing.append((_start_behind(node, number), complete[number]))
        if streams.watched:
            points.append(streams.stream_point())
        return tuple(complete[i] if gradient is not None else None for i, gradient in enumerate(computed))

    thread = threading.get_ident()
    compiled = not hasattr(node, "apply")  # a function written in Python computes everything in any case
    handle = node.register_hook(stand_in)
    hooks = handle.hooks_dict_ref()
    theirs = {key: hook for key, hook in hooks.items() if key != handle.id}
    for key in theirs:
        del hooks[key]
    stack.callback(hooks.update, theirs)
    stack.callback(handle.remove)


def _on_devices(tensors: tuple[Any, ...]) -> bool:
    return any(tensor is not None and tensor.device.type != "cpu" for tensor in tensors)


def _start_behind(node: Node, number: int) -> Start:
    """The place at which the gradient that a node gives for one of its edges comes in."""
    with looking:
        follower, place = node.next_functions[number]
        if isinstance(follower, LeafNode):
            leaf: torch.Tensor = follower.variable
            del follower
            return leaf
        return GradientEdge(follower, place)


def _as_tuple(result: Any, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    if result is None:
        return otherwise
    return result if isinstance(result, tuple) else (result,)


def _fitted(gradient: torch.Tensor | None, node: Node, number: int) -> torch.Tensor | None:
    """A gradient as the engine would pass it on along this edge of a node: a node may give one that is broadcast, or of
    another type."""
    if gradient is None:
        return None
    start = _start_behind(node, number)
    return _as_for(start if isinstance(start, torch.Tensor) else start.node._input_metadata[start.output_nr], gradient)


def _as_for(wanted: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Of the shape and the type that are wanted."""
    if gradient.layout is torch.strided and gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient.to(wanted.dtype) if gradient.dtype != wanted.dtype else gradient


def _alone(node: Node, numbers: list[int], came_in: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that a node gives for these of its edges. They are computed in a run of the engine that captures at
    those edges: so the node computes nothing else."""
    results: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            results.append(node(*came_in))

    with torch.enable_grad():
        step: torch.Tensor = _Step.apply(_anchor, work)  # type: ignore[no-untyped-call]
    with Capturing() as ends:
        ends.append(_anchor)
        with looking:
            ends += (GradientEdge(*node.next_functions[number]) for number in numbers)
        _run_capturing(ends, (step,), (_one,), retain_graph=False)
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


# What `torch.autograd.backward` and `torch.autograd.grad` call in the end. They would first look at symbolic shapes, and
# import half a second of other packages for that in the first pass of a process.
_engine: Any = torch.autograd.Variable._execution_engine
_anchor = torch.empty((), requires_grad=True)
_one = torch.ones(())
