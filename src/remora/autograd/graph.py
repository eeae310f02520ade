"""The graph that torch recorded on this worker: what can be reached in it, and in which parts it can be run. Runs nothing.

The gradients of a pass come into the local graph at *sources*: the roots, and the tensors that were sent. They come at
different times, and some only after others have been passed on. So each node is labelled with the set of sources that
reach it, and nodes of the same label form a *segment*: it can be run, as a whole, when all its sources have come and the
segments before it have been run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remora.autograd.nodes import RecvNode

Node = Any  # torch has no common type for nodes written in C++ and in Python
Edge = tuple[Node, int]

LeafNode: type = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def edges_of(edges: Iterable[GradientEdge]) -> list[Edge]:
    """Edges as plain pairs."""
    return [(edge.node, edge.output_nr) for edge in edges]


def behind(node: Node) -> Sequence[Edge]:
    """The edges that leave a node within this worker."""
    if isinstance(node, RecvNode):
        return ()  # its gradients leave the worker
    return node.next_functions  # type: ignore[no-any-return]


class Reach:
    """What was reached from the sources looked at so far."""

    __slots__ = ("_nodes", "_outputs")

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}  # keeps them: torch makes the object of a node anew when nobody holds it
        self._outputs: set[Edge] = set()

    def follow(self, edges: Iterable[Edge]) -> list[Edge]:
        """Go on from these edges; the received tensors that were reached for the first time, as edges to their nodes."""
        found: list[Edge] = []
        stack = list(edges)
        while stack:
            node, number = stack.pop()
            if isinstance(node, RecvNode) and (node, number) not in self._outputs:
                self._outputs.add((node, number))
                found.append((node, number))
            if node not in self._nodes:
                self._nodes[node] = None
                stack.extend(edge for edge in behind(node) if edge[0] is not None)
        return found


class Segment:
    """Nodes that the same sources reach."""

    __slots__ = ("after", "crossings", "exits", "label", "leaves", "received", "sharing")

    def __init__(self, label: int) -> None:
        self.label = label  # the set of its sources, one bit each
        self.after: set[int] = set()  # labels of the segments that have an edge into this one
        self.crossings: dict[Node, list[int]] = {}  # nodes with edges that leave the segment: which ones
        self.exits: list[Node] = []  # the nodes at its end: together, all of it leads to them
        self.leaves: list[Node] = []
        self.received: list[Node] = []
        self.sharing: list[Node] = []  # nodes right before several leaves, which might get one gradient together


def divide(sources: Sequence[Sequence[Edge]]) -> tuple[dict[int, Segment], dict[Node, int]]:
    """The segments of the graph by label, and the label of each node. The i-th source has bit i."""
    if len(sources) == 1:
        return _undivided(sources[0])
    labels: dict[Node, int] = {}
    for bit, edges in enumerate(sources):
        for node, _ in edges:
            labels[node] = labels.get(node, 0) | 1 << bit
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


def _undivided(edges: Sequence[Edge]) -> tuple[dict[int, Segment], dict[Node, int]]:
    """The one segment of one source."""
    segment = Segment(1)
    labels: dict[Node, int] = {}
    stack = [node for node, _ in edges]
    while stack:
        node = stack.pop()
        if node not in labels:
            labels[node] = 1
            _take_note(segment, node)
            stack.extend(follower for follower, _ in behind(node) if follower is not None)
    return {1: segment}, labels


def _take_note(segment: Segment, node: Node) -> None:
    """What has to be known of a node when its segment is run."""
    if isinstance(node, LeafNode):
        segment.leaves.append(node)
    elif isinstance(node, RecvNode):
        segment.received.append(node)
    elif type(node).__name__ == "CheckpointFunctionBackward":
        raise RuntimeError(
            "reentrant checkpointing starts a backward pass of its own, whose gradients go to .grad and not to the context: "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    else:
        leaves = 0
        for follower, _ in node.next_functions:
            leaves += isinstance(follower, LeafNode)
        if leaves > 1:
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
