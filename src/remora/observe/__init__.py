"""See what the workers do, from inside a program: snapshots of this worker and of its group, and what is stuck.

    from remora import observe

    print(observe.stuck(older_than=10.0))      # what has waited for so long, on every worker
    mine = observe.snapshot()                  # this worker: calls, waits, references, links, threads …
    everybody = observe.group_snapshot()       # all workers that answer within two seconds, and why others do not

The same is to be had from outside, without a line in the program: `remora.observer`.
"""

from __future__ import annotations

from remora.errors import NothingFound
from remora.introspection import questions
from remora.introspection.snapshot import take
from remora.observe.stuck import Stuck, find_stuck
from remora.observer.group import GroupObserver
from remora.observer.members import Members
from remora.observer.model import CallStatus, GroupSnapshot, Missing, Query, WaitStatus, WorkerSnapshot, to_json
from remora.rpc import api
from remora.worker import Worker

__all__ = [
    "CallStatus",
    "GroupSnapshot",
    "Missing",
    "Query",
    "Stuck",
    "WaitStatus",
    "WorkerSnapshot",
    "group_snapshot",
    "snapshot",
    "stuck",
]


def snapshot(query: Query = Query()) -> WorkerSnapshot:
    """Return what the current worker says of itself now. `query` leaves parts out, and filters."""
    return take(api._get_current_rpc_agent().subject, query)


def group_snapshot(query: Query = Query(), timeout: float = 2.0) -> GroupSnapshot:
    """Return the snapshots of all workers of the group that answer in time, and why others have none."""
    with observer() as found:
        return found.snapshot(query, timeout)


def stuck(older_than: float = 10.0, timeout: float = 2.0) -> Stuck:
    """Return the calls and waits of the whole group that are older than so many seconds, and the workers that are silent. It
    prints."""
    query = Query(parts=("calls", "waits"), older_than=older_than)
    return find_stuck(group_snapshot(query, timeout), older_than)


def observer() -> GroupObserver:
    """Return an observer of the group of the current worker. NothingFound if the worker lets no observers in."""
    worker: Worker = api._get_current_rpc_agent()
    members = Members()
    members.hear([to_json(each) for each in questions.members(worker.subject)])
    if not any(known.member.addresses for known in members.present()):
        raise NothingFound(
            worker.get_worker_info().name,
            "no worker of the group can be observed: observers are turned off (REMORA_OBSERVERS=0, or the option "
            "observers), or the workers talk only inside of one process (transports)",
        )
    return GroupObserver(worker.subject.group, worker.observers.key, members)
