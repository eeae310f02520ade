"""How threads that wait for futures read the replies themselves: on one channel, and nobody is woken for it.

A thread that waits runs nothing of the program but what it waits for (it may hold locks that the rest needs). Replies of
other calls that it comes across are left to the crew, or, while the channel is attended (`remora.agent.attendance`), put
aside for whoever comes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from time import monotonic

from remora.agent.calls import Call
from remora.agent.crew import Crew
from remora.agent.futures import Sleeper
from remora.agent.receiving import Port, Receiving
from remora.agent.settling import have_settled, settle
from remora.transport.poller import Poller


class Attending(Receiving):
    """See the head of this file."""

    __slots__ = (
        "_aside", "_long_aside", "sleeping", "visited",
    )  # fmt: skip

    def __init__(self, peer: str, crew: Crew, poller: Poller) -> None:
        super().__init__(peer, crew, poller)
        self.visited = 0.0  # when a thread last came to read
        self._aside: dict[int, Call] = {}  # answered, and not passed on yet
        self._long_aside: dict[int, Call] = {}  # … for one look of `Attendance`, at least
        self.sleeping: set[Sleeper] = set()  # threads that wait for futures, and found that they could not read

    def attend(self, calls: Collection[Call], deadline: float, over: Callable[[], bool], thread: Sleeper) -> None:
        """A thread waits for the futures of some calls. It reads the link itself, as it would for a call that is not
        asynchronous, and need not be woken. Returns when it is over, or if somebody else reads, or there is no link. Then
        `thread` is among those that are sleeping, until it is taken out again: somebody else may have read the reply."""
        self.flush()
        incoming = next(iter(calls)).peer.incoming  # all calls are to the same peer
        if not self._writing.free or not self._sorting.free or (incoming is not None and incoming.is_busy()):
            for call in calls:
                self.check_reentry(call)
        self.visited = monotonic()
        if self._aside or self._long_aside:
            self._come_for(calls)
        reading = self._reading
        while not over() and monotonic() < deadline:
            port = None if self._inbox else self._port  # (a thread of the crew is about to go on with what is in the inbox)
            if port is not None and reading.take():
                try:
                    self._rearm(port)  # the poller does not look meanwhile
                    self._read_until(port, deadline, over, calls)
                finally:
                    reading.free[0] = True
                    self._leave()
            elif port is not None and reading.mine():  # a signal handler interrupted a frame of this thread that waits
                self._read_until(port, deadline, over, calls, again=True)
            else:
                self.sleeping.add(thread)  # first: who leaves the link looks at it afterwards
                self.watch()
                break
            self._share_out(calls)
        self.sleeping.add(thread)  # first: who puts something aside looks at it afterwards
        if self._aside or self._long_aside:
            self._come_for(calls)

    def _read_until(
        self, port: Port, deadline: float, over: Callable[[], bool], calls: Collection[Call], again: bool = False
    ) -> None:
        """Read until it is over, or some call is answered. Has the role."""
        link = port.link
        while not self._answered and not self._inbox and not over() and port is self._port:
            left = deadline - monotonic()
            if left <= 0:
                break
            if not link.await_bytes(left, again):
                for call in calls:
                    self._check_block(call)
            if port is not self._port:
                break
            self._receive(port, link.read_some)

    def _leave(self) -> None:
        """The thread has read. The poller looks from now on, unless the channel is attended and nothing else expected."""
        self._unwatched = True
        port = self._port
        if not self.attended or self.expected or self.sleeping:
            self._unwatched = False
            if port is not None:
                self._rearm(port)
        elif port is not None and port.link.outbox_bytes:
            self._rearm(port)

    def _share_out(self, calls: Collection[Call]) -> None:
        """What was answered goes to the thread, if it came for that, or there is nothing to unpickle; or to others."""
        answered = list(self._answered)
        try:
            self._share(answered, calls)
        except BaseException:  # struck: the crew passes on what we may not have
            have_settled(self._crew, answered)
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
            elif each.heeded or not each.quiet or not self.attended or self.sleeping:
                others.append(each)
            else:
                self._aside[each.id] = each
                if each.heeded and self._took(each):  # meanwhile
                    others.append(each)
        settle(empty)
        rest = mine[1:]  # to unpickle the first may take long, or wait for somebody who waits for another
        for each in rest:
            self._aside[each.id] = each
        others += [each for each in rest if (each.heeded or self.sleeping) and self._took(each)]
        if others:
            have_settled(self._crew, others)
        self._have_passed(answered)  # before code of the program runs, which may take long
        settle(mine[:1])
        self._come_for(rest)
        if (self._aside or self._long_aside) and (self.closed or self.sleeping or not self.attended):
            self.pass_on(at_once=True)  # nobody would come for them, or somebody waits for one

    def _took(self, call: Call) -> bool:
        return (self._aside.pop(call.id, None) or self._long_aside.pop(call.id, None)) is not None

    def _come_for(self, calls: Iterable[Call]) -> None:
        for each in calls:  # those that follow stay where they are: others may come for them meanwhile
            if self._took(each):
                try:
                    settle((each,))
                except BaseException:  # struck
                    have_settled(self._crew, (each,))
                    raise

    def pass_on(self, at_once: bool = False) -> None:
        """Let the crew have what nobody came for since the last time, or `at_once` all that was put aside."""
        for aside in (self._long_aside, self._aside) if at_once else (self._long_aside,):
            left = [call for call_id in list(aside) if (call := aside.pop(call_id, None)) is not None]
            if left and self.closed:
                settle(left)  # there may be no crew any more
            elif left:
                have_settled(self._crew, left)
        if not at_once:
            self._aside, self._long_aside = self._long_aside, self._aside

    def heed(self, call: Call) -> None:
        """Somebody wants to hear of the outcome of a call without reading: do not leave that to threads that come by."""
        call.heeded = True  # first: who puts it aside looks again
        if self._took(call):
            have_settled(self._crew, (call,))
            return
        self.expect(call)
        if self.attended:
            self.flush()

    def look_after_reader(self) -> None:
        super().look_after_reader()
        for thread in list(self.sleeping):
            if thread.awake:  # an exception struck it before it could say so
                self.sleeping.discard(thread)

    def desert(self) -> None:
        """Threads do not come any more: everything is as on any other channel."""
        self.attended = False  # first: who leaves the link, or puts something aside, sees to it itself now
        self.flush()
        self.watch(again=True)
        self.pass_on(at_once=True)
