"""The graph that torch recorded on this worker: the nodes that a pass reaches, and their segments. Runs nothing.

The gradients of a pass come into the local graph at *sources*: the roots, and the tensors that were sent. They come at
different times, and some only after others have been passed on. So each node is labelled with the set of sources that
reach it, and nodes of the same label form a *segment*: it can be run, as a whole, when all its sources have come and the
segments before it have been run.

The graph ends at leaves and at received tensors. A *plain* leaf, on which the program has hung nothing, has no label: what
comes to it is added up as it comes, from any segment. Other leaves need their whole gradient at once, for their hooks. Most
ends are not run: the engine captures their gradients. The accumulator of a leaf behind which something hangs has to be run,
and so has the node of received tensors on which the program has hung hooks: those ends are *native*.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch

from remora.autograd.nodes import RecvNode, Start, in_front_of

Node = Any  # torch has no common type for nodes written in C++ and in Python
Edge = tuple[Node, int]
Place = tuple[torch.Tensor, Node, int]  # a leaf, and an edge to its accumulator: a node before it, and which of its edges

LeafNode: Any = type(in_front_of(torch.empty(0, requires_grad=True)).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def behind(node: Node) -> Sequence[Edge]:
    """The edges that leave a node within this worker."""
    if isinstance(node, RecvNode):
        return ()  # its gradients leave the worker
    return node.next_functions  # type: ignore[no-any-return]


class Kind(Enum):
    """The treatment of a leaf."""

    PLAIN = 0
    WATCHED = 1  # hooks have to see its whole gradient; the engine runs them when it captures that
    NATIVE = 2  # its accumulator has to be run


def kind_of(leaf: torch.Tensor, held: bool) -> Kind:
    """`held`: whether the program has the accumulator."""
    if held or leaf._post_accumulate_grad_hooks or grouped():
        return Kind.NATIVE
    return Kind.WATCHED if leaf._backward_hooks else Kind.PLAIN


def grouped() -> bool:
    """True if DistributedDataParallel may be in use. Its hooks on accumulators cannot be seen from Python."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# Hooks on an accumulator cannot be seen either. But a program that hung one there before the forward pass has the
# accumulator, or torch would have dropped it with the hook. So we look whether something has it besides us. To tell that,
# we have accumulators only in two ways: for a moment, by a thread that has `looking`; and in `Ends`, which are known.

Ends = list[Start]  # where a run of the engine captures gradients
_all_ends: dict[int, Ends] = {}  # those of the runs that are under way; by the id of the list
# Reentrant: the collector may run a destructor of the program meanwhile. Nothing else of the program's runs under it.
looking = threading.RLock()  # guards: the moments in which a thread has accumulators of the program


class Capturing:
    """`with Capturing() as ends:` the ends of a run, to be filled in under `looking`."""

    __slots__ = ("_ends",)

    def __enter__(self) -> Ends:
        self._ends: Ends = []
        _all_ends[id(self._ends)] = self._ends
        return self._ends

    def __exit__(self, *error: object) -> None:
        with looking:  # between the two, they would be taken for held by the program
            self._ends.clear()
            del _all_ends[id(self._ends)]


def is_held(leaf: torch.Tensor) -> bool:
    """True if the program has the accumulator of a leaf. Under `looking`."""
    return leaf.requires_grad and _references(in_front_of(leaf)) > _UNHELD


def _references(front: torch.Tensor) -> int:
    """The number of references to the accumulator of a leaf, besides those in ends. `front` comes from the leaf."""
    edges = front.grad_fn.next_functions  # type: ignore[union-attr]
    for edge in edges:
        node = edge[0]
        ours = sum(not isinstance(end, torch.Tensor) and end[0] is node for ends in _all_ends.values() for end in ends)
        return sys.getrefcount(node) - ours
    raise AssertionError


# What is counted for an accumulator that nothing else has: torch's own way to keep its object counts, too.
_UNHELD = _references(in_front_of(torch.empty(0, requires_grad=True)))


