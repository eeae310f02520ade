"""The wait-for graph of a group: what waits for what across workers, the cycles in it, and both in words. Pure.

A node is *stuck* if it can never go on as things stand: it waits for a stuck node, or, where one of several is enough
(a full pool), for stuck nodes alone. All stuck nodes lead to a cycle, and only cycles of stuck nodes are reported. Snapshots
of workers are taken at different moments, so what they show together may never have been so at one moment: a
cycle counts only if all its edges hold at one moment, by clocks corrected as far as they are known.

    graph = WaitGraph.of(snapshot)
    graph.explain()     sentences, cycles first
    graph.cycles()      each as a `Chain` that ends where it began
    graph.chain(node)   from a node to what it finally waits for
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from remora.observer.model import GroupSnapshot
from remora.observer.wait_edges import graph_of
from remora.observer.wait_graph import Edge, Graph, Node, NodeKind

__all__ = ["Chain", "Edge", "Node", "NodeKind", "WaitGraph"]

Targets = dict[Node, list[Node]]

_OWN = (NodeKind.THREAD, NodeKind.COROUTINE)
_PLACES = (NodeKind.GATHERING, NodeKind.SHUTDOWN, NodeKind.JOIN, NodeKind.POOL)


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes that wait for each other, in order, and the sentence that says so."""

    edges: tuple[Edge, ...]
    start: Node
    text: str
    cyclic: bool = False  # it is a cycle, or ends at one
    expires: float | None = None  # seconds until the first deadline of a call in it
    limited: bool = False  # something in it waits for a time only

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.start, *(each.target for each in self.edges))

    @property
    def end(self) -> Node:
        return self.nodes[-1]

    @property
    def age(self) -> float:
        """The age of its first node's wait."""
        return next((each.age for each in self.edges if each.age is not None), 0.0)


