"""The receiving half of a channel: reads what came over a link, and handles it in the order of arrival.

There are two turns, and no thread waits for either. `reading` is a role: its holder waits for the link, or reads it, and
the poller looks away meanwhile (`remora.agent.channel.pool_reads`, `remora.agent.channel.waiter_reads`). `sorting` is a
critical section: only in it bytes are read and messages handled, and it is held for a few microseconds, never while
waiting. So a signal handler that interrupts a waiting thread may read for itself.

What is read goes to `frames`, and leaves it when it has been dealt with. An exception that strikes a thread in between
leaves the rest there, and the pool goes on. Likewise `answered`: asynchronous calls whose outcome is still to be passed on.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from remora.agent.calls.call import Call, Counting
from remora.agent.channel.completion import have_settled, settle
from remora.agent.channel.opener import Opener
from remora.agent.channel.outbox import Outbox
from remora.agent.channel.pending_calls import PendingCalls
from remora.agent.channel.registration import Registration
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.try_lock import TryLock, may_be_struck
from remora.errors import ProtocolError
from remora.transport.link import is_of_socket
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire.enclosed import NOTHING_ENCLOSED
from remora.wire.frames import DEVICE_BUFFERS, FAILED, REFERENCES, SHARED, Damaged, Frame

log = logging.getLogger("remora")

ACK, PING, PONG = int(MessageType.ACK), int(MessageType.PING), int(MessageType.PONG)
GIVE_BACK = int(MessageType.GIVE_BACK)
DAMAGE_LIMIT = 8
REQUESTS = 0x100  # from here on, message types are requests
AWKWARD = DEVICE_BUFFERS | REFERENCES  # flags of messages with effects that must not happen twice

_make_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class LinkDamaged(OSError):
    """A link brought something other than what was sent: some of it is missing, or makes no sense."""


class Inbox:
    """Reads the link of a session, and handles the messages that come."""

    __slots__ = (
        "_damaged_at", "_damages", "_flow_control", "_low_priority", "_notify_ids", "_opener", "_pending", "_requested",
        "_told", "answered", "broken", "calls", "frames", "outbox", "peer", "pool", "reading", "registration", "session",
        "sorting",
    )  # fmt: skip

    def __init__(
        self,
        outbox: Outbox,
        calls: PendingCalls,
        opener: Opener,
        pool: WorkerPool,
        requested: Callable[[Frame], None],
        told: Callable[[Frame], None],
        broken: Callable[[Registration, BaseException], None],
    ) -> None:
        self.peer = outbox.peer
        self.session = outbox.session
        # Of the link that is read now. Assigned under `sorting` when a link comes, without it when one breaks. So a thread
        # that has waited for bytes compares it with the one that it began with.
        self.registration: Registration | None = None
        self.reading = TryLock()  # to wait for the link
        self.sorting = TryLock(needed=True)  # to read it, and to handle what came
        # Read, and not dealt with. Changed under `sorting`. Any thread looks if it is empty: if not, it leaves the reading
        # to the thread that is about to go on.
        self.frames: deque[Frame] = deque()
        # Asynchronous calls whose outcome is to be passed on. Appended under `sorting`; any thread removes.
        self.answered: deque[Call] = deque()
        self.outbox = outbox
        self._opener = opener
        self.calls = calls
        # (what the calls have, without a look at them for each message)
        self._pending, self._low_priority, self._notify_ids = calls.waiting, calls.low_priority, calls.notify_ids
        self._flow_control = outbox.flow_control
        self.pool = pool
        # Called with what comes in, under `sorting`: requests, and control messages, which want no answer.
        self._requested, self._told = requested, told
        self.broken = broken  # called with a link that is of no use any more
        # Under `sorting`.
        self._damages = 0  # links in a row that were of no use, since
        self._damaged_at = -1  # this many messages had arrived

    def receive(self, registration: Registration, read: Callable[[], list[Frame]], exposed: bool = True) -> None:
        """Read and sort what came in. If another thread sorts, have the poller tell of it again: that one may have read
        before it came. `exposed`: see `_handle_frames`."""
        sorting = self.sorting
        if not sorting.take():
            registration.again = True
            _make_way()
            return
        try:
            self.take_in(registration, read, exposed)
        finally:
            sorting.free[0] = True
        if sorting.waiters.asleep:
            sorting.waiters.notify()

    def take_in(self, registration: Registration, read: Callable[[], list[Frame]], exposed: bool = True) -> None:
        """Read, and handle what came. Holds `sorting`."""
        try:
            self.frames.extend(read())
        except BaseException as error:
            if not self._cannot_read(registration, error):
                raise
            return
        self._handle_frames(registration, exposed)

    def _cannot_read(self, registration: Registration, error: BaseException) -> bool:
        """Give up a link of which it is not known how much was read, or which makes no sense. Return True if the error
        is one of the link."""
        if isinstance(error, Damaged):  # what came before it counts: else such a link would never get anywhere
            self.frames.extend(error.frames)
            self._handle_frames(None)  # (a second kind of damage is on a link that is given up anyway)
        self.broken(registration, self._damage(error) if isinstance(error, ProtocolError) else error)
        return is_of_socket(error) or isinstance(error, (ProtocolError, MemoryError))

    def _damage(self, error: ProtocolError) -> Exception:
        """Return the error for a damaged link. What was lost or cannot be understood is said again on a new one. Only
        if nothing at all gets through, time and again, is the peer itself at fault."""
        self._damages = self._damages + 1 if self.session.received == self._damaged_at else 1
        self._damaged_at = self.session.received
        if self._damages <= DAMAGE_LIMIT:
            return LinkDamaged(str(error))
        return ProtocolError(
            f"{self._damages} connections with {self.peer} in a row brought nothing but damage, the last one this: {error}. "
            f"Look at the network between the two, and at whether both run the same version"
        )

    def _handle_frames(self, registration: Registration | None, exposed: bool = True) -> None:
        """Deal with what was read, in the order of arrival. Holds `sorting`. If it makes no sense, the link of this
        registration is broken: what is left comes again. `exposed`: this may be the main thread, which can be struck; false
        for a thread of the pool that reads.

        A message leaves `frames` after all else, so a thread that is struck leaves it there, and the pool deals with
        it once more. That does no harm: a reply finds its call taken off the list, and everything that is not a plain
        reply is left to the pool by a thread that could be struck."""
        frames, session, pending = self.frames, self.session, self._pending
        requests = 0
        is_due = False  # an acknowledgement
        call: Call | None = None
        try:
            while frames:
                frame = frames[0]
                number, flags, kind = frame.number, frame.flags, frame.kind
                if frame.ack > session.acked:
                    session.acknowledged(frame.ack)
                    if self.outbox.room.asleep:
                        self.outbox.room.notify()
                if number == 0:
                    self._heard(frame)
                    frames.popleft()
                    continue
                if number != session.received + 1 and session.is_repeated(number):
                    frames.popleft()  # it was delivered before
                    continue
                if flags & SHARED:
                    frame = self._borrow(frame)
                if kind & RESPONSE and not flags & AWKWARD:
                    call = pending.get(frame.call)
                    if call is not None:  # else it was given up: the reply is late
                        call.reply = frame
                        if self._low_priority:  # (before it is off the list: see `PendingCalls.take`)
                            self._low_priority.discard(frame.call)
                        if pending.pop(frame.call, None) is not None:  # from here on it is ours to settle
                            if call.asynchronous or self._notify_ids:
                                self._settle(call, frame)
                            elif call.signal is not None:
                                call.wake()
                        call = None
                else:
                    if exposed and kind != GIVE_BACK and may_be_struck() and not self.outbox.closed:
                        # (if it is closed, there may be no pool)
                        self.pool.submit_final(self.go_on)
                        break
                    try:
                        if kind >= REQUESTS and not flags & AWKWARD:
                            self._requested(frame)
                            requests += 1
                        else:
                            requests += self._handle_special(frame)
                    except (ProtocolError, MemoryError):
                        raise
                    except Exception:
                        if may_be_struck():
                            raise
                        log.exception("a message from %s makes no sense", self.peer)  # nor will it the next time
                is_due = session.accept(number, frame.size)
                frames.popleft()
        except BaseException as error:
            if call is not None and call.id not in pending:
                self._notify_ids.discard(call.id)
                if call.asynchronous:
                    self.answered.append(call)
                else:
                    call.wake()
            if not isinstance(error, ProtocolError):
                self.pool.submit_final(self.go_on)
                raise
            self.frames.clear()
            if registration is not None:
                self.broken(registration, self._damage(error))
            return
        if is_due:
            self.pool.call_soon(partial(self.outbox.send_unsequenced, ACK))
        flow_control = self._flow_control
        if requests:
            flow_control.took(requests)
        if flow_control.parked or flow_control.held:
            flow_control.go_on()  # the peer may have said that it has what was lent to it

    def _borrow(self, frame: Frame) -> Frame:
        """Return the first message with the shared memory that it refers to. A thread that is struck here leaves either the
        message as it came, or the one that has the memory."""
        if frame.enclosed is NOTHING_ENCLOSED:
            frame = self.frames[0] = self._opener.borrow(frame)
        self._opener.kept()
        return frame

    def _heard(self, frame: Frame) -> None:
        """Handle a control frame, which belongs to this connection alone."""
        self.session.expect(frame.call)
        self._damages = 0  # (what is repeated on a new link comes before any control frame, so it is here)
        if frame.kind == PING:
            self.pool.call_soon(partial(self.outbox.send_unsequenced, PONG))
        elif frame.kind == PONG:
            self._flow_control.answered()
        elif frame.kind != ACK:
            raise ProtocolError(f"a message of type {frame.kind:#x} came without a number")

    def _settle(self, call: Call, frame: Frame) -> None:
        """A call was answered, and is off the list."""
        if self._notify_ids:  # (after it was taken off the list: see `PoolReads.expect`)
            self._notify_ids.discard(call.id)
        if not call.asynchronous:
            if call.signal is not None:
                call.wake()
        elif call.future is not None or frame.flags & FAILED or (type(call.on_settled) is Counting and may_be_struck()):
            self.answered.append(call)
        else:
            settle(call)  # our own business: no code of the program runs

    def _handle_special(self, frame: Frame) -> int:
        """Deal with a message that is more than a plain reply. How many requests that was. Never runs twice for one
        message."""
        if frame.flags & AWKWARD:
            frame = self._opener.open(frame)
        if frame.kind & RESPONSE:
            arrival = frame.enclosed.arrival
            if arrival is not None and arrival.pending:
                call = self._pending.get(frame.call)
                if call is not None:
                    self.calls.arriving.add(frame.call)
                    arrival.when_confirmed(partial(self._settle_later, call, frame))
            elif (call := self.calls.take(frame.call)) is not None:
                call.reply = frame
                self._settle(call, frame)
        elif frame.kind >= REQUESTS:
            self._requested(frame)
            return 1
        else:
            self._told(frame)
        return 0

    def go_on(self) -> None:
        """Deal with what another thread left behind. Runs on a thread of the pool."""
        with self.sorting:
            self._handle_frames(self.registration)
        self.pass_answered()

    def pass_answered(self) -> None:
        """Have the pool pass on the outcomes of asynchronous calls."""
        calls = list(self.answered)
        have_settled(self.pool, calls)
        self.have_passed(calls)

    def have_passed(self, calls: Iterable[Call]) -> None:
        """The outcomes of these calls are seen to. They leave the queue after that, so a thread that is struck leaves
        them there, and a signal handler on top of this frame finds them. Two threads may pass on the same one: the
        second finds nothing to do (`Call.finish`)."""
        for call in calls:
            try:
                self.answered.remove(call)
            except ValueError:
                pass  # another thread was quicker

    def _settle_later(self, call: Call, frame: Frame) -> None:
        """The references in a reply are confirmed now: its waiter may have it."""
        if self.calls.take(call.id) is None:
            return
        call.reply = frame
        call.settle(self.pool.submit_system)
        self.look_up()

    def look_up(self) -> None:
        """A call was settled, but not by its reply: the thread that waits for it may be reading the link, and sees it when
        something comes."""
        if self.reading.locked():
            self.pool.call_soon(partial(self.outbox.send_unsequenced, PING))
