"""The graph that torch recorded on this worker: what can be reached in it, and in which parts it can be run. Runs nothing.

The gradients of a pass come into the local graph at *sources*: the roots, and the tensors that were sent. They come at
different times, and some only after others have been passed on. So each node is labelled with the set of sources that
reach it, and nodes of the same label form a *segment*: it can be run, as a whole, when all its sources have come and the
segments before it have been run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remora.autograd.nodes import RecvNode

Node = Any  # torch has no common type for nodes written in C++ and in Python
Edge = tuple[Node, int]

LeafNode: type = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def behind(node: Node) -> Sequence[Edge]:
    """The edges that leave a node within this worker."""
    if isinstance(node, RecvNode):
        return ()  # its gradients leave the worker
    return node.next_functions  # type: ignore[no-any-return]


class Reach:
    """What was reached from the edges looked at so far. One walk finds everything a pass has to know. If those edges are
    one source, it is a segment as it stands."""

    __slots__ = ("leaves", "nodes", "outputs", "received", "sharing")

    crossings: ClassVar[Mapping[Node, list[int]]] = {}  # (see `Segment`) Nothing leaves what was reached,
    exits: ClassVar[Sequence[Node]] = ()  # so that it needs no end

    def __init__(self) -> None:
        self.nodes: set[Node] = set()  # keeps them: torch makes the object of a node anew when nobody holds it
        self.leaves: list[torch.Tensor] = []
        self.received: list[Node] = []
        self.outputs: set[Edge] = set()  # of received tensors: those that were reached
        self.sharing: list[Node] = []  # nodes right before several leaves, which might get one gradient together

    def follow(self, edges: Iterable[GradientEdge]) -> list[Edge]:
        """Go on from these edges; the received tensors that were reached for the first time, as edges to their nodes."""
        nodes = self.nodes
        found: list[Edge] = []
        stack: list[Edge] = [edge[:2] for edge in edges]
        while stack:
            edge = stack.pop()
            node = edge[0]
            kind = type(node)
            if kind is RecvNode and edge not in self.outputs:
                self.outputs.add(edge)
                found.append(edge)
            if node in nodes:
                continue
            nodes.add(node)
            if kind is LeafNode:
                self.leaves.append(node.variable)
            elif kind is RecvNode:
                self.received.append(node)
            else:
                if kind.__name__ == REENTRANT:
                    _refuse()
                leaves = 0
                for edge in node.next_functions:
                    if edge[0] is not None:
                        stack.append(edge)
                        leaves += type(edge[0]) is LeafNode
                if leaves > 1:
                    self.sharing.append(node)
        return found


REENTRANT = "CheckpointFunctionBackward"


def _refuse() -> None:
    raise RuntimeError(
        "reentrant checkpointing starts a backward pass of its own, whose gradients go to .grad and not to the context: "
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )


class Segment:
    """Nodes that the same sources reach."""

    __slots__ = ("after", "crossings", "exits", "label", "leaves", "received", "sharing")

    def __init__(self, label: int) -> None:
        self.label = label  # the set of its sources, one bit each
        self.after: set[int] = set()  # labels of the segments that have an edge into this one
        self.crossings: dict[Node, list[int]] = {}  # nodes with edges that leave the segment: which ones
        self.exits: list[Node] = []  # the nodes at its end: together, all of it leads to them
        self.leaves: list[torch.Tensor] = []
        self.received: list[Node] = []
        self.sharing: list[Node] = []  # (see `Reach`)


def divide(sources: Iterable[Iterable[GradientEdge]]) -> tuple[dict[int, Segment], dict[Node, int]]:
    """The segments of the graph by label, and the label of each node. The i-th source has bit i."""
    labels: dict[Node, int] = {}
    for bit, edges in enumerate(sources):
        for edge in edges:
            labels[edge.node] = labels.get(edge.node, 0) | 1 << bit
    order = _in_order(labels)
    for node in order:
        label = labels[node]
        for follower, _ in behind(node):
            if follower is not None:
                labels[follower] = labels.get(follower, 0) | label
    segments: dict[int, Segment] = {}
    for node in order:
        label = labels[node]
        segment = segments.get(label)
        if segment is None:
            segment = segments[label] = Segment(label)
        _add(segment, node, labels)
    for segment in segments.values():
        for node, numbers in segment.crossings.items():
            for number in numbers:
                segments[labels[node.next_functions[number][0]]].after.add(segment.label)
    return segments, labels


def _take_note(segment: Segment, node: Node) -> None:
    """What has to be known of a node when its segment is run."""
    kind = type(node)
    if kind is LeafNode:
        segment.leaves.append(node.variable)
    elif kind is RecvNode:
        segment.received.append(node)
    else:
        if kind.__name__ == REENTRANT:
            _refuse()
        if sum(isinstance(follower, LeafNode) for follower, _ in node.next_functions) > 1:
            segment.sharing.append(node)


def _add(segment: Segment, node: Node, labels: dict[Node, int]) -> None:
    _take_note(segment, node)
    numbers = [
        number
        for number, (follower, _) in enumerate(behind(node))
        if follower is not None and labels[follower] != segment.label
    ]
    if numbers:
        segment.crossings[node] = numbers
    if numbers or not any(follower is not None for follower, _ in behind(node)):
        segment.exits.append(node)


def _in_order(starts: Iterable[Node]) -> list[Node]:
    """All nodes that can be reached, each before those behind it."""
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
                if follower is not None and follower not in seen:
                    seen.add(follower)
                    stack.append((follower, iter(behind(follower))))
                    break
            else:
                stack.pop()
                finished.append(node)
    finished.reverse()
    return finished
