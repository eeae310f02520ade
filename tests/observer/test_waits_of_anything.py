"""The wait-for graph under any input: every cycle is found, none is invented, and it comes to an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from remora.observer.model import (
    CallKey,
    CallStatus,
    GroupSnapshot,
    Missing,
    OwnedReference,
    PassStatus,
    Pool,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.wait_graph import Edge, Graph, Node, NodeKind
from remora.observer.waits import WaitGraph

NODES = [Node(NodeKind.THREAD, "worker", str(n)) for n in range(7)]
pairs = some.tuples(some.sampled_from(NODES), some.sampled_from(NODES))
times = some.none() | some.integers(0, 3)


@some.composite
def graphs(draw: some.DrawFn) -> Graph:
    """Few nodes, many edges, some of which do not hold at the same time."""
    graph = Graph(
        labels={node: str(node) for node in NODES},
        any_of=draw(some.sets(some.sampled_from(NODES), max_size=3)),
        going_on=draw(some.sets(some.sampled_from(NODES), max_size=2)),
    )
    for source, target in draw(some.sets(pairs, max_size=14)):
        since, until = draw(times), draw(times)
        if since is not None and until is not None and since > until:
            since, until = until, since
        graph.edges[source, target] = Edge(source, target, "waits", None, since, until)
    return graph


def never_goes_on(graph: Graph, moment: float) -> set[Node]:
    """By definition, with no cleverness: let everything go that can, until nothing changes. What does not hold at the moment
    may have gone."""
    holds = {
        pair
        for pair, each in graph.edges.items()
        if (each.since is None or each.since <= moment) and (each.until is None or moment <= each.until)
    }
    left = set(NODES)
    while True:
        goes = set()
        for node in left:
            all_targets = [target for source, target in graph.edges if source == node]
            targets = [target for target in all_targets if (node, target) in holds]
            waiting = [target in left for target in targets]
            if node in graph.going_on:
                goes.add(node)
            elif node in graph.any_of:
                if not all(waiting) or len(targets) < len(all_targets) or not targets:
                    goes.add(node)
            elif not any(waiting):
                goes.add(node)
        if not goes:
            return left
        left -= goes


def on_cycles(graph: Graph, moment: float) -> set[Node]:
    """The nodes that can be reached from themselves among those that never go on."""
    stuck = never_goes_on(graph, moment)
    holds = {
        (a, b)
        for (a, b), each in graph.edges.items()
        if {a, b} <= stuck
        and (each.since is None or each.since <= moment)
        and (each.until is None or moment <= each.until)
    }
    reach = set(holds)
    for _ in NODES:
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    return {node for node in NODES if (node, node) in reach}


@given(graphs())
def test_every_cycle_is_found_and_none_is_invented(graph: Graph) -> None:
    cycles = WaitGraph(graph).cycles()
    expected = set().union(*(on_cycles(graph, moment) for moment in (-1, 0, 1, 2, 3, 4)))
    found = {node for cycle in cycles for node in cycle.nodes}
    assert found <= expected
    assert found == expected or (graph.any_of & expected and found)  # of a full pool, one function is enough
    for cycle in cycles:
        assert all((edge.source, edge.target) in graph.edges for edge in cycle.edges)
        assert cycle.nodes[0] == cycle.nodes[-1]
        assert len(set(cycle.nodes)) == len(cycle.edges)
        assert any(set(cycle.nodes) <= never_goes_on(graph, moment) for moment in (-1, 0, 1, 2, 3, 4))


@given(graphs())
def test_chains_end_and_say_cycle_only_if_there_is_one(graph: Graph) -> None:
    waits = WaitGraph(graph)
    cyclic = {node for cycle in waits.cycles() for node in cycle.nodes}
    covered = set(cyclic)
    for chain in waits.chains():
        assert len(chain.edges) <= len(NODES)
        assert chain.text.endswith("a cycle") == chain.cyclic
        assert not chain.cyclic or cyclic & set(chain.nodes)
        covered |= set(chain.nodes)
    assert covered >= {source for source, _ in graph.edges}


# Any snapshot, whatever a worker says.

names = some.sampled_from(["worker0", "worker1", "worker2", "", "#", "worker0#1", "ghost"])
numbers = some.integers(0, 4)
ages = some.floats(0, 100) | some.just(0.0)
keys = some.builds(CallKey, caller=names, id=numbers)
calls = some.builds(
    CallStatus,
    key=keys,
    callee=names,
    function=names,
    kind=some.just("PYTHON_CALL"),
    stage=some.sampled_from(Stage),
    age=ages,
    left=some.none() | ages,
    thread=some.none() | numbers,
)
waiting = some.builds(
    WaitStatus,
    kind=some.sampled_from(WaitKind),
    text=some.text(max_size=5),
    age=some.none() | ages,
    thread=some.none() | numbers,
    serving=some.none() | keys,
    call=some.none() | keys,
    workers=some.lists(names, max_size=3).map(tuple),
    reference=some.none() | names,
    context=some.none() | numbers,
    holder=some.none() | numbers,
)
counts = some.dictionaries(names, some.integers(-1, 3), max_size=3)
workers = some.builds(
    WorkerSnapshot,
    name=names,
    rank=numbers,
    group=some.just("g"),
    incarnation=names,
    pid=numbers,
    host=names,
    time=some.floats(-100, 100),
    up=ages,
    pool=some.builds(Pool, limit=some.integers(-1, 2)),
    calls=some.lists(calls, max_size=6).map(tuple),
    waits=some.lists(waiting, max_size=6).map(tuple),
    owned=some.lists(
        some.builds(OwnedReference, id=names, type=names, state=names, age=ages, function=some.none() | names),
        max_size=2,
    ).map(tuple),
    passes=some.lists(
        some.builds(
            PassStatus, context=numbers, number=numbers, started_by=names, phase=names, age=ages, awaits=counts
        ),
        max_size=2,
    ).map(tuple),
    threads=some.lists(
        some.builds(ThreadStatus, id=numbers, name=names, role=some.sampled_from(["main", "pool", "program"])),
        max_size=4,
    ).map(tuple),
)
missing = some.builds(
    Missing, name=names, rank=some.none(), state=some.sampled_from(["dead", "left", "silent"]), reason=names
)
snapshots = some.builds(
    GroupSnapshot,
    group=some.just("g"),
    time=some.just(0.0),
    workers=some.lists(workers, max_size=4).map(tuple),
    missing=some.lists(missing, max_size=2).map(tuple),
    clock_offsets=some.dictionaries(names, some.floats(-100, 100), max_size=3),
    clock_errors=some.dictionaries(names, some.floats(-1, 100), max_size=3),
)


@given(snapshots)
def test_any_snapshot_has_an_explanation(group: GroupSnapshot) -> None:
    graph = WaitGraph.of(group)
    texts = graph.explain()
    assert all(texts)
    assert len(graph.cycles()) <= len(graph.nodes)
    for node in graph.nodes:
        assert graph.label(node) is not None
        assert len(graph.chain(node).edges) <= len(graph.nodes)
