"""Stacks: all threads of all workers, equal stacks together; and one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.dashboard.moment import Moment
from remora.dashboard.table import View, whole_number
from remora.observer.model import ThreadStatus, WaitStatus

PARTS = ("threads", "waits", "calls")
GROUPS = 60
THREADS = 40  # named of a group


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    worker = path[0] if path else ""
    if len(path) > 1:
        return _one(moment, worker, path[1])
    words = View.of(arguments).words.lower().split()
    groups: dict[tuple[str, ...], list[tuple[str, ThreadStatus]]] = {}
    for (name, _), thread in moment.threads.items():
        if worker in ("", name):
            text = " ".join((name, thread.name, thread.role, *thread.stack)).lower()
            if all(word in text for word in words):
                groups.setdefault(thread.stack, []).append((name, thread))
    # Threads that serve or wait come first: idle ones are many and alike.
    ordered = sorted(groups.items(), key=lambda item: (not _of_interest(moment, item[1]), -len(item[1])))
    return {
        "worker": worker,
        "threads": sum(map(len, groups.values())),
        "groups": [_group(moment, stack, threads) for stack, threads in ordered[:GROUPS]],
        "left_out": max(len(ordered) - GROUPS, 0),
        "missing": [
            {"worker": each.name, "state": each.state, "stacks": each.stacks}
            for each in moment.snapshot.missing
            if each.stacks and worker in ("", each.name)
        ],
    }


def _of_interest(moment: Moment, threads: Sequence[tuple[str, ThreadStatus]]) -> bool:
    return any(thread.serving is not None or waits_of(moment, name, thread.id) for name, thread in threads)


def _group(moment: Moment, stack: Sequence[str], threads: Sequence[tuple[str, ThreadStatus]]) -> dict[str, Any]:
    return {
        "stack": list(stack),
        "count": len(threads),
        "threads": [describe_thread(moment, name, thread) for name, thread in threads[:THREADS]],
    }


def describe_thread(moment: Moment, worker: str, thread: ThreadStatus) -> dict[str, Any]:
    """A thread and its work, without its stack."""
    return {
        "worker": worker,
        "id": thread.id,
        "name": thread.name,
        "role": thread.role,
        "task": thread.task,
        "serving": None if thread.serving is None else str(thread.serving),
        "waits": [
            {
                "kind": wait.kind.value,
                "text": wait.text,
                "age": wait.age,
                "call": None if wait.call is None else str(wait.call),
                "holder": wait.holder,
            }
            for wait in waits_of(moment, worker, thread.id)
        ],
    }


def waits_of(moment: Moment, worker: str, thread: int) -> list[WaitStatus]:
    found = moment.workers.get(worker)
    return [] if found is None else [each for each in found.waits if each.thread == thread]


def _one(moment: Moment, worker: str, number: str) -> dict[str, Any]:
    asked = whole_number(number)
    thread = None if asked is None else moment.threads.get((worker, asked))
    return {
        "worker": worker,
        "number": number,
        "thread": None if thread is None else {**describe_thread(moment, worker, thread), "stack": list(thread.stack)},
    }