class Reach:
    """The part of the graph that was reached so far. One walk finds everything that a pass has to know. If it was reached
    from one source, and no end of it is native, it is a segment as it stands."""

    __slots__ = ("_suspects", "leaves", "nodes", "outputs", "received")

    taps: ClassVar[Mapping[Node, list[int]]] = {}  # (see `Segment`) Nothing leaves what was reached
    exits: ClassVar[Sequence[Node]] = ()
    native: ClassVar[Mapping[int, torch.Tensor]] = {}
    run_received: ClassVar[Sequence[Node]] = ()

    def __init__(self) -> None:
        self.nodes: set[Node] = set()  # keeps them: torch makes the object of a node anew when nothing holds it
        self.leaves: dict[int, Place] = {}  # by the id of the leaf
        self._suspects: set[int] = set()  # leaves whose accumulators the program may have
        self.received: list[Node] = []
        self.outputs: dict[Edge, None] = {}  # of received tensors: those that were reached

    def follow(self, starts: Iterable[Start]) -> list[Edge]:
        """Go on from there. Returns the received tensors that were reached for the first time, as edges to their nodes."""
        with looking:
            return self._follow(starts)

    def _follow(self, starts: Iterable[Start]) -> list[Edge]:
        nodes = self.nodes
        found: list[Edge] = []
        stack: list[Edge] = []
        for start in starts:
            if isinstance(start, torch.Tensor):
                self.leaves.setdefault(id(start), (start, None, 0))
                self._suspects.add(id(start))
            else:
                stack.append(start[:2])
        while stack:
            edge = stack.pop()
            node = edge[0]
            kind = type(node)
            if kind is RecvNode and edge not in self.outputs:
                self.outputs[edge] = None
                found.append(edge)
            if node in nodes:
                continue
            nodes.add(node)
            if kind is RecvNode:
                self.received.append(node)
                continue
            if kind.__name__ == REENTRANT:
                _refuse()
            edges = node.next_functions
            for number, edge in enumerate(edges):
                follower = edge[0]
                if type(follower) is LeafNode:
                    leaf = follower.variable
                    self.leaves[id(leaf)] = leaf, node, number
                    if sys.getrefcount(follower) > _UNHELD:
                        self._suspects.add(id(leaf))
                elif follower is not None:
                    stack.append(edge)
        return found

    def find_held(self) -> set[int]:
        """The leaves whose accumulators the program has."""
        if not self._suspects:
            return set()
        leaves = [self.leaves[key][0] for key in self._suspects]
        with looking:
            return {id(leaf) for leaf in leaves if is_held(leaf)}

    def has_native_ends(self, held: set[int]) -> bool:
        """True if some end of it has to be run."""
        if held or grouped():
            return True
        for leaf, _, _ in self.leaves.values():
            if leaf._post_accumulate_grad_hooks:
                return True
        return any(node.recv.hooked for node in self.received)


REENTRANT = "CheckpointFunctionBackward"


def _refuse() -> None:
    raise RuntimeError(
        "reentrant checkpointing starts a backward pass of its own, whose gradients go to .grad and not to the context: "
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )


class Segment:
    """Nodes that the same sources reach, and the ends among them.

    If some of its gradients go on to other segments, or to native ends, they cannot be captured: that would run the hooks
    there, on a part of the gradient. Then they are tapped where they leave the nodes before (`segments.py`).
    """

    __slots__ = ("after", "exits", "label", "leaves", "native", "nodes", "outputs", "received", "run_received", "taps")

    def __init__(self, label: int) -> None:
        self.label = label  # the set of its sources, one bit each
        self.after: set[int] = set()  # labels of the segments that have an edge into this one
        self.nodes: list[Node] = []  # without the ends
        self.taps: dict[Node, list[int]] = {}  # if gradients have to be tapped, nodes with edges to ends or other segments
        self.exits: list[Node] = []  # if gradients have to be tapped, nodes that together all of it leads to
        self.leaves: dict[int, Place] = {}  # those whose gradients are captured
        self.native: dict[int, torch.Tensor] = {}  # those whose accumulators are run
        self.received: list[Node] = []
        self.run_received: list[Node] = []  # those of them that are run
        self.outputs: dict[Edge, None] = {}  # of received tensors: those that were reached


class Joined:
    """Several segments that end at what can be captured, to be run in one go."""

    __slots__ = ("leaves", "outputs", "received")

    taps, exits, native, run_received = Reach.taps, Reach.exits, Reach.native, Reach.run_received

    def __init__(self, segments: Sequence[Segment | Reach]) -> None:
        places: dict[Node, Place] = {}  # by the accumulator: a leaf that was given another type between two calls has two
        with looking:
            for segment in segments:
                for place in segment.leaves.values():
                    places[_accumulator(place)] = place
            self.leaves = dict(enumerate(places.values()))
            places.clear()
        self.received = [node for segment in segments for node in segment.received]
        self.outputs = {edge: None for segment in segments for edge in segment.outputs}


def can_be_joined(segment: Segment | Reach | Joined) -> bool:
    """True if all its ends can be captured."""
    return not (segment.taps or segment.native or segment.run_received)


def _accumulator(place: Place) -> Node:
    leaf, node, number = place
    return (in_front_of(leaf).grad_fn if node is None else node).next_functions[0 if node is None else number][0]  # type: ignore[union-attr]


