"""Lets a thread that waits for a reply read the link itself, so that no other thread has to be woken for it.

A thread that finds another one reading sleeps until that one, or the pool, meets its reply. A thread in `rpc_sync` waits for
one call (`await_reply`); one that waits for futures, for any of several (`attend`). What the latter meets and does not wait
for is left to others (`remora.agent.channel.deferred_replies`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic
from typing import Protocol

from remora.agent.calls.call import Call
from remora.agent.calls.future import Sleeper
from remora.agent.channel.completion import have_settled
from remora.agent.channel.deferred_replies import DeferredReplies
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.pool_reads import PoolReads
from remora.agent.channel.registration import Registration
from remora.agent.runtime.try_lock import TryLock, blocks_itself, explain_block
from remora.errors import CallOutcomeUnknown
from remora.protocol.reader import FLUSH, PASS_ON, Effects


class Reverse(Protocol):
    """The channel of the peer's own calls."""

    reading: TryLock
    writing: TryLock
    sorting: TryLock

    def takes_in(self) -> bool: ...


class HasReverse(Protocol):
    """Knows the channel of the peer's own calls, once there is one."""

    @property
    def incoming(self) -> Reverse | None: ...


class WaiterReads:
    """Lets threads that wait for replies on a channel read its link, one at a time."""

    __slots__ = ("_calls", "_deferred", "_inbox", "_outbox", "_owner", "_parked", "_pending", "_pool_reads", "_reader")

    def __init__(self, inbox: Inbox, pool_reads: PoolReads, deferred: DeferredReplies, owner: HasReverse) -> None:
        self._inbox = inbox
        self._outbox, self._reader = inbox.outbox, inbox.outbox.reader
        self._calls, self._pending = inbox.calls, inbox.calls.waiting
        self._pool_reads = pool_reads
        self._deferred = deferred
        self._parked = deferred.parked  # threads that wait for futures, and found that they could not read
        self._owner = owner

    # For one call.

    def await_reply(self, call: Call) -> None:
        """Wait until a synchronous call is settled, reading the link if no other thread does."""
        inbox, reads, incoming = self._inbox, self._pool_reads, self._owner.incoming
        if (
            not self._outbox.writing.free
            or not inbox.sorting.free
            or (incoming is not None and not (incoming.reading.free and incoming.writing.free and incoming.sorting.free))
        ):
            self.check_reentry(call)
        reading = inbox.reading
        while True:
            # (a thread of the pool is about to go on with what was read)
            registration = None if inbox.frames else inbox.registration
            if registration is not None and reading.take():
                try:
                    self._read_reply(call, registration)
                finally:
                    reading.free[0] = True
                    effects = self._reader.left()
                    if effects:
                        reads.perform(effects)
            elif registration is not None and reading.mine():  # a signal handler interrupted a frame that waits
                self._read_reply(call, registration, again=True)
                reads.perform(self._reader.left_to_frame_below())
            else:
                reads.expect(call)
                if not call.sleep():
                    self._check_block(call)
            if call.reply is not None or call.failure is not None:
                return
            if call.deadline <= call.peer.now():
                self._calls.forget(call)
                raise call.timed_out()

    def _read_reply(self, call: Call, registration: Registration, again: bool = False) -> None:
        """Read until a call is settled, its deadline has passed, or the link is gone. Has the role."""
        link, inbox, clock = registration.link, self._inbox, call.peer.now
        while call.id in self._pending and registration is inbox.registration:
            left = call.deadline - clock()
            if not link.await_bytes(left, again):
                self._check_block(call)
            if registration is not inbox.registration:
                break
            inbox.receive(registration, link.read_some)
            if inbox.answered:
                inbox.pass_answered()
            if call.reply is not None or inbox.frames or left <= 0:
                break
            inbox.reading.renew()

    def _check_block(self, call: Call) -> None:
        """Raise if this very thread keeps the answer from coming. Nothing came for a second."""
        if not call.settled and call.deadline > call.peer.now() and blocks_itself():
            if not call.asynchronous:  # (else the program has a future of it, which goes on)
                self._calls.forget(call)
            raise CallOutcomeUnknown(explain_block(call.what))

    def check_reentry(self, call: Call) -> None:
        """Raise if a frame of this very thread is in the midst of a message to or from this peer: no answer could be
        had before it goes on. Happens to signal handlers and destructors, within a few microseconds."""
        incoming = self._owner.incoming
        if self.in_midst() or (incoming is not None and incoming.takes_in()):
            if not call.asynchronous:  # (else the program has a future of it, which goes on)
                self._calls.forget(call)
            raise CallOutcomeUnknown(
                f"{call.what}: a signal handler or destructor called while Remora was in the midst of a message to or from "
                f"{self._inbox.peer} on the same thread, so the answer cannot be waited for there. The call is sent when it "
                f"returns. Use rpc_async there, or leave the call to another thread."
            )

    def in_midst(self) -> bool:
        """Return True if a frame of this very thread is in the midst of a message to or from this peer."""
        return self._outbox.writing.mine() or self._inbox.sorting.mine()

    def takes_in(self) -> bool:
        """For the channel of the peer's own calls, which no thread of the program reads: the same as `in_midst`, or about
        to be. No other thread would read what the peer asks of us before it answers; and we are the peer, perhaps."""
        return self._inbox.reading.mine() or self.in_midst()

    # For futures.

    def attend(self, calls: Collection[Call], deadline: float, over: Callable[[], bool], thread: Sleeper) -> None:
        """A thread waits for the futures of some calls. It reads the link itself, as it would for a call that is not
        asynchronous, and need not be woken. Returns when it is over, or if another thread reads, or there is no link. Then
        `thread` is among those that are parked, until it is taken out again: another thread may have read the reply."""
        inbox, outbox, deferred = self._inbox, self._outbox, self._deferred
        outbox.flush()
        incoming = self._owner.incoming
        if (
            not outbox.writing.free
            or not inbox.sorting.free
            or (incoming is not None and not (incoming.reading.free and incoming.writing.free and incoming.sorting.free))
        ):
            for call in calls:
                self.check_reentry(call)
        self._reader.came(monotonic())
        if deferred.has_some:
            deferred.come_for(calls)
        reading = inbox.reading
        while not over() and monotonic() < deadline:
            # (a thread of the pool is about to go on with what was read)
            registration = None if inbox.frames else inbox.registration
            if registration is not None and reading.take():
                try:
                    self._pool_reads.update(registration)  # the poller does not look meanwhile
                    self._read_until(registration, deadline, over, calls)
                finally:
                    reading.free[0] = True
                    self._leave()
            # a signal handler interrupted a frame of this thread that waits
            elif registration is not None and reading.mine():
                self._read_until(registration, deadline, over, calls, again=True)
                self._pool_reads.perform(self._reader.left_to_frame_below())
            else:
                self._parked.add(thread)  # first: a thread that leaves the link looks at it afterwards
                self._pool_reads.watch()
                break
            deferred.share_out(calls)
        self._parked.add(thread)  # first: a thread that defers something looks at it afterwards
        if deferred.has_some:
            deferred.come_for(calls)

    def _read_until(
        self,
        registration: Registration,
        deadline: float,
        over: Callable[[], bool],
        calls: Collection[Call],
        again: bool = False,
    ) -> None:
        """Read until it is over, or some call is answered. Has the role."""
        link, inbox = registration.link, self._inbox
        while not inbox.answered and not inbox.frames and not over() and registration is inbox.registration:
            left = deadline - monotonic()
            if left <= 0:
                break
            if not link.await_bytes(left, again):
                for call in calls:
                    self._check_block(call)
            if registration is not inbox.registration:
                break
            inbox.receive(registration, link.read_some)
            if not inbox.answered:
                inbox.reading.renew()

    def _leave(self) -> None:
        """The thread has read, and given the role back."""
        registration = self._inbox.registration
        has_outbox = registration is not None and registration.link.outbox_bytes > 0
        self._pool_reads.perform(self._reader.left_async(has_outbox))

    def notify(self, call: Call) -> None:
        """A thread wants to hear of the outcome of a call without reading: do not leave that to threads that come by."""
        call.notified = True  # first: a thread that defers it looks again
        if self._deferred.took(call):
            have_settled(self._inbox.pool, (call,))
            return
        self._pool_reads.expect(call)
        if self._reader.waiter_owned:
            self._outbox.flush()

    def tick(self) -> None:
        """Forget threads that are not parked any more. Called twice a second."""
        for thread in list(self._parked):
            if thread.awake:  # an exception struck it before it could say so
                self._parked.discard(thread)

    def give_back_to_poller(self) -> None:
        """Have the poller and the pool read as on any other channel: threads do not come any more."""
        self.perform(self._reader.give_up())

    def perform(self, effects: Effects) -> None:
        """Do what the machine asks."""
        for effect in effects:
            if effect is FLUSH:
                self._outbox.flush()
            elif effect is PASS_ON:
                self._deferred.pass_on(at_once=True)
            else:
                self._pool_reads.perform((effect,))
