"""One snapshot of the group with what the pages derive from it, each derived at most once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from remora.dashboard.history import History
from remora.observer.model import CallStatus, GroupSnapshot, Missing, Stage, ThreadStatus, WorkerSnapshot
from remora.observer.waits import WaitGraph

# A call is at the furthest stage that one of its ends has seen.
_ORDER = {stage: place for place, stage in enumerate(Stage)}


@dataclass(slots=True)
class CallEnds:
    """Both ends of a call, as far as they are known."""

    at_caller: CallStatus | None = None
    at_callee: CallStatus | None = None

    @property
    def any(self) -> CallStatus:
        """The end that knows more."""
        found = self.at_callee or self.at_caller
        assert found is not None
        if found.function or self.at_caller is None:
            return found
        return replace(found, function=self.at_caller.function)  # its callee does not know it before it runs

    @property
    def stage(self) -> Stage:
        return max((each.stage for each in (self.at_caller, self.at_callee) if each), key=_ORDER.__getitem__)

    @property
    def age(self) -> float:
        return max(each.age for each in (self.at_caller, self.at_callee) if each)


class Moment:
    """One moment of a group, as the pages show it."""

    def __init__(self, snapshot: GroupSnapshot, history: History, parts: Iterable[str]) -> None:
        self.snapshot = snapshot
        self.history = history
        self.parts = frozenset(parts)
        self.views: dict[Any, bytes] = {}  # what pages made of it, by address, for other readers of the same page

    @cached_property
    def workers(self) -> dict[str, WorkerSnapshot]:
        return {each.name: each for each in sorted(self.snapshot.workers, key=lambda each: (each.rank, each.name))}

    @cached_property
    def missing(self) -> dict[str, Missing]:
        return {each.name: each for each in self.snapshot.missing}

    @cached_property
    def names(self) -> list[str]:
        """All workers of the group, by rank."""
        ranks = {each.name: each.rank for each in self.snapshot.workers}
        ranks.update({each.name: 1 << 30 if each.rank is None else each.rank for each in self.snapshot.missing})
        return sorted(ranks, key=lambda name: (ranks[name], name))

    @cached_property
    def calls(self) -> dict[str, CallEnds]:
        """All calls under way, by `CallKey` in words, the oldest first."""
        found: dict[str, CallEnds] = {}
        for worker in self.snapshot.workers:
            for each in worker.calls:
                call = found.setdefault(str(each.key), CallEnds())
                if each.key.caller == worker.name and call.at_caller is None and not _is_callee_stage(each):
                    call.at_caller = each
                else:
                    call.at_callee = each
        return dict(sorted(found.items(), key=lambda item: -item[1].age))

    @cached_property
    def threads(self) -> dict[tuple[str, int], ThreadStatus]:
        return {(worker.name, each.id): each for worker in self.snapshot.workers for each in worker.threads}

    @cached_property
    def graph(self) -> WaitGraph:
        """The graph of waits."""
        return WaitGraph.of(self.snapshot)

    @cached_property
    def stopped(self) -> list[Missing]:
        """Workers that should be here: a worker that left is no trouble."""
        return [each for each in self.snapshot.missing if each.state != "left"]

    def summary(self) -> dict[str, Any]:
        """The head of every page: the workers that answered, and what is wrong."""
        return {
            "group": self.snapshot.group,
            "program": next((each.program for each in self.snapshot.workers if each.program), ""),
            "time": self.snapshot.time,
            "answered": len(self.snapshot.workers),
            "all": len(self.snapshot.workers) + len(self.stopped),
            "missing": [[each.name, each.state, each.reason] for each in self.stopped[:20]],
            "cycles": len(self.graph.cycles()),
        }

    def left_out(self, part: str) -> int:
        """Entries that the workers did not send because of the limit."""
        return sum(each.left_out.get(part, 0) for each in self.snapshot.workers)


def _is_callee_stage(call: CallStatus) -> bool:
    return call.stage in (Stage.QUEUED, Stage.RUNNING, Stage.ANSWERING)
