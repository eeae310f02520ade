"""Looks at this process's worker and its group (placeholder until core's is merged)."""
from __future__ import annotations
from remora.introspection import snapshot as _snapshot
from remora.observer.model import Query, WorkerSnapshot, GroupSnapshot
from remora.observer.group import GroupObserver
from remora.rpc import api

def snapshot(query: Query = Query()) -> WorkerSnapshot:
    return _snapshot.take(api._worker().subject, query)
def group_snapshot(timeout: float = 2.0, query: Query = Query()) -> GroupSnapshot:
    with GroupObserver.find(group=api._worker().subject.group) as group:
        return group.snapshot(query, timeout)
