"""Calls, threads and waits of a group's snapshot by their keys, and the name of each in a sentence."""

from __future__ import annotations

import re
from collections import defaultdict

from remora.observer.model import (
    CallKey,
    CallStatus,
    GroupSnapshot,
    Missing,
    PassStatus,
    Stage,
    ThreadStatus,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.wait_graph import Node, NodeKind, call_node, thread_node

_OF_LIBRARIES = re.compile(
    r"/lib/python\d|/site-packages/|/remora/(agent|autograd|nn|optim|rpc|rref|testing|transport|wire)/|^<"
)

AT_CALLEE = (Stage.QUEUED, Stage.RUNNING, Stage.ANSWERING)

Half = tuple[WorkerSnapshot, CallStatus]


def short(function: str) -> str:
    """The name of a function for a sentence: without packages, and without `__main__`."""
    return ".".join(function.removeprefix("__main__.").split(".")[-2:])


def where(thread: ThreadStatus) -> str:
    """Return the place of a thread, in the program's own code if it has any: "at train.py:30 step, in Event.wait"."""
    own = [frame for frame in thread.stack if not _OF_LIBRARIES.search(frame)]
    innermost = thread.stack[-1]
    frame = own[-1] if own else innermost
    rest = "" if frame is innermost else f", in {innermost.rpartition(' ')[2]}"
    return f"at {frame.rpartition('/')[2]}{rest}"


class Index:
    """A snapshot, to be looked up."""

    def __init__(self, group: GroupSnapshot) -> None:
        self.workers = {each.name: each for each in group.workers}
        # One that was started again under its name is there, whatever became of the one before.
        self.missing: dict[str, Missing] = {each.name: each for each in group.missing if each.name not in self.workers}
        self.callers: dict[CallKey, Half] = {}  # the half of the one who called
        self.callees: dict[CallKey, Half] = {}
        self.threads: dict[Node, ThreadStatus] = {}
        self.coroutines: dict[CallKey, ThreadStatus] = {}  # by the call that they serve
        self.waits: dict[Node, list[WaitStatus]] = defaultdict(list)  # by what waits
        for worker in group.workers:
            for call in worker.calls:
                (self.callees if call.stage in AT_CALLEE else self.callers).setdefault(call.key, (worker, call))
            for thread in worker.threads:
                self.threads[thread_node(worker.name, thread.id)] = thread
                if thread.role == "coroutine" and thread.serving is not None and thread.stack:
                    self.coroutines[thread.serving] = thread
            for number, wait in enumerate(worker.waits):
                self.waits[self.waiter(worker, number, wait)].append(wait)

    @staticmethod
    def waiter(worker: WorkerSnapshot, number: int, wait: WaitStatus) -> Node:
        """Return the node that waits: a thread, else the call that a coroutine serves, else a coroutine of the program."""
        if wait.thread is not None:
            return thread_node(worker.name, wait.thread)
        if wait.serving is not None:
            return call_node(wait.serving)
        return Node(NodeKind.COROUTINE, worker.name, str(number))

    def main_thread(self, worker: WorkerSnapshot) -> Node | None:
        """Of a worker; the only thread that waits for its own sake if threads were not asked for."""
        for thread in worker.threads:
            if thread.role == "main":
                return thread_node(worker.name, thread.id)
        own = {each.thread for each in worker.waits if each.thread is not None and each.serving is None}
        return thread_node(worker.name, own.pop()) if len(own) == 1 and not worker.threads else None

    def runs_event_loop(self, worker: WorkerSnapshot, thread: int) -> bool:
        known = self.threads.get(thread_node(worker.name, thread))
        return known is not None and known.role == "event loop"

    def is_main(self, node: Node) -> bool:
        thread = self.threads.get(node)
        return thread is not None and thread.role == "main"

    def half(self, key: CallKey) -> Half | None:
        """Return the better view of a call: its callee's, else its caller's."""
        return self.callees.get(key) or self.callers.get(key)

    def passes(self, name: str, context: str) -> list[PassStatus]:
        worker = self.workers.get(name)
        return [each for each in worker.passes if str(each.context) == context] if worker else []

    # Nouns.

    def label(self, node: Node) -> str:
        """The noun for a node."""
        if node.kind is NodeKind.THREAD:
            return self._thread_name(node)
        if node.kind is NodeKind.CALL:
            return self.call_name(CallKey(caller=node.worker, id=int(node.id)))
        if node.kind in (NodeKind.GATHERING, NodeKind.JOIN, NodeKind.REFERENCE):
            return node.id
        return {
            NodeKind.POOL: f"the pool of {node.worker}",
            NodeKind.LINK: f"the link from {node.worker} to {node.id}",
            NodeKind.BACKWARD: f"backward pass {node.id} on {node.worker}",
            NodeKind.COROUTINE: f"a coroutine of {node.worker}",
            NodeKind.LOCK: f"a lock on {node.worker}",
            NodeKind.SHUTDOWN: f"the shutdown of {node.worker}",
        }.get(node.kind, node.worker)

    def _thread_name(self, node: Node) -> str:
        if self.is_main(node):
            return f"the main thread of {node.worker}"
        thread = self.threads.get(node)
        return f"thread {thread.name if thread else node.id} of {node.worker}"

    def call_name(self, key: CallKey) -> str:
        half = self.half(key)
        if half is None:
            return f"call {key}"
        return f"{short(self.function(half[1])) or f'call {key}'} on {half[1].callee or half[0].name}"

    def function(self, call: CallStatus) -> str:
        """The function of a call: its callee does not know it before it runs."""
        caller = self.callers.get(call.key)
        return call.function or (caller[1].function if caller else "")

    # What is known of a node that waits for nothing.

    def remark(self, node: Node) -> str:
        """The end of a sentence that begins with the noun; nothing if nothing is known."""
        if node.kind is NodeKind.THREAD:
            thread = self.threads.get(node)
            return f"is {where(thread)}" if thread and thread.stack else ""
        if node.kind is NodeKind.CALL:
            return self._state_of_call(self.half(CallKey(caller=node.worker, id=int(node.id))))
        if node.kind is NodeKind.WORKER:
            return self._state_of_worker(node.worker) if not node.id else ""
        if node.kind is NodeKind.BACKWARD:
            return next((f"is in its phase {each.phase!r}" for each in self.passes(node.worker, node.id)), "")
        if node.kind is NodeKind.LINK and node.worker in self.workers:
            links = self.workers[node.worker].links
            return next((f"has {each.queued_bytes:,} bytes to send" for each in links if each.peer == node.id), "")
        return ""

    def _state_of_call(self, half: Half | None) -> str:
        if half is None:
            return ""
        _, call = half
        if call.stage is Stage.RUNNING and call.thread is None and call.key in self.coroutines:
            return f"is {where(self.coroutines[call.key])}"
        return {
            Stage.UNSENT: f"has not been sent to {call.callee}",
            Stage.SENT: "is on its way there or back",
            Stage.BEGUN: "has begun there, and may have ended meanwhile",
            Stage.QUEUED: f"has come to {call.callee}, and has not begun",
            Stage.RUNNING: "runs there" if call.thread is not None else "runs there, and holds no thread",
            Stage.ANSWERING: f"has ended, and its answer waits to be sent to {call.key.caller}",
        }[call.stage]

    def _state_of_worker(self, name: str) -> str:
        known = self.missing.get(name)
        if known is not None:
            state = "has left" if known.state == "left" else f"is {known.state}"
            return f"{state}: {known.reason}" if known.reason else state
        if name not in self.workers:
            return "has not been heard of"
        threads = self.workers[name].threads
        main = next((each for each in threads if each.role == "main" and each.stack), None)
        return f"is {where(main)} with its main thread" if main else "goes on"
