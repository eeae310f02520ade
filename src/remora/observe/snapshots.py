"""Snapshots of this process's worker and of its group, and the observer that takes them."""

from __future__ import annotations

from remora.errors import NothingFound
from remora.introspection import questions
from remora.introspection.snapshot import take
from remora.observer.group import GroupObserver
from remora.observer.members import Members
from remora.observer.model import GroupSnapshot, Query, WorkerSnapshot
from remora.observer.snapshot_json import to_json
from remora.rpc.current_worker import _get_current_rpc_agent
from remora.worker import Worker


def snapshot(query: Query = Query()) -> WorkerSnapshot:
    """Return what the current worker says of itself now. `query` leaves parts out, and filters."""
    return take(_get_current_rpc_agent().subject, query)


def group_snapshot(query: Query = Query(), timeout: float = 2.0) -> GroupSnapshot:
    """Return the snapshots of all workers of the group that answer in time, and why others have none."""
    with observer() as found:
        return found.snapshot(query, timeout)


def observer() -> GroupObserver:
    """Return an observer of the group of the current worker. NothingFound if the worker lets no observers in."""
    worker: Worker = _get_current_rpc_agent()
    members = Members()
    members.hear([to_json(each) for each in questions.members(worker.subject)])
    if not any(known.member.addresses for known in members.present()):
        raise NothingFound(
            worker.get_worker_info().name,
            "no worker of the group can be observed: observers are turned off (REMORA_OBSERVERS=0, or the option "
            "observers), or the workers talk only inside of one process (transports)",
        )
    return GroupObserver(worker.subject.group, worker.observers.key, members)