class Division:
    """A graph in segments. The i-th source has bit i. `held`: the leaves whose accumulators the program has."""

    __slots__ = ("_held", "_kinds", "_labels", "segments")

    def __init__(self, sources: Iterable[Iterable[Start]], held: Container[int] = ()) -> None:
        self.segments: dict[int, Segment] = {}  # by label
        self._labels: dict[Node | int, int] = {}  # of nodes, and of leaves that are not plain, by their ids
        self._held = held
        self._kinds: dict[int, Kind] = {}  # of leaves
        starts = [(1 << bit, start) for bit, each in enumerate(sources) for start in each]
        for label, start in starts:
            if not isinstance(start, torch.Tensor):
                self._label(start.node, label)
            elif self._kind(start) is not Kind.PLAIN:
                self._label(id(start), label)
        with looking:
            self._divide(starts)

    def _divide(self, starts: list[tuple[int, Start]]) -> None:
        order = _in_order([node for node in self._labels if not isinstance(node, int)])
        for node in order:
            self._label_behind(node)
        for label, start in starts:
            if isinstance(start, torch.Tensor):
                self._add_leaf(self.label_of(start, label), (start, None, 0))
            elif isinstance(start.node, RecvNode):
                self._segment(self._labels[start.node]).outputs[start[:2]] = None
        for node in order:
            self._add(node)
        for segment in self.segments.values():
            self._find_taps(segment)

    def label_of(self, start: Start, otherwise: int) -> int:
        """The label of the segment that a gradient goes to; `otherwise` if that is a plain leaf."""
        return self._labels.get(id(start), otherwise) if isinstance(start, torch.Tensor) else self._labels[start.node]

    def _kind(self, leaf: torch.Tensor) -> Kind:
        kind = self._kinds.get(id(leaf))
        if kind is None:
            kind = self._kinds[id(leaf)] = kind_of(leaf, id(leaf) in self._held)
        return kind

    def _label(self, key: Node | int, label: int) -> None:
        self._labels[key] = self._labels.get(key, 0) | label

    def _label_behind(self, node: Node) -> None:
        label = self._labels[node]
        for follower, _ in behind(node):
            if type(follower) is LeafNode:
                leaf = follower.variable
                if self._kind(leaf) is not Kind.PLAIN:
                    self._label(id(leaf), label)
            elif follower is not None:
                self._label(follower, label)

    def _segment(self, label: int) -> Segment:
        segment = self.segments.get(label)
        if segment is None:
            segment = self.segments[label] = Segment(label)
        return segment

    def _add(self, node: Node) -> None:
        """To its segment, and what is behind it to theirs."""
        label = self._labels[node]
        segment = self._segment(label)
        if isinstance(node, RecvNode):
            segment.received.append(node)
            if node.recv.hooked:
                segment.run_received.append(node)
            return
        if type(node).__name__ == REENTRANT:
            _refuse()
        segment.nodes.append(node)
        for number, (follower, place) in enumerate(node.next_functions):
            if follower is None:
                continue
            if type(follower) is LeafNode:
                leaf = follower.variable
                other = self._labels.get(id(leaf), label)
                self._add_leaf(other, (leaf, node, number))
            else:
                other = self._labels[follower]
                if isinstance(follower, RecvNode):
                    self._segment(other).outputs[follower, place] = None
            if other != label:
                self._segment(other).after.add(label)

    def _add_leaf(self, label: int, place: Place) -> None:
        leaf = place[0]
        segment = self._segment(label)
        if self._kind(leaf) is Kind.NATIVE:
            segment.native[id(leaf)] = leaf
        else:
            segment.leaves[id(leaf)] = place

    def _find_taps(self, segment: Segment) -> None:
        """If some of its gradients cannot be captured, none are: the engine does either for a whole run."""
        tapped = False
        for node in segment.nodes:
            numbers = []
            followed = False
            for number, (follower, _) in enumerate(node.next_functions):
                if follower is None:
                    continue
                followed = True
                if type(follower) is LeafNode:
                    key = id(follower.variable)
                    numbers.append(number)
                    tapped = tapped or self._labels.get(key, segment.label) != segment.label or key in segment.native
                elif isinstance(follower, RecvNode) or self._labels[follower] != segment.label:
                    numbers.append(number)
                    tapped = tapped or self._labels[follower] != segment.label or follower.recv.hooked
            if numbers:
                segment.taps[node] = numbers
            if numbers or not followed:
                segment.exits.append(node)
        if not tapped:
            segment.taps, segment.exits = {}, []


def _in_order(starts: Iterable[Node]) -> list[Node]:
    """All nodes that can be reached, each before those behind it; not the accumulators of leaves."""
    finished: list[Node] = []
    seen: set[Node] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(behind(start)))]
        while stack:
            node, edges = stack[-1]
            for follower, _ in edges:
                if follower is not None and type(follower) is not LeafNode and follower not in seen:
                    seen.add(follower)
                    stack.append((follower, iter(behind(follower))))
                    break
            else:
                stack.pop()
                finished.append(node)
    finished.reverse()
    return finished
