"""See what the workers do, from inside a program: snapshots of this worker and of its group, and what is stuck.

    from remora import observe

    print(observe.stuck(older_than=10.0))      # what has waited for so long, on every worker
    mine = observe.snapshot()                  # this worker: calls, waits, references, links, threads …
    everybody = observe.group_snapshot()       # all workers that answer within two seconds, and why others do not
    with observe.trace("t.json"):              # all calls of the group meanwhile, for Perfetto
        ...

The same is to be had from outside, without a line in the program: `remora.observer`.
"""

from __future__ import annotations

from remora.observe.recording import profile_group, trace
from remora.observe.snapshots import group_snapshot, observer, snapshot
from remora.observe.stuck import Stuck, find_stuck
from remora.observer.model import CallStatus, GroupSnapshot, Missing, Query, WaitStatus, WorkerSnapshot

__all__ = [
    "CallStatus",
    "GroupSnapshot",
    "Missing",
    "Query",
    "Stuck",
    "WaitStatus",
    "WorkerSnapshot",
    "group_snapshot",
    "observer",
    "profile_group",
    "snapshot",
    "stuck",
    "trace",
]


def stuck(older_than: float = 10.0, timeout: float = 2.0) -> Stuck:
    """Return the calls and waits of the whole group that are older than so many seconds, and the workers that are silent. It
    prints."""
    query = Query(parts=("calls", "waits"), older_than=older_than)
    return find_stuck(group_snapshot(query, timeout))