class WaitGraph:
    """The waits of a group as a graph, at the moment of a snapshot."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ahead: dict[Node, list[Edge]] = defaultdict(list)
        self._awaited: set[Node] = set()
        for edge in graph.edges.values():
            self._ahead[edge.source].append(edge)
            self._awaited.add(edge.target)
        self._served = {  # by thread: the call
            target: source
            for (source, target), edge in graph.edges.items()
            if source.kind is NodeKind.CALL and target.kind is NodeKind.THREAD and not edge.text
        }
        self._cycles: list[Chain] | None = None  # found when asked for
        self._doomed: set[Node] | None = None

    @classmethod
    def of(cls, group: GroupSnapshot) -> WaitGraph:
        """The graph of a group."""
        return cls(graph_of(group))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._graph.labels)

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self._graph.edges.values())

    def label(self, node: Node) -> str:
        """The noun for a node."""
        return self._graph.labels[node]

    def remark(self, node: Node) -> str:
        """Describe a node that waits for nothing, such as "is at train.py:30 step"; may be empty."""
        return self._graph.remarks.get(node, "")

    def gone(self) -> frozenset[Node]:
        """The workers that others wait for, and that gave no snapshot."""
        return frozenset(self._graph.gone)

    def starts(self) -> list[Node]:
        """Return the beginnings of chains: nodes that wait and are not waited for, the longest wait first."""
        found = [node for node in self._graph.labels if self._ahead[node] and node not in self._awaited]
        return sorted(found, key=self._waiting, reverse=True)

    def _waiting(self, node: Node) -> float:
        return max((edge.age for edge in self._ahead[node] if edge.age is not None), default=0.0)

    # Cycles.

    def cycles(self) -> list[Chain]:
        """Every thread and call that waits for itself is on one of these; each is as short as can be."""
        if self._cycles is None:
            self._cycles = [self._chain_of_cycle(nodes) for nodes in self._find_cycles()]
        return self._cycles

    def _find_cycles(self) -> list[list[Node]]:
        edges = self._graph.edges.values()
        if not _cycles_in(self._graph, edges):
            return []
        moments = {inf if edge.until is None else edge.until for edge in edges}  # one for each worker: its snapshot
        found: dict[frozenset[Node], list[Node]] = {}
        for moment in sorted(moments):
            for cycle in _cycles_in(self._graph, [edge for edge in edges if _holds(edge, moment)]):
                found.setdefault(frozenset(cycle), cycle)
        return list(found.values())

    def _chain_of_cycle(self, nodes: list[Node]) -> Chain:
        around = [self._graph.edges[pair] for pair in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
        begin = min(range(len(around)), key=lambda n: self._rank_as_start(around[n - 1], around[n]))
        edges = (*around[begin:], *around[:begin])
        left = [self._graph.deadlines[node] for node in nodes if node in self._graph.deadlines]
        start = edges[0].source
        limited = any(each.limited for each in around)
        return Chain(edges, start, self._sentence(start, edges, True), True, min(left, default=None), limited)

    def _rank_as_start(self, before: Edge, after: Edge) -> tuple[bool, int, float]:
        """A sentence begins best with a program's own thread, and where the way back to it is not left unsaid."""
        node = after.source
        kinds = (NodeKind.THREAD, NodeKind.COROUTINE, NodeKind.CALL)
        rank = -1 if node in self._graph.mains else kinds.index(node.kind) if node.kind in kinds else len(kinds)
        unsaid = before.source.kind is NodeKind.CALL and not before.text
        return unsaid, rank, -(after.age or 0.0)

    # Chains.

    def chain(self, start: Node) -> Chain:
        """From a node to what it finally waits for. Of several things the worst is followed: what is on a cycle or leads to
        one, a worker that is gone, what it waits for longest. A chain that comes to a cycle from outside ends there."""
        on_cycle = {node for cycle in self.cycles() for node in cycle.nodes}
        edges: list[Edge] = []
        seen = {start}
        node = start
        while self._ahead[node] and (start in on_cycle or node not in on_cycle):
            edge = max(self._ahead[node], key=self._severity)
            edges.append(edge)
            node = edge.target
            if node in seen:
                break
            seen.add(node)
        cyclic = node in on_cycle
        text = self._sentence(start, edges, cyclic, enters=cyclic and start not in on_cycle)
        left = [self._graph.deadlines[each] for each in seen if each in self._graph.deadlines]
        return Chain(tuple(edges), start, text, cyclic, min(left, default=None), any(each.limited for each in edges))

    def _severity(self, edge: Edge) -> tuple[bool, bool, float]:
        return edge.target in self._hopeless(), edge.target in self._graph.gone, edge.age or 0.0

    def chains(self) -> list[Chain]:
        """For everything that waits, what it waits for: from each start, those that wait longest first; then from each
        thread and coroutine that is in none of these, nor in a cycle."""
        covered = {node for cycle in self.cycles() for node in cycle.nodes}
        own = [node for node in self._graph.labels if node.kind in _OWN and self._ahead[node]]
        found = []
        for start in [*self.starts(), *sorted(own, key=self._waiting, reverse=True)]:
            chain = self.chain(start)
            waits = chain.end in self._graph.gone or any(
                edge.text for edge in chain.edges
            )  # else it is a call that just runs
            if waits and start not in covered:
                found.append(chain)
                covered.update(chain.nodes)
        return found

    def find(self, text: str) -> list[Node]:
        """The nodes that a name means: of a worker, its threads and coroutines that wait; of a call (`worker0#5`), that."""
        worker, mark, number = text.rpartition("#")
        if mark and number.isdecimal():
            node = Node(NodeKind.CALL, worker, str(int(number)))
            return [node] if node in self._graph.labels else []
        found = [each for each in self._graph.labels if each.worker == text and each.kind in _OWN and self._ahead[each]]
        return sorted(found, key=lambda each: (each in self._awaited, -self._waiting(each)))

    def explain(self) -> list[str]:
        """Return one sentence for each matter: cycles first, then what all others wait for, the oldest first."""
        return [each.text for each in (*self.cycles(), *self.chains())]

    def _hopeless(self) -> set[Node]:
        """The nodes of the cycles, and all that lead to one."""
        if self._doomed is None:
            behind: Targets = defaultdict(list)
            for edge in self._graph.edges.values():
                behind[edge.target].append(edge.source)
            self._doomed = _reachable(behind, {node for cycle in self.cycles() for node in cycle.nodes})
        return self._doomed

    # Sentences.

    def _sentence(self, start: Node, edges: Iterable[Edge], cyclic: bool, enters: bool = False) -> str:
        text, end, link = self._subject(start), start, " "
        by_name = False  # the noun said last is a thread, and not yet what it serves
        for edge in edges:
            end = edge.target
            if edge.text:
                text += link + (self._service(edge.source) if by_name else "") + edge.text
                link = self._link(end)
                by_name = end.kind is NodeKind.THREAD
            elif edge.source.kind is NodeKind.WORKER:
                link = f", and {self.label(end)} "
            elif end.kind is NodeKind.WORKER:
                link = self._link(end)
            # else a call and the thread that serves it: what is said of one is said of the other
        if cyclic and not enters:
            return f"{text}: a cycle"
        remark = "is in a cycle" if enters else self.remark(end)
        return text + (link + (self._service(end) if by_name else "") + remark if remark else "")

    def _link(self, noun: Node) -> str:
        """Return the word that joins the next clause to a noun."""
        if noun.kind is NodeKind.WORKER:
            return f", and {self.label(noun)} "
        return ", where " if noun.kind in _PLACES else ", which "

    def _subject(self, node: Node) -> str:
        if node in self._graph.mains:
            return node.worker
        served = self._served.get(node)
        return f"{self.label(node)}, which serves {self.label(served)}," if served else self.label(node)

    def _service(self, thread: Node) -> str:
        served = self._served.get(thread)
        return f"serves {self.label(served)} and " if served else ""


