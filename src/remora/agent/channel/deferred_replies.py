"""Replies that a waiting thread met: it completes its own, and leaves others to the pool or to threads that come for them.

A thread that waits runs nothing of the program but what it waits for (it may hold locks that the rest needs). Replies of
other calls that it meets are left to the pool, or, while waiters own the channel (`Outbox.waiter_owned`), deferred for the
threads that come for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from remora.agent.calls.call import Call
from remora.agent.calls.future import Sleeper
from remora.agent.channel.completion import have_settled, settle
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.outbox import Outbox
from remora.agent.runtime.pool import WorkerPool


class DeferredReplies:
    """Calls of a channel that are answered, and whose outcome is not passed on yet.

    A thread that defers one does so, then looks whether a thread is parked or notified. A thread that parks, or wants to be
    notified, says so, then looks whether the reply is deferred. So the second of the two sees the first. """

    __slots__ = ("_inbox", "_outbox", "_pool", "calls", "long", "parked")

    def __init__(self, inbox: Inbox, outbox: Outbox, pool: WorkerPool) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._pool = pool
        self.calls: dict[int, Call] = {}
        self.long: dict[int, Call] = {}  # … for one look of `WaiterOwned`, at least
        self.parked: set[Sleeper] = set()  # threads that wait for futures, and found that they could not read

    def share_out(self, calls: Collection[Call]) -> None:
        """What was answered goes to the thread, if it came for that, or there is nothing to unpickle; or to others."""
        answered = list(self._inbox.answered)
        try:
            self._share(answered, calls)
        except BaseException:  # struck: the pool passes on what we may not have
            have_settled(self._pool, answered)
            raise

    def _share(self, answered: Collection[Call], calls: Collection[Call]) -> None:
        empty: list[Call] = []
        mine: list[Call] = []
        others: list[Call] = []
        outbox = self._outbox
        for each in answered:
            if each.quiet and each.has_nothing:
                empty.append(each)
            elif each.quiet and each in calls:
                mine.append(each)
            elif each.heeded or not each.quiet or not outbox.waiter_owned or self.parked:
                others.append(each)
            else:
                self.calls[each.id] = each
                if each.heeded and self.took(each):  # meanwhile
                    others.append(each)
        settle(empty)
        rest = mine[1:]  # to unpickle the first may take long, or wait for a thread that waits for another
        for each in rest:
            self.calls[each.id] = each
        others += [each for each in rest if (each.heeded or self.parked) and self.took(each)]
        if others:
            have_settled(self._pool, others)
        self._inbox.have_passed(answered)  # before code of the program runs, which may take long
        settle(mine[:1])
        self.come_for(rest)
        if (self.calls or self.long) and (outbox.closed or self.parked or not outbox.waiter_owned):
            self.pass_on(at_once=True)  # no thread would come for them, or one waits for one of them

    def took(self, call: Call) -> bool:
        """Whether the call was deferred. It is the current thread's now."""
        return (self.calls.pop(call.id, None) or self.long.pop(call.id, None)) is not None

    def come_for(self, calls: Iterable[Call]) -> None:
        """Complete those of these calls that were deferred."""
        for each in calls:  # those that follow stay where they are: others may come for them meanwhile
            if self.took(each):
                try:
                    settle((each,))
                except BaseException:  # struck
                    have_settled(self._pool, (each,))
                    raise

    def pass_on(self, at_once: bool = False) -> None:
        """Let the pool have what no thread came for since the last time, or `at_once` all that was deferred."""
        for aside in (self.long, self.calls) if at_once else (self.long,):
            left = [call for call_id in list(aside) if (call := aside.pop(call_id, None)) is not None]
            if left and self._outbox.closed:
                settle(left)  # there may be no pool any more
            elif left:
                have_settled(self._pool, left)
        if not at_once:
            self.calls, self.long = self.long, self.calls
