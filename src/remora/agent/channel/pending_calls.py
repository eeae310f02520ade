"""The calls of a channel that are not answered."""

from __future__ import annotations

from collections.abc import Callable

from remora.agent.calls.call import Call
from remora.agent.runtime.pool import WorkerPool
from remora.protocol.reader import Reader


class PendingCalls:
    """The list of calls that wait for a reply. A thread that takes one off the list settles it: one thread gets it.

    Each change is one operation on a dict or a set, which is atomic; there is no lock. """

    __slots__ = ("arriving", "low_priority", "notify_ids", "waiting")

    def __init__(self, reader: Reader) -> None:
        # The reader decides by these three. They are changed here, by any thread.
        self.waiting: dict[int, Call] = reader.pending
        self.low_priority = reader.low_priority  # those of them whose replies may wait until a thread looks
        self.notify_ids = reader.notify_ids  # … whose replies are to be noticed at once, though no thread may come to read
        self.arriving: set[int] = set()  # … whose replies are here, but not confirmed by the owners of references in them

    def take(self, call_id: int) -> Call | None:
        """Take a call off the list."""
        if self.low_priority:  # before it is off the list: else a reader that leaves in between counts too few that wait
            self.low_priority.discard(call_id)
        call = self.waiting.pop(call_id, None)
        if self.arriving:
            self.arriving.discard(call_id)
        if self.notify_ids:
            self.notify_ids.discard(call_id)
        return call

    def forget(self, call: Call) -> bool:
        """Take a call off the list for which no thread waits any more. Return False if it was answered meanwhile."""
        return self.take(call.id) is not None

    def fail_all(
        self, pool: WorkerPool, make_error: Callable[[Call], BaseException], answered_too: bool = True
    ) -> None:
        """Settle every call with an error of its own. If not `answered_too`, those are left whose reply is here and
        waits only for the owners of references in it."""
        while ids := [each for each in list(self.waiting) if answered_too or each not in self.arriving]:
            for call_id in ids:
                call = self.take(call_id)
                if call is not None:
                    call.fail(make_error(call))
                    call.settle(pool.submit_system)
