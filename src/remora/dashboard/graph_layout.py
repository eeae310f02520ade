"""Places the boxes of a directed graph: those that wait at the left, what they wait for at the right, cycles as rings. Pure.

Strongly connected boxes become one large box with a ring inside. What remains has no cycle, so every box gets a column: one
more than the rightmost of those that lead to it. The order within a column follows the neighbours in the one before, a few
times from either side, so that few edges cross. Parts that hang together stand below each other. The same graph is always
placed in the same way: boxes do not jump while a reader looks at them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

WIDTH, HEIGHT = 250.0, 54.0  # of a box, as in static/graph.js
ACROSS, DOWN = 90.0, 22.0  # between boxes
IN_RING = 56.0  # between those of a ring that stand below each other: for an arrow and its age
SWEEPS = 6


@dataclass(slots=True)
class Layout(Generic[T]):
    """The middle of each box, and the room that all of them take."""

    places: dict[T, tuple[float, float]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


@dataclass(slots=True)
class _Block(Generic[T]):
    """A box, or the boxes of a ring, placed around the middle of the block."""

    places: dict[T, tuple[float, float]]
    width: float
    height: float


def lay_out(nodes: Sequence[T], edges: Iterable[tuple[T, T]]) -> Layout[T]:
    """Place all nodes. An edge of a node that is not there is ignored."""
    known = set(nodes)
    after: dict[T, list[T]] = {node: [] for node in nodes}
    for one, other in edges:
        if one in known and other in known and one != other and other not in after[one]:
            after[one].append(other)
    whole: Layout[T] = Layout()
    for part in _parts(nodes, after):
        placed = _lay_out_part(part, after)
        down = whole.height + (DOWN * 2 if whole.places else 0.0)
        whole.places.update({node: (x, y + down) for node, (x, y) in placed.places.items()})
        whole.width = max(whole.width, placed.width)
        whole.height = down + placed.height
    return whole


def _parts(nodes: Sequence[T], after: Mapping[T, Sequence[T]]) -> list[list[T]]:
    """The sets of nodes that hang together, in the order of their first nodes."""
    around: dict[T, list[T]] = {node: list(after[node]) for node in nodes}
    for node in nodes:
        for other in after[node]:
            around[other].append(node)
    found: dict[T, int] = {}
    parts: list[set[T]] = []
    for node in nodes:
        if node not in found:
            pending, part = [node], {node}
            while pending:
                for other in around[pending.pop()]:
                    if other not in part:
                        part.add(other)
                        pending.append(other)
            found.update(dict.fromkeys(part, len(parts)))
            parts.append(part)
    return [[node for node in nodes if node in part] for part in parts]


def strong_components(nodes: Sequence[T], after: Mapping[T, Sequence[T]]) -> list[list[T]]:
    """The sets of nodes each of which leads to each other (Tarjan), without recursion."""
    number: dict[T, int] = {}
    low: dict[T, int] = {}
    stack: list[T] = []
    inside: set[T] = set()
    found: list[list[T]] = []
    for start in nodes:
        if start in number:
            continue
        number[start] = low[start] = len(number)
        stack.append(start)
        inside.add(start)
        work = [(start, iter(after[start]))]
        while work:
            node, rest = work[-1]
            other = next(rest, None)
            if other is not None:
                if other not in number:
                    number[other] = low[other] = len(number)
                    stack.append(other)
                    inside.add(other)
                    work.append((other, iter(after[other])))
                elif other in inside:
                    low[node] = min(low[node], number[other])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == number[node]:
                part: list[T] = []
                while not part or part[-1] != node:
                    part.append(stack.pop())
                    inside.discard(part[-1])
                found.append(part[::-1])
    return found


def _lay_out_part(nodes: Sequence[T], after: Mapping[T, Sequence[T]]) -> Layout[T]:
    components = strong_components(nodes, after)
    home = {node: place for place, component in enumerate(components) for node in component}
    blocks = [_ring(component, after) for component in components]
    # Tarjan finds a component after all that it leads to: so the reverse order has every block before its targets.
    order = range(len(components) - 1, -1, -1)
    targets = [
        sorted({home[other] for node in component for other in after[node]} - {place})
        for place, component in enumerate(components)
    ]
    column = [0] * len(components)
    for place in order:
        for target in targets[place]:
            column[target] = max(column[target], column[place] + 1)
    for place in reversed(order):  # a block without anything before it stands next to what it waits for
        if targets[place] and not any(place in each for each in targets):
            column[place] = min(column[target] for target in targets[place]) - 1
    columns: list[list[int]] = [[] for _ in range(max(column) + 1)]
    for place in order:
        columns[column[place]].append(place)
    columns = _untangle([each for each in columns if each], targets)
    return _place(columns, blocks)


def _ring(component: Sequence[T], after: Mapping[T, Sequence[T]]) -> _Block[T]:
    if len(component) == 1:
        return _Block({component[0]: (0.0, 0.0)}, WIDTH, HEIGHT)
    members = _along(component, after)
    count = len(members)
    across = WIDTH * 0.7 if count > 2 else 0.0
    down = HEIGHT * 1.5
    angles = [2 * math.pi * place / count - math.pi / 2 for place in range(count)]
    while True:
        points = [(across * math.cos(angle), down * math.sin(angle)) for angle in angles]
        if not any(_overlap(one, other) for one, other in itertools.combinations(points, 2)):
            return _Block(dict(zip(members, points, strict=True)), 2 * across + WIDTH, 2 * down + HEIGHT)
        across, down = across * 1.1, down * 1.1


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) < WIDTH + ACROSS and abs(one[1] - other[1]) < HEIGHT + IN_RING


def _along(component: Sequence[T], after: Mapping[T, Sequence[T]]) -> list[T]:
    """In an order in which most edges lead to the next one."""
    left, found = dict.fromkeys(component), [component[0]]
    del left[component[0]]
    while left:
        following = next((node for node in after[found[-1]] if node in left), None)
        found.append(next(iter(left)) if following is None else following)
        del left[found[-1]]
    return found


def _untangle(columns: list[list[int]], targets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Order each column by the mean place of its neighbours, from either side in turn."""
    sources: list[list[int]] = [[] for _ in targets]
    for place, others in enumerate(targets):
        for other in others:
            sources[other].append(place)
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        near = sources if forwards else targets
        for column in columns if forwards else reversed(columns):
            rank = {place: at / len(each) for each in columns for at, place in enumerate(each)}
            around = {place: [rank[other] for other in near[place]] or [rank[place]] for place in column}
            mean = {place: sum(ranks) / len(ranks) for place, ranks in around.items()}
            column.sort(key=mean.__getitem__)
    return columns


def _place(columns: list[list[int]], blocks: Sequence[_Block[T]]) -> Layout[T]:
    heights = [sum(blocks[place].height for place in column) + DOWN * (len(column) - 1) for column in columns]
    found: Layout[T] = Layout(height=max(heights))
    for column, height in zip(columns, heights, strict=True):
        width = max(blocks[place].width for place in column)
        y = (found.height - height) / 2
        for place in column:
            block = blocks[place]
            for node, (x, down) in block.places.items():
                found.places[node] = (found.width + width / 2 + x, y + block.height / 2 + down)
            y += block.height + DOWN
        found.width += width + ACROSS
    found.width -= ACROSS
    return found