# Cycles.


def _holds(edge: Edge, moment: float) -> bool:
    return (edge.since is None or edge.since <= moment) and (edge.until is None or edge.until >= moment)


def _stuck(graph: Graph, edges: Iterable[Edge]) -> set[Node]:
    """Return the nodes that can never go on if `edges` are all that holds."""
    waits_for: Counter[Node] = Counter()
    behind: Targets = defaultdict(list)
    for edge in edges:
        waits_for[edge.source] += 1
        behind[edge.target].append(edge.source)
    goes_on = set(behind) - set(waits_for) | (graph.going_on & set(waits_for))
    if graph.any_of:  # one that has a target besides these edges may go on by that
        every = Counter(source for source, _ in graph.edges)
        goes_on |= {node for node in graph.any_of if waits_for[node] < every[node]}
    ahead = deque(goes_on)
    while ahead:
        for source in behind[ahead.popleft()]:
            waits_for[source] -= 1
            if source not in goes_on and (source in graph.any_of or waits_for[source] == 0):
                goes_on.add(source)
                ahead.append(source)
    return set(waits_for) - goes_on


def _cycles_in(graph: Graph, edges: Collection[Edge]) -> list[list[Node]]:
    """Short cycles of stuck nodes, until each stuck node that waits for itself is on one. Of those that differ in which
    function of a full pool they pass, one is enough."""
    stuck = _stuck(graph, edges)
    targets: Targets = defaultdict(list)
    for edge in edges:
        if edge.source in stuck and edge.target in stuck:
            targets[edge.source].append(edge.target)
    found = []
    for component in _components(targets):
        covered: set[Node] = set()
        for node in component:
            if node not in covered and (cycle := _shortest_cycle(node, targets, set(component))):
                if not covered & graph.any_of & set(cycle):
                    found.append(cycle)
                covered.update(cycle)
    return found


def _shortest_cycle(start: Node, targets: Targets, within: set[Node]) -> list[Node]:
    """From a node back to it; nothing if there is no way."""
    came_from: dict[Node, Node] = {}
    ahead = deque([start])
    while ahead:
        node = ahead.popleft()
        for target in targets[node]:
            if target == start:
                cycle = [node]
                while cycle[-1] != start:
                    cycle.append(came_from[cycle[-1]])
                return cycle[::-1]
            if target in within and target not in came_from:
                came_from[target] = node
                ahead.append(target)
    return []


def _components(targets: Targets) -> list[list[Node]]:
    """The sets of nodes that reach each other (Tarjan's algorithm, without recursion)."""
    number: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    path: dict[Node, None] = {}  # in order
    found = []
    for root in list(targets):
        work = [(root, iter(targets[root]))] if root not in number else []
        while work:
            node, rest = work[-1]
            if node not in number:
                number[node] = lowest[node] = len(number)
                path[node] = None
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    component = [path.popitem()[0]]
                    while component[-1] != node:
                        component.append(path.popitem()[0])
                    found.append(component)
            elif following not in number:
                work.append((following, iter(targets[following])))
            elif following in path:
                lowest[node] = min(lowest[node], number[following])
    return found


def _reachable(targets: Targets, starts: set[Node]) -> set[Node]:
    found = set(starts)
    ahead = deque(starts)
    while ahead:
        new = set(targets[ahead.popleft()]) - found
        found |= new
        ahead += new
    return found
