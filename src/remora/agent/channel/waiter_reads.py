"""How threads that wait for futures read the replies themselves: on one channel, and nobody is woken for it.

A thread that waits runs nothing of the program but what it waits for (it may hold locks that the rest needs). Replies of
other calls that it comes across are left to the pool, or, while waiters own the channel (`waiter_owned`), put
aside for whoever comes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from time import monotonic

from remora.agent.calls.call import Call
from remora.agent.calls.future import Sleeper
from remora.agent.channel.completion import have_settled, settle
from remora.agent.channel.inbox import Inbox, Registration
from remora.agent.runtime.pool import WorkerPool
from remora.transport.poller import Poller


class WaiterReads(Inbox):
    """See the head of this file."""

    __slots__ = (
        "_deferred",
        "_long_aside",
        "last_waiter_at",
        "parked",
    )  # fmt: skip

    def __init__(self, peer: str, pool: WorkerPool, poller: Poller) -> None:
        super().__init__(peer, pool, poller)
        self.last_waiter_at = 0.0  # when a thread last came to read
        self._deferred: dict[int, Call] = {}  # answered, and not passed on yet
        self._long_aside: dict[int, Call] = {}  # … for one look of `WaiterOwned`, at least
        self.parked: set[Sleeper] = set()  # threads that wait for futures, and found that they could not read

    def attend(self, calls: Collection[Call], deadline: float, over: Callable[[], bool], thread: Sleeper) -> None:
        """A thread waits for the futures of some calls. It reads the link itself, as it would for a call that is not
        asynchronous, and need not be woken. Returns when it is over, or if somebody else reads, or there is no link. Then
        `thread` is among those that are parked, until it is taken out again: somebody else may have read the reply."""
        self.flush()
        incoming = self.opposite
        if not self._writing.free or not self._sorting.free or (incoming is not None and incoming.is_busy()):
            for call in calls:
                self.check_reentry(call)
        self.last_waiter_at = monotonic()
        if self._deferred or self._long_aside:
            self._come_for(calls)
        reading = self._reading
        while not over() and monotonic() < deadline:
            # (a thread of the pool is about to go on with what is in the inbox)
            registration = None if self._inbox else self._registration
            if registration is not None and reading.take():
                try:
                    self._update_interest(registration)  # the poller does not look meanwhile
                    self._read_until(registration, deadline, over, calls)
                finally:
                    reading.free[0] = True
                    self._leave()
            # a signal handler interrupted a frame of this thread that waits
            elif registration is not None and reading.mine():
                self._read_until(registration, deadline, over, calls, again=True)
            else:
                self.parked.add(thread)  # first: who leaves the link looks at it afterwards
                self.watch()
                break
            self._share_out(calls)
        self.parked.add(thread)  # first: who puts something aside looks at it afterwards
        if self._deferred or self._long_aside:
            self._come_for(calls)

    def _read_until(
        self,
        registration: Registration,
        deadline: float,
        over: Callable[[], bool],
        calls: Collection[Call],
        again: bool = False,
    ) -> None:
        """Read until it is over, or some call is answered. Has the role."""
        link = registration.link
        while not self._answered and not self._inbox and not over() and registration is self._registration:
            left = deadline - monotonic()
            if left <= 0:
                break
            if not link.await_bytes(left, again):
                for call in calls:
                    self._check_block(call)
            if registration is not self._registration:
                break
            self._receive(registration, link.read_some)

    def _leave(self) -> None:
        """The thread has read. The poller looks from now on, unless waiters own the channel and nothing else is due."""
        self._unwatched = True
        registration = self._registration
        if not self.waiter_owned or self.notify_ids or self.parked:
            self._unwatched = False
            if registration is not None:
                self._update_interest(registration)
        elif registration is not None and registration.link.outbox_bytes:
            self._update_interest(registration)

    def _share_out(self, calls: Collection[Call]) -> None:
        """What was answered goes to the thread, if it came for that, or there is nothing to unpickle; or to others."""
        answered = list(self._answered)
        try:
            self._share(answered, calls)
        except BaseException:  # struck: the pool passes on what we may not have
            have_settled(self._pool, answered)
            raise

    def _share(self, answered: Collection[Call], calls: Collection[Call]) -> None:
        empty: list[Call] = []
        mine: list[Call] = []
        others: list[Call] = []
        for each in answered:
            if each.quiet and each.has_nothing:
                empty.append(each)
            elif each.quiet and each in calls:
                mine.append(each)
            elif each.heeded or not each.quiet or not self.waiter_owned or self.parked:
                others.append(each)
            else:
                self._deferred[each.id] = each
                if each.heeded and self._took(each):  # meanwhile
                    others.append(each)
        settle(empty)
        rest = mine[1:]  # to unpickle the first may take long, or wait for somebody who waits for another
        for each in rest:
            self._deferred[each.id] = each
        others += [each for each in rest if (each.heeded or self.parked) and self._took(each)]
        if others:
            have_settled(self._pool, others)
        self._have_passed(answered)  # before code of the program runs, which may take long
        settle(mine[:1])
        self._come_for(rest)
        if (self._deferred or self._long_aside) and (self.closed or self.parked or not self.waiter_owned):
            self.pass_on(at_once=True)  # nobody would come for them, or somebody waits for one

    def _took(self, call: Call) -> bool:
        return (self._deferred.pop(call.id, None) or self._long_aside.pop(call.id, None)) is not None

    def _come_for(self, calls: Iterable[Call]) -> None:
        for each in calls:  # those that follow stay where they are: others may come for them meanwhile
            if self._took(each):
                try:
                    settle((each,))
                except BaseException:  # struck
                    have_settled(self._pool, (each,))
                    raise

    def pass_on(self, at_once: bool = False) -> None:
        """Let the pool have what nobody came for since the last time, or `at_once` all that was put aside."""
        for aside in (self._long_aside, self._deferred) if at_once else (self._long_aside,):
            left = [call for call_id in list(aside) if (call := aside.pop(call_id, None)) is not None]
            if left and self.closed:
                settle(left)  # there may be no pool any more
            elif left:
                have_settled(self._pool, left)
        if not at_once:
            self._deferred, self._long_aside = self._long_aside, self._deferred

    def notify(self, call: Call) -> None:
        """Somebody wants to hear of the outcome of a call without reading: do not leave that to threads that come by."""
        call.heeded = True  # first: who puts it aside looks again
        if self._took(call):
            have_settled(self._pool, (call,))
            return
        self.expect(call)
        if self.waiter_owned:
            self.flush()

    def look_after_reader(self) -> None:
        super().look_after_reader()
        for thread in list(self.parked):
            if thread.awake:  # an exception struck it before it could say so
                self.parked.discard(thread)

    def give_back_to_poller(self) -> None:
        """Threads do not come any more: everything is as on any other channel."""
        self.waiter_owned = False  # first: who leaves the link, or puts something aside, sees to it itself now
        self.flush()
        self.watch(again=True)
        self.pass_on(at_once=True)
