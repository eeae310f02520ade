"""From a snapshot of a group to who waits for what: makes the wait-for graph. Pure.

Both ends of a call are one node, by its name in the group (`CallKey`); what either end says of it becomes edges of that
node. The two halves were taken at different moments, and one may lack. So the rules are:

- The callee's half counts, where there is one: it says whether the call waits for a slot, or which thread serves it.
- Without a callee's half the call is on its way there or back, or the callee gave no snapshot; then it waits for that
  worker.
- A worker that waits in a gathering has come to it, whatever others say who have not yet heard. All that wait in a gathering
  wait for those that were named as absent and do not wait in it themselves. Its title is the text of the wait up to a colon.
- A worker comes to a gathering by its main thread: so it comes when that thread is done with what it waits for.
- A full pool goes on when any function that has a slot ends: it waits for *one* of them (`Graph.any_of`). A pool that
  is not full, as far as can be seen, goes on by itself (`Graph.going_on`).
- A value is made by the call that says so. If none does, the value may be there by now, or be made in another way.
- A coroutine goes on when the thread of its event loop is done with what it waits for, too.
- What a backward pass waits for may come without it: its edges are shown, and it is never part of a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from remora.observer.model import CallKey, CallStatus, GroupSnapshot, Stage, WaitKind, WaitStatus, WorkerSnapshot
from remora.observer.wait_graph import Edge, Graph, Node, NodeKind, call_node, thread_node
from remora.observer.wait_index import Index, short

MEETINGS = {WaitKind.GATHERING: NodeKind.GATHERING, WaitKind.SHUTDOWN: NodeKind.SHUTDOWN, WaitKind.JOIN: NodeKind.JOIN}


def graph_of(group: GroupSnapshot) -> Graph:
    """The graph of a group."""
    return _Builder(group).build()


def ago(age: float | None) -> str:
    """Such as " (12.3 s)" or " (7 min 4 s)"; nothing if it is not known."""
    if age is None:
        return ""
    if age < 90:
        return f" ({age:.1f} s)"
    minutes, seconds = divmod(int(age), 60)
    return f" ({minutes} min {seconds} s)" if minutes < 90 else f" ({minutes // 60} h {minutes % 60} min)"


def _named(names: list[str]) -> str:
    """Such as: worker1, worker2 and 5 others."""
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _lock_name(wait: WaitStatus) -> str:
    """Such as: the lock self._lock."""
    return wait.text.partition(" at ")[0] or "a lock"


@dataclass(frozen=True)
class _Arrival:
    """A worker that waits in a gathering."""

    worker: WorkerSnapshot
    wait: WaitStatus
    source: Node


def _meetings(arrivals: list[_Arrival]) -> list[list[_Arrival]]:
    """Return those that wait in gatherings of one title, by gathering: some workers may gather while others do. They are in
    the same one if one names the other, or both name a third."""
    found: list[tuple[set[str], list[_Arrival]]] = []
    for arrival in arrivals:
        names, together = {arrival.worker.name, *arrival.wait.workers}, [arrival]
        for known in [each for each in found if each[0] & names]:
            found.remove(known)
            names |= known[0]
            together = known[1] + together
        found.append((names, together))
    return [together for _, together in found]


class _Builder:
    def __init__(self, group: GroupSnapshot) -> None:
        self._group = group
        self._index = Index(group)
        self._graph = Graph()
        self._meetings: dict[tuple[NodeKind, str], list[_Arrival]] = defaultdict(list)

    def build(self) -> Graph:
        for worker in self._group.workers:
            for number, wait in enumerate(worker.waits):
                self._add_wait(worker, wait, self._index.waiter(worker, number, wait))
            for each in worker.passes:
                self._add_pass(worker, str(each.context), each.awaits)
        for (kind, title), arrivals in self._meetings.items():
            for meeting in _meetings(arrivals):
                self._add_meeting(kind, title, meeting)
        for key in self._index.callers.keys() | self._index.callees.keys():
            self._add_call(key)
        for node in self._graph.labels:
            self._graph.remarks[node] = self._index.remark(node)
        return self._graph

    def _edge(
        self,
        said_by: WorkerSnapshot | None,
        source: Node,
        target: Node,
        text: str = "",
        age: float | None = None,
        limited: bool = False,
    ) -> None:
        """Add one. `said_by` is the worker that saw it, by whose clock it was so at the moment of its snapshot. `limited`:
        it waits for a time only."""
        since = until = None
        if said_by is not None and said_by.name in self._group.clock_offsets:
            error = abs(self._group.clock_errors.get(said_by.name, 0.0))
            seen = said_by.time - self._group.clock_offsets[said_by.name]
            until = seen + error
            since = None if age is None else seen - age - error
        self._node(source)
        self._node(target)
        self._graph.edges.setdefault((source, target), Edge(source, target, text, age, since, until, limited))

    def _node(self, node: Node) -> Node:
        if node not in self._graph.labels:
            self._graph.labels[node] = self._index.label(node)
            if self._index.is_main(node):
                self._graph.mains.add(node)
        return node

    # What waits says.

    def _add_wait(self, worker: WorkerSnapshot, wait: WaitStatus, source: Node) -> None:
        if wait.serving is not None and wait.thread is not None:
            self._edge(worker, call_node(wait.serving), source)
        title, colon, _ = wait.text.partition(":")
        if wait.kind is WaitKind.SHUTDOWN and not colon:
            self._add_shutdown(worker, wait, source)
        elif wait.kind in MEETINGS:
            kind = MEETINGS[wait.kind]
            self._meetings[kind, "" if kind is NodeKind.JOIN else title].append(_Arrival(worker, wait, source))
        elif wait.kind is WaitKind.REFERENCE:
            self._add_reference(worker, wait, source)
        else:
            target, text = self._simple_target(worker, wait, source)
            self._edge(worker, source, target, f"waits for {text}{ago(wait.age)}", wait.age, wait.limited)

    def _simple_target(self, worker: WorkerSnapshot, wait: WaitStatus, source: Node) -> tuple[Node, str]:
        """Return the node that a wait is for, and its name."""
        if wait.kind is WaitKind.CALL and wait.call is not None:
            return call_node(wait.call), self._index.call_name(wait.call)
        if wait.kind is WaitKind.BACKWARD and wait.context is not None:
            return self._pass(worker.name, str(wait.context)), f"backward pass {wait.context}"
        if wait.kind is WaitKind.POOL:
            return self._pool(worker), f"a slot in the pool of {worker.name}"
        if wait.kind is WaitKind.LINK and wait.workers:
            return self._link(worker, wait.workers[0]), f"room on the link to {wait.workers[0]}"
        if wait.kind is WaitKind.LOCK and wait.call is not None:
            return call_node(wait.call), f"{_lock_name(wait)} that {self._index.call_name(wait.call)} holds"
        if wait.kind in (WaitKind.LOOP, WaitKind.THREAD) and wait.holder is not None:
            text = f"the event loop of {worker.name}" if wait.kind is WaitKind.LOOP else wait.text
            return thread_node(worker.name, wait.holder), text
        if wait.kind is WaitKind.LOCK and wait.holder is not None and wait.holder != wait.thread:
            holder = thread_node(worker.name, wait.holder)
            return holder, f"{_lock_name(wait)} that {self._index.label(holder)} holds"
        if wait.kind is WaitKind.LOCK:
            return Node(NodeKind.LOCK, worker.name, source.id), f"{_lock_name(wait)} whose holder is not known"
        text = wait.text or f"a {wait.kind}"  # it lacks its details
        return Node(NodeKind.WORKER, worker.name, text), text

    def _link(self, worker: WorkerSnapshot, peer: str) -> Node:
        node = Node(NodeKind.LINK, worker.name, peer)
        if peer in self._index.missing:
            self._edge(worker, node, self._program(peer), f"{peer} does not read")
        return node

    def _add_meeting(self, kind: NodeKind, title: str, arrivals: list[_Arrival]) -> None:
        """Those that have come to a gathering, and those that have not."""
        present = {each.worker.name for each in arrivals}
        node = Node(kind, min(present), title)
        doing = "waits for the group to form" if kind is NodeKind.JOIN else f"waits in {title or kind}"
        for each in arrivals:
            self._edge(each.worker, each.source, node, doing + ago(each.wait.age), each.wait.age)
        late = sorted({name for each in arrivals for name in each.wait.workers} - present)
        for name in late:
            self._edge(None, node, self._program(name), f"{_named(late)} {'has' if len(late) == 1 else 'have'} not come")

    def _add_shutdown(self, worker: WorkerSnapshot, wait: WaitStatus, source: Node) -> None:
        """A worker ends when the calls that it makes and serves have ended."""
        target = Node(NodeKind.SHUTDOWN, worker.name)
        self._edge(worker, source, target, f"waits in shutdown {wait.text}".rstrip() + ago(wait.age), wait.age)
        for call in worker.calls:
            who = call.key.caller if call.callee == worker.name else worker.name
            text = f"{self._index.call_name(call.key)} is under way for {who}{ago(call.age)}"
            self._edge(worker, target, call_node(call.key), text, call.age)
        for name in wait.workers:
            if name in self._index.missing:
                self._edge(worker, target, self._program(name), f"{name} has to answer")

    def _add_reference(self, worker: WorkerSnapshot, wait: WaitStatus, source: Node) -> None:
        name = wait.workers[0] if wait.workers else worker.name
        target = Node(NodeKind.REFERENCE, name, wait.reference or wait.text)
        owner = self._index.workers.get(name)
        value = next((each for each in owner.owned if each.id == wait.reference), None) if owner else None
        what = f"the value of {short(value.function)}" if value and value.function else wait.text or "a value"
        where = "" if name in what else f" on {name}"
        self._edge(worker, source, target, f"waits for {what}{where}{ago(wait.age)}", wait.age)
        if owner is None:
            self._edge(worker, target, self._program(name))
            return
        makers = [
            call
            for maker, call in self._index.callees.values()
            if maker is owner and call.makes is not None and call.makes == wait.reference
        ]
        if not makers:
            self._graph.going_on.add(target)
        for call in makers:
            text = f"is made by {short(call.function)} for {call.key.caller}{ago(call.age)}"
            self._edge(owner, target, call_node(call.key), text, call.age)

    def _add_pass(self, worker: WorkerSnapshot, context: str, awaits: dict[str, int]) -> None:
        node = self._pass(worker.name, context)
        for name, count in sorted(awaits.items()):
            if count > 0:
                peer = self._pass(name, context) if name in self._index.workers else self._program(name)
                gradients = "a gradient" if count == 1 else f"{count} gradients"
                self._edge(worker, node, peer, f"waits for {gradients} from {name}")

    def _pass(self, worker: str, context: str) -> Node:
        node = Node(NodeKind.BACKWARD, worker, context)
        self._graph.going_on.add(node)
        return node

    # What the two halves of a call say.

    def _add_call(self, key: CallKey) -> None:
        node = self._node(call_node(key))
        halves = [half for half in (self._index.callers.get(key), self._index.callees.get(key)) if half]
        left = [call.left for _, call in halves if call.left is not None]
        if left:
            self._graph.deadlines[node] = min(left)
        if key in self._index.callees:
            self._add_served(node, *self._index.callees[key])
            return
        worker, call = self._index.callers[key]
        if call.callee in self._index.missing:
            self._edge(worker, node, self._program(call.callee), "", call.age)

    def _add_served(self, node: Node, worker: WorkerSnapshot, call: CallStatus) -> None:
        if call.stage is Stage.QUEUED:
            if len(self._holding(worker)) < max(worker.pool.limit, 1):
                return  # it waits for its arguments, for room for its answer, or begins at this moment
            text = f"waits for a slot in the pool of {worker.name}{ago(call.age)}"
            self._edge(worker, node, self._pool(worker), text)
        elif call.stage is Stage.RUNNING and call.thread is not None:
            self._edge(worker, node, thread_node(worker.name, call.thread))

    def _pool(self, worker: WorkerSnapshot) -> Node:
        """The pool of a worker, with the functions that have its slots."""
        node = Node(NodeKind.POOL, worker.name)
        if node in self._graph.any_of:
            return node
        self._graph.any_of.add(node)
        holding = self._holding(worker)
        if len(holding) < max(worker.pool.limit, 1):
            self._graph.going_on.add(node)
        for call in sorted(holding, key=lambda each: -each.age):
            text = f"{short(call.function)} for {call.key.caller} has a slot{ago(call.age)}"
            self._edge(worker, node, call_node(call.key), text, call.age)
        return node

    def _holding(self, worker: WorkerSnapshot) -> list[CallStatus]:
        """The calls whose functions have a slot of the pool of a worker."""
        served = [call for callee, call in self._index.callees.values() if callee is worker]
        return [call for call in served if self._has_slot(worker, call)]

    def _has_slot(self, worker: WorkerSnapshot, call: CallStatus) -> bool:
        """A function that waits for something of ours gives its slot away meanwhile; a coroutine has none."""
        if call.stage is not Stage.RUNNING or call.thread is None or self._index.runs_event_loop(worker, call.thread):
            return False
        waits = self._index.waits.get(thread_node(worker.name, call.thread), [])
        return all(each.kind in (WaitKind.LOCK, WaitKind.THREAD) for each in waits)

    def _program(self, name: str) -> Node:
        """A worker whose program has to do something: it does when its main thread is done with what it waits for."""
        node = Node(NodeKind.WORKER, name)
        if node in self._graph.labels:
            return node
        self._node(node)
        worker = self._index.workers.get(name)
        known = self._index.missing.get(name)
        if worker is None and (known is None or known.state != "left"):
            self._graph.gone.add(node)
        elif (
            worker is not None and (main := self._index.main_thread(worker)) is not None and self._index.waits.get(main)
        ):
            self._edge(worker, node, main)
        return node
