"""Says in the log which calls without a deadline still wait for an answer: a call with one ends by itself.

The tick looks at the oldest such call to each worker, so calls themselves do nothing for it. A call is seen at the first
tick after it was made: half a second may be missing from the time in the report. Only the tick uses this object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remora.agent.calls import NEVER, Call
from remora.agent.peer import Peer
from remora.clock import Clock
from remora.long_wait import LongWait
from remora.vocabulary.ids import WorkerKey

Submit = Callable[[Callable[[], None]], None]


class Unanswered:
    """The oldest call without a deadline to each worker, and how long it was seen to wait."""

    def __init__(self, clock: Clock, submit: Submit) -> None:
        self._clock = clock
        self._submit = submit  # runs a function on another thread: handlers of the log are code of the program
        self._waits: dict[WorkerKey, tuple[int, LongWait]] = {}  # by worker: the number of the call, and its wait

    def look(self, peers: Iterable[Peer]) -> None:
        """Report what has waited for long."""
        waits: dict[WorkerKey, tuple[int, LongWait]] = {}
        for peer in peers:
            calls = peer.outgoing.pending
            call = _oldest(calls) if calls else None
            if call is None:
                continue
            known = self._waits.get(peer.key)
            if known is None or known[0] != call.id:
                known = call.id, LongWait(_description(call, calls), self._clock)
            waits[peer.key] = known
            if known[1].due:
                self._submit(known[1].look)
        self._waits = waits


def _oldest(calls: dict[int, Call]) -> Call | None:
    return next((call for call in list(calls.values()) if call.deadline == NEVER), None)


def _description(call: Call, calls: dict[int, Call]) -> Callable[[], str]:
    def describe() -> str:
        if call.id not in calls:
            return ""  # it was answered before this thread came to report
        others = len(calls) - 1
        more = f" ({others} more calls wait for it)" if others > 0 else ""
        return f"{call.what} waits for its answer, without a timeout{more}"

    return describe
