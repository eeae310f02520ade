"""The nodes and edges of the wait-for graph of a group: pure data. `wait_edges` makes it, `waits` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from remora.observer.model import CallKey


class NodeKind(StrEnum):
    """The kinds of things that wait, or are waited for."""

    THREAD = "thread"
    COROUTINE = "coroutine"  # of the program: one that serves a call is that call
    CALL = "call"
    REFERENCE = "reference"
    BACKWARD = "backward"
    GATHERING = "gathering"
    SHUTDOWN = "shutdown"
    JOIN = "join"
    LINK = "link"
    POOL = "pool"
    LOCK = "lock"  # whose holder is not known
    WORKER = "worker"  # the program of a worker that has to come, or a worker that gave no snapshot


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `worker` is where it is (of a call: its caller), `id` tells those of one kind there apart."""

    kind: NodeKind
    worker: str
    id: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.worker}/{self.id}"


@dataclass(frozen=True, slots=True)
class Edge:
    """`source` does not go on before `target` does. It was so from `since` to `until` of the observer's clock, as far as
    that is known: None is any time."""

    source: Node
    target: Node
    text: (
        str  # what the source does, such as "waits for f on worker1 (12.3 s)"; empty: source and target are one matter
    )
    age: float | None = None
    since: float | None = None
    until: float | None = None
    limited: bool = False  # the source waits for a time only, and then goes on


@dataclass
class Graph:
    """The graph that `graph_of` makes of a snapshot."""

    edges: dict[tuple[Node, Node], Edge] = field(default_factory=dict)
    labels: dict[Node, str] = field(default_factory=dict)  # a noun for each node
    remarks: dict[Node, str] = field(default_factory=dict)  # what is known of a node that waits for nothing
    any_of: set[Node] = field(default_factory=set)  # goes on as soon as one of its targets does
    going_on: set[Node] = field(default_factory=set)  # may go on whatever its targets do
    deadlines: dict[Node, float] = field(default_factory=dict)  # of calls: seconds that are left
    mains: set[Node] = field(default_factory=set)  # main threads
    gone: set[Node] = field(default_factory=set)  # workers that gave no snapshot and should have


def call_node(key: CallKey) -> Node:
    return Node(NodeKind.CALL, key.caller, str(key.id))


def thread_node(worker: str, thread: int) -> Node:
    return Node(NodeKind.THREAD, worker, str(thread))
