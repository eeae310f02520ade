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


class DeferredReplies:
    """Calls of a channel that are answered, and whose outcome is not passed on yet.

    A thread that defers one does so, then looks whether a thread is parked or notified. A thread that parks, or wants to be
    notified, says so, then looks whether the reply is deferred. So the second of the two sees the first. """

    __slots__ = ("_inbox", "_outbox", "_pool", "_reader", "parked")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox, self._outbox, self._pool = inbox, inbox.outbox, inbox.pool
        # It keeps the calls: `deferred`, and those that one look of the timer saw, `deferred_long`.
        self._reader = inbox.outbox.reader
        self.parked: set[Sleeper] = self._reader.parked

    @property
    def has_some(self) -> bool:
        """Return True if some call is deferred."""
        return bool(self._reader.deferred or self._reader.deferred_long)

    def share_out(self, calls: Collection[Call]) -> None:
        """Complete what was answered and is for this thread, or has nothing to unpickle. Leave the rest to others."""
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
        reader = self._reader
        # `Reader.disposal` for each, inlined: most need not be looked for in `calls`, which may be long
        # (`test_the_disposal_of_a_reply` compares the two).
        for each in answered:
            if each.quiet and each.has_nothing:
                empty.append(each)
            elif each.quiet and each in calls:
                mine.append(each)
            elif each.notified or not each.quiet or not reader.waiter_owned or self.parked:
                others.append(each)
            else:
                reader.deferred[each.id] = each
                if each.notified and self.took(each):  # meanwhile
                    others.append(each)
        for each in empty:
            settle(each)
        rest = mine[1:]  # to unpickle the first may take long, or wait for a thread that waits for another
        for each in rest:
            reader.deferred[each.id] = each
        others += [each for each in rest if (each.notified or self.parked) and self.took(each)]
        if others:
            have_settled(self._pool, others)
        self._inbox.have_passed(answered)  # before code of the program runs, which may take long
        for each in mine[:1]:
            settle(each)
        self.come_for(rest)
        if reader.must_pass_on(self._outbox.closed):
            self.pass_on(at_once=True)

    def took(self, call: Call) -> bool:
        """Return True if the call was deferred. It is the current thread's now."""
        reader = self._reader
        return (reader.deferred.pop(call.id, None) or reader.deferred_long.pop(call.id, None)) is not None

    def come_for(self, calls: Iterable[Call]) -> None:
        """Complete those of these calls that were deferred."""
        for each in calls:  # those that follow stay where they are: others may come for them meanwhile
            if self.took(each):
                try:
                    settle(each)
                except BaseException:  # struck
                    have_settled(self._pool, (each,))
                    raise

    def pass_on(self, at_once: bool = False) -> None:
        """Let the pool have what no thread came for since the last time, or `at_once` all that was deferred."""
        reader = self._reader
        for aside in (reader.deferred_long, reader.deferred) if at_once else (reader.deferred_long,):
            left = [call for call_id in list(aside) if (call := aside.pop(call_id, None)) is not None]
            if not self._outbox.closed:
                have_settled(self._pool, left)
            else:  # there may be no pool any more
                for call in left:
                    settle(call)
        if not at_once:
            reader.deferred, reader.deferred_long = reader.deferred_long, reader.deferred
