"""From a call to what finally holds it up: steps of the wait-for graph, each with its address, threads with their stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from remora.dashboard.moment import Moment
from remora.observer.model import CallKey
from remora.observer.waits import Chain, Node, NodeKind


def node_of(key: CallKey) -> Node:
    return Node(NodeKind.CALL, key.caller, str(key.id))


def chain_of(moment: Moment, key: CallKey) -> dict[str, Any]:
    """The chain of waits that begins at a call, and the sentence that tells it."""
    graph = moment.graph
    node = node_of(key)
    if node not in graph.nodes:
        return {"text": "", "cyclic": False, "expires": None, "steps": []}
    return tell(moment, graph.chain(node))


def tell(moment: Moment, chain: Chain) -> dict[str, Any]:
    """A call and the thread that serves it are one step: the thread has the stack."""
    steps: list[dict[str, Any]] = [_step(moment, chain.start)]
    for edge in chain.edges:
        if edge.text or not _same_matter(edge.source, edge.target):
            steps[-1]["waits"], steps[-1]["age"] = edge.text, edge.age
            steps.append(_step(moment, edge.target))
        else:
            _add_thread(moment, steps[-1], edge.target)
    return {"text": chain.text, "cyclic": chain.cyclic, "expires": chain.expires, "steps": steps}


def _same_matter(one: Node, other: Node) -> bool:
    return {one.kind, other.kind} == {NodeKind.CALL, NodeKind.THREAD}


def _step(moment: Moment, node: Node) -> dict[str, Any]:
    missing = moment.missing.get(node.worker) if node.kind is NodeKind.WORKER else None
    step = {
        "kind": node.kind.value,
        "worker": node.worker,
        "text": moment.graph.label(node),
        "remark": moment.graph.remark(node),
        "href": address_of([node]),
        "gone": missing is not None,
        "stack": [] if missing is None else missing.stacks.splitlines(),
        "waits": "",
        "age": None,
    }
    if node.kind is NodeKind.THREAD:
        _add_thread(moment, step, node)
    return step


def _add_thread(moment: Moment, step: dict[str, Any], node: Node) -> None:
    if node.kind is NodeKind.THREAD:
        thread = moment.threads.get((node.worker, int(node.id)))
        step["thread"] = moment.graph.label(node)
        step["thread_href"] = address_of([node])
        step["stack"] = [] if thread is None else list(thread.stack)


def cycle_texts(moment: Moment) -> list[dict[str, Any]]:
    """Each cycle in words, with the address of its first call."""
    return [{"text": each.text, "href": address_of(each.nodes)} for each in moment.graph.cycles()]


def address_of(nodes: Sequence[Node]) -> str | None:
    """The page of the first of these nodes that has one."""
    kinds = {node.kind: node for node in reversed(nodes)}
    if call := kinds.get(NodeKind.CALL):
        return "/calls/" + quote(f"{call.worker}#{call.id}", safe="")
    if thread := kinds.get(NodeKind.THREAD):
        return f"/stacks/{quote(thread.worker, safe='')}/{thread.id}"
    node = nodes[0]
    if node.kind is NodeKind.BACKWARD:
        return "/gradients"
    if node.kind is NodeKind.REFERENCE:
        return "/references/" + quote(node.id, safe="")
    if node.kind is NodeKind.LINK:
        return f"/links/{quote(node.worker, safe='')}/{quote(node.id, safe='')}"
    return "/workers/" + quote(node.worker, safe="") if node.worker else None
