"""Says in the log which calls still wait for an answer, after 10 seconds and then less and less often.

The tick looks at the oldest call to each worker, so calls themselves do nothing for it. Patience is kept for each worker,
not for each call: a queue of calls of which each is old when its turn comes, and a program whose calls take 12 seconds
each, are reported at 10, 20, 40 … seconds and not for every call. It is back at 10 seconds when no call to that worker
has been old for a minute. Only the tick uses this object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from remora import long_wait
from remora.agent.calls.call import NEVER, Call
from remora.agent.peers.peer import Peer
from remora.clock import Clock
from remora.vocabulary.ids import WorkerKey

CALM = 60.0  # seconds without an old call after which the next one is reported soon again


@dataclass(slots=True)
class _Patience:
    """The age at which a call to one worker is reported, and when an old one was last seen."""

    after: float = long_wait.FIRST
    seen: float = 0.0


class Unanswered:
    """The oldest call to each worker, if it is old."""

    def __init__(self, clock: Clock, submit: Callable[[Callable[[], None]], None]) -> None:
        self._clock = clock
        self._submit = submit  # runs a function on another thread: handlers of the log are code of the program
        self._patience: dict[WorkerKey, _Patience] = {}  # of workers that have let us wait

    def look(self, peers: Iterable[Peer]) -> None:
        """Report what has waited for long."""
        now = self._clock.now()
        for peer in peers:
            calls = peer.outgoing.pending
            call = next(iter(list(calls.values())), None) if calls else None  # the oldest
            if call is not None and (age := call.age) >= long_wait.FIRST:
                patience = self._patience.setdefault(peer.key, _Patience())
                patience.seen = now
                if age >= patience.after:
                    while patience.after <= age:
                        patience.after *= 2
                    self._submit(partial(_report, call, calls, age))
        if self._patience:
            self._patience = {key: each for key, each in self._patience.items() if now - each.seen < CALM}


def _report(call: Call, calls: dict[int, Call], age: float) -> None:
    if call.id not in calls:
        return  # it was answered before this thread came to report
    others = len(calls) - 1
    limit = "without a timeout" if call.deadline == NEVER else f"with a timeout of {call.timeout:g} s"
    more = f" ({others} more call{'s' if others > 1 else ''} to {call.peer.name})" if others > 0 else ""
    long_wait.log.warning("%s waits for its answer, %s%s, %.0f s", call.what, limit, more, age)
