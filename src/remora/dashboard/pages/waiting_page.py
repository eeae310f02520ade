"""Waiting: the wait-for graph, laid out, with its cycles; each in words, too.

A call and the thread that serves it are one box. Many that wait for the same in the same way are one box with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remora.dashboard.graph_layout import lay_out, strong_components
from remora.dashboard.moment import Moment
from remora.dashboard.pages.chain import address_of, cycle_texts
from remora.observer.waits import Edge, Node, NodeKind

PARTS = ("calls", "waits", "threads", "owned", "passes")
BOXES = 80
ALIKE = 4  # more than so many waiters of one kind are drawn as one


@dataclass(slots=True)
class Box:
    """A group of nodes that is drawn as one."""

    nodes: list[Node]
    text: str
    note: str = ""
    count: int = 1
    targets: dict[int, Edge] = field(default_factory=dict)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    boxes = _boxes(moment)
    red = {node for cycle in moment.graph.cycles() for node in cycle.nodes}
    gone = moment.graph.gone()
    order = _in_order(boxes, red)
    kept = order[:BOXES]
    edges = [(one, other) for one in kept for other in boxes[one].targets if other in set(kept)]
    placed = lay_out(kept, edges)
    bad = {one for one in kept if any(node in red for node in boxes[one].nodes)}
    return {
        "cycles": cycle_texts(moment),
        "width": round(placed.width),
        "height": round(placed.height),
        "boxes": [
            {
                "id": str(boxes[one].nodes[0]),
                "x": round(placed.places[one][0]),
                "y": round(placed.places[one][1]),
                "text": boxes[one].text,
                "note": boxes[one].note,
                "count": boxes[one].count,
                "kind": boxes[one].nodes[0].kind.value,
                "worker": boxes[one].nodes[0].worker,
                "href": address_of(boxes[one].nodes),
                "bad": one in bad,
                "gone": not gone.isdisjoint(boxes[one].nodes),
            }
            for one in kept
        ],
        "edges": [
            {
                "from": str(boxes[one].nodes[0]),
                "to": str(boxes[other].nodes[0]),
                "text": boxes[one].targets[other].text,
                "age": boxes[one].targets[other].age,
                "bad": one in bad and other in bad,
            }
            for one, other in edges
        ],
        "left_out": len(order) - len(kept),
    }


def _boxes(moment: Moment) -> list[Box]:
    graph = moment.graph
    home: dict[Node, Node] = {}
    for edge in graph.edges:  # a call and the thread that serves it
        if not edge.text and {edge.source.kind, edge.target.kind} == {NodeKind.CALL, NodeKind.THREAD}:
            home.setdefault(edge.target, edge.source)
    members: dict[Node, list[Node]] = {}
    for edge in graph.edges:
        for node in (edge.source, edge.target):
            list_of = members.setdefault(home.get(node, node), [])
            if node not in list_of:
                list_of.append(node)
    for first, nodes in members.items():
        nodes.sort(key=lambda node: node != first)
    places = {node: place for place, nodes in enumerate(members.values()) for node in nodes}
    boxes = [_box(moment, nodes) for nodes in members.values()]
    for edge in graph.edges:
        one, other = places[edge.source], places[edge.target]
        if one != other:
            boxes[one].targets.setdefault(other, edge)
    return _put_alike_together(boxes)


def _box(moment: Moment, nodes: list[Node]) -> Box:
    graph = moment.graph
    others = [graph.label(node) for node in nodes[1:]]
    note = next(filter(None, map(graph.remark, reversed(nodes))), "")
    return Box(nodes, graph.label(nodes[0]), ", ".join([*others, *([note] if note else [])]))


def _put_alike_together(boxes: list[Box]) -> list[Box]:
    """Boxes that nothing waits for, and which wait for the same one thing."""
    awaited = {target for box in boxes for target in box.targets}
    alike: dict[tuple[int, NodeKind], list[int]] = {}
    for place, box in enumerate(boxes):
        if place not in awaited and len(box.targets) == 1:
            alike.setdefault((next(iter(box.targets)), box.nodes[0].kind), []).append(place)
    dropped: set[int] = set()
    for group in alike.values():
        if len(group) > ALIKE:
            first = boxes[group[0]]
            workers = sorted({boxes[place].nodes[0].worker for place in group})
            first.count = len(group)
            first.text = f"{len(group)} like {first.text}"
            first.note = f"of {', '.join(workers[:3])}{f' and {len(workers) - 3} others' if len(workers) > 3 else ''}"
            dropped.update(group[1:])
    places = {old: new for new, old in enumerate(place for place in range(len(boxes)) if place not in dropped)}
    kept = [boxes[old] for old in places]
    for box in kept:
        box.targets = {places[target]: edge for target, edge in box.targets.items()}
    return kept


def _in_order(boxes: list[Box], red: Iterable[Node]) -> list[int]:
    """Places of boxes: parts with a cycle first, then those that have waited longest; connected ones stay together."""
    red = set(red)
    around: dict[int, list[int]] = {place: list(box.targets) for place, box in enumerate(boxes)}
    for place, box in enumerate(boxes):
        for target in box.targets:
            around[target].append(place)
    parts = strong_components(range(len(boxes)), around)
    return [place for part in sorted(parts, key=lambda part: _urgency(boxes, part, red)) for place in sorted(part)]


def _urgency(boxes: list[Box], part: Sequence[int], red: set[Node]) -> tuple[bool, float, int]:
    cyclic = any(node in red for place in part for node in boxes[place].nodes)
    oldest = max((edge.age or 0.0 for place in part for edge in boxes[place].targets.values()), default=0.0)
    # In steps of a factor of four: an order by exact ages would change at every look.
    return not cyclic, -len(f"{int(oldest * 10):b}") // 2, part[0]
