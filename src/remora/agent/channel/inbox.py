"""The receiving half of a channel: sorts what comes in, and lets threads that wait for a reply read the link
themselves.

There are two turns, and no thread waits for either. `_reading` is a role: its holder waits for the link, or reads it,
and the poller looks away meanwhile. A thread that finds another one reading sleeps until that one meets its reply.
`_sorting` is a critical section: only in it bytes are read and messages sorted, and it is held for a few microseconds,
never while waiting. So a signal handler that interrupts a waiting thread may read for itself; and if the holder of the
role does not go on (its handler takes long), the tick lets the pool read in its stead (`look_after_reader`).

What is read goes to the `_inbox`, and leaves it when it has been dealt with. An exception that strikes a thread in
between leaves the rest there, and the pool goes on. Likewise `_answered`: asynchronous calls whose outcome is still to
be passed on. """

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from remora.agent.calls.call import Call
from remora.agent.channel.bulk import BulkOutbox
from remora.agent.channel.completion import have_settled, settle
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.try_lock import TryLock, blocks_itself, explain_block, may_be_struck
from remora.errors import CallOutcomeUnknown, ProtocolError, SerializationError
from remora.protocol.session import OWED_BYTES, OWED_MESSAGES
from remora.transport.link import StreamLink, is_of_socket
from remora.transport.poller import READ, WRITE, Poller
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire.frames import CARGO, FAILED, REFERENCES, SHARED, Damaged, Frame

log = logging.getLogger("remora")

ACK, PING, PONG = int(MessageType.ACK), int(MessageType.PING), int(MessageType.PONG)
GIVE_BACK = int(MessageType.GIVE_BACK)
DAMAGE_LIMIT = 8
REQUESTS = 0x100  # from here on, message types are requests
AWKWARD = CARGO | REFERENCES  # flags of messages with effects that must not happen twice

_make_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class LinkDamaged(OSError):
    """What came over a link is not what was sent: some of it is missing, or makes no sense."""


class _Unreadable:
    """In the place of what a message waits for: it arrived, and something that comes before its value cannot be read."""

    __slots__ = ("_why",)

    def __init__(self, why: str) -> None:
        self._why = why

    def settled_or_later(self, deadline: float, resume: Callable[[], None]) -> bool:
        """There is nothing to wait for (`remora.agent.memory.late_fill`)."""
        return True

    def wait(self, deadline: float) -> str:
        raise SerializationError(self._why)


class Registration:
    """A link in the poller."""

    __slots__ = ("again", "armed", "fileno", "link", "ready", "unsure")

    def __init__(self, channel: Inbox, link: StreamLink) -> None:
        self.link = link
        self.fileno = link.fileno
        self.ready: Callable[[int], None] = partial(channel.ready, self)
        self.armed = 0  # what the poller was asked to watch for (-1: that is being decided)
        self.again = False  # it has to be asked again in any case: what it said was its last word, or nobody listened
        self.unsure = False  # what it should watch for is to be decided again


class Inbox(BulkOutbox):
    """See the head of this file."""

    __slots__ = (
        "_answered",
        "_arming",
        "_arrived",
        "_damaged_at",
        "_damages",
        "_inbox",
        "_poller",
        "_pool",
        "_reader_seen",
        "_reading",
        "_registration",
        "_requested",
        "_said",
        "_sorting",
        "_stalled",
        "_unwatched",
        "arriving",
        "low_priority",
        "notify_ids",
        "opposite",
        "pending",
    )  # fmt: skip

    # What to do with what comes in.
    _arrived: Callable[[Frame], Any]  # a message with references: take note of them
    _requested: Callable[[Frame], None]  # a request
    _said: Callable[[Frame], None]  # something that wants no answer

    def __init__(self, peer: str, pool: WorkerPool, poller: Poller) -> None:
        super().__init__(peer)
        self.pending: dict[int, Call] = {}
        self.opposite: Inbox | None = None  # on a channel that we dialled: the one that the peer dialled, if it did
        self.low_priority: set[int] = set()  # those of them whose replies may wait until somebody looks
        self.arriving: set[int] = set()  # … whose replies are here, but for the word of the owners of references in them
        self._pool = pool
        self._poller = poller
        self._registration: Registration | None = None
        self._damages = 0  # links in a row that were of no use, since
        self._damaged_at = -1  # this many messages had arrived
        self._reading = TryLock()  # to wait for the link
        self._sorting = TryLock(needed=True)  # to read it, and to sort what came
        self._arming = TryLock()  # to tell the poller what to watch for
        self._inbox: deque[Frame] = deque()  # read, and not dealt with
        self._answered: deque[Call] = deque()  # asynchronous calls whose outcome is to be passed on
        self._reader_seen: int | None = None  # which turn of `_reading` the last tick saw
        self._stalled: int | None = None  # … and the one before: the pool may read in its stead
        self._unwatched = False  # the poller is not to look for replies: a waiting thread reads them, or none is due
        self.notify_ids: set[int] = set()  # those whose replies are to be noticed at once, though no thread may come to read

    @abstractmethod
    def _broken(self, registration: Registration, error: BaseException) -> None:
        """A link is of no use any more."""

    def ready(self, registration: Registration, events: int) -> None:
        """The poller says that the link can be read or written. Runs on a thread of the pool."""
        if registration is not self._registration:
            return
        link = registration.link
        if events != READ or registration.armed != READ or not self._poller.lasts:
            registration.again = True
        if link.outbox_bytes:
            self._drain(registration)
        if events == WRITE:
            self._update_interest(registration)
            return
        reading = self._reading
        if reading.take() or self._take_turn(registration):
            try:
                if registration is self._registration:
                    self._receive(registration, link.read, exposed=False)
            finally:
                reading.free[0] = True
        elif not self._read_instead(registration):
            self._update_interest(registration)
            return
        if len(self.pending) > len(self.low_priority):
            self._unwatched = False  # a thread that found us reading sleeps now: nobody else looks for its reply
        to_arm = registration.armed != READ or registration.again or self._unwatched
        if to_arm or link.unread or link.outbox_bytes or self.flow_control.paused:
            self._update_interest(registration)
        if self._answered:
            self.pass_answered()  # callbacks of the program: not while events wait

    def _take_turn(self, registration: Registration) -> bool:
        """Have `_reading`, unless another thread has: then that one knows, before it goes, that something came."""
        while not self._reading.take():
            registration.again = True
            if self._reading.locked():
                return False
        return True

    def _read_instead(self, registration: Registration) -> bool:
        """Another thread has `_reading`. If it does not go on, read what is there in its stead."""
        if self._stalled is None or self._reading.holder() is not self._stalled or registration is not self._registration:
            return False
        self._receive(registration, registration.link.read, exposed=False)
        self.look_up()  # it may only have waited for long: then it has to see what we read
        return True

    def _receive(self, registration: Registration, read: Callable[[], list[Frame]], exposed: bool = True) -> None:
        """Read and sort what came in. If another thread sorts, have the poller tell of it again: that one may have read
        before it came. `exposed`: see `_handle_frames`."""
        sorting = self._sorting
        if not sorting.take():
            registration.again = True
            _make_way()
            return
        try:
            self._take_in(registration, read, exposed)
        finally:
            sorting.free[0] = True
        if sorting.waiters.asleep:
            sorting.waiters.notify()

    def _take_in(self, registration: Registration, read: Callable[[], list[Frame]], exposed: bool = True) -> None:
        """Holds `_sorting`."""
        try:
            self._inbox.extend(read())
        except BaseException as error:
            if not self._cannot_read(registration, error):
                raise
            return
        self._handle_frames(registration, exposed)

    def _cannot_read(self, registration: Registration, error: BaseException) -> bool:
        """How much was read is not known, or it makes no sense: a new link begins afresh. Whether the error is one of
        the link."""
        if isinstance(error, Damaged):
            self._salvage(error.frames)
        self._broken(registration, self._damage(error) if isinstance(error, ProtocolError) else error)
        return is_of_socket(error) or isinstance(error, (ProtocolError, MemoryError))

    def _salvage(self, frames: list[Frame]) -> None:
        """What came before the damage counts: else a link that is damaged often would never get anywhere."""
        self._inbox.extend(frames)
        self._handle_frames(None)  # (a second kind of damage is on a link that is given up anyway)

    def _damage(self, error: ProtocolError) -> Exception:
        """What was lost or cannot be understood is said again on a new link. Only if nothing at all gets through, time
        and again, is the peer itself at fault."""
        self._damages = self._damages + 1 if self.session.received == self._damaged_at else 1
        self._damaged_at = self.session.received
        if self._damages <= DAMAGE_LIMIT:
            return LinkDamaged(str(error))
        return ProtocolError(
            f"{self._damages} connections with {self.peer} in a row brought nothing but damage, the last one this: {error}. "
            f"Look at the network between the two, and at whether both run the same version"
        )

    def _handle_frames(self, registration: Registration | None, exposed: bool = True) -> None:
        """Deal with what is in the inbox, in the order of arrival. Holds `_sorting`. If it makes no sense, the link
        of this registration is broken: what is left comes again. `exposed`: this may be the main thread, which can
        be struck; false
        for a thread of the pool that reads.

        A message leaves the inbox after all else, so a thread that is struck leaves it there, and the pool deals with
        it once more. That does no harm: a reply finds its call taken off the list, and everything that is not a plain
        reply is left to the pool by a thread that could be struck."""
        inbox, session, pending = self._inbox, self.session, self.pending
        requests = 0
        call: Call | None = None
        try:
            while inbox:
                frame = inbox[0]
                if frame.ack > session.acked:
                    session.acknowledged(frame.ack)
                    if self._room.asleep:
                        self._tell_room()
                if frame.number == 0:
                    self._heard(frame)
                    inbox.popleft()
                    continue
                if frame.number != session.received + 1 and not session.accept(frame.number, 0):
                    inbox.popleft()  # it is here already
                    continue
                size = frame.size
                if frame.flags & SHARED and frame.buffers == ():
                    size += self._borrow(frame)
                plain = not frame.flags & AWKWARD
                if plain and frame.kind & RESPONSE:
                    call = pending.get(frame.call)
                    if call is not None:  # else it was given up: the reply is late
                        call.reply = frame
                        if pending.pop(frame.call, None) is not None:  # from here on it is ours to settle
                            if call.asynchronous or self.low_priority or self.notify_ids:
                                self._settle(call, frame)
                            elif call.signal is not None:
                                call.wake()
                        call = None
                else:
                    if exposed and frame.kind != GIVE_BACK and may_be_struck() and not self.closed:  # (if it is closed,
                        # there may be no pool)
                        self._pool.submit_final(self.go_on)
                        break
                    try:
                        if plain and frame.kind >= REQUESTS:
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
                session.received = frame.number
                session.owed_bytes += size
                inbox.popleft()
        except BaseException as error:
            if call is not None and call.id not in pending:
                self.low_priority.discard(call.id)
                self.notify_ids.discard(call.id)
                if call.asynchronous:
                    self._answered.append(call)
                else:
                    call.wake()
            if not isinstance(error, ProtocolError):
                self._pool.submit_final(self.go_on)
                raise
            self._inbox.clear()
            if registration is not None:
                self._broken(registration, self._damage(error))
            return
        if session.received - session.told >= OWED_MESSAGES or session.owed_bytes >= OWED_BYTES:  # (`owes`)
            self._pool.call_soon(self._acknowledge)
        flow_control = self.flow_control
        if requests:
            flow_control.took(requests)
        if flow_control.parked or flow_control.held:
            flow_control.go_on()  # the peer may have said that it has what was lent to it

    def _heard(self, frame: Frame) -> None:
        """A word that belongs to this connection alone."""
        self.session.expect(frame.call)
        self._damages = 0  # (what is repeated on a new link comes before any word: who hears one has that)
        if frame.kind == PING:
            self._pool.call_soon(self._pong)
        elif frame.kind == PONG:
            self.flow_control.answered()
        elif frame.kind != ACK:
            raise ProtocolError(f"a message of type {frame.kind:#x} came without a number")

    def _settle(self, call: Call, frame: Frame) -> None:
        """A call was answered, and is off the list."""
        if self.low_priority:
            self.low_priority.discard(call.id)
        if self.notify_ids:  # (after it was taken off the list: see `expect`)
            self.notify_ids.discard(call.id)
        if not call.asynchronous:
            if call.signal is not None:
                call.wake()
        elif call.future is None and not frame.flags & FAILED:
            settle((call,))  # our own business: no code of the program runs
        else:
            self._answered.append(call)

    def _handle_special(self, frame: Frame) -> int:
        """Deal with a message that is more than a plain reply. How many requests that was. Never runs twice for one
        message."""
        if frame.flags & CARGO:
            self._land(frame)
        if frame.flags & REFERENCES:
            self._arrive(frame)
        if frame.kind & RESPONSE:
            if frame.arrival is not None and frame.arrival.pending:
                call = self.pending.get(frame.call)
                if call is not None:
                    self.arriving.add(frame.call)
                    frame.arrival.when_confirmed(partial(self._settle_later, call, frame))
            elif (call := self.pending.pop(frame.call, None)) is not None:
                call.reply = frame
                self._settle(call, frame)
        elif frame.kind >= REQUESTS:
            self._requested(frame)
            return 1
        else:
            self._said(frame)
        return 0

    def go_on(self) -> None:
        """Deal with what another thread left behind. Runs on a thread of the pool."""
        with self._sorting:
            self._handle_frames(self._registration)
        self.pass_answered()

    def pass_answered(self) -> None:
        """Have the pool pass on the outcomes of asynchronous calls."""
        calls = list(self._answered)
        have_settled(self._pool, calls)
        self._have_passed(calls)

    def _have_passed(self, calls: Iterable[Call]) -> None:
        """The outcomes of these calls are seen to. They leave the queue after that, so a thread that is struck leaves
        them there, and a signal handler on top of this frame finds them. Two threads may pass on the same one: the
        second finds nothing to do (`Call.finish`)."""
        for call in calls:
            try:
                self._answered.remove(call)
            except ValueError:
                pass  # another thread was quicker

    def _borrow(self, frame: Frame) -> int:
        """Give a message the shared memory it refers to. How many bytes were lent."""
        if self.sharing is None:
            frame.buffers = None
            return 0
        try:
            return self.sharing.borrow(frame)
        except (ProtocolError, MemoryError):
            raise
        except Exception as error:
            if may_be_struck():
                raise
            self._cannot_read_part(frame, "shared memory", error)
            return 0

    def _cannot_read_part(self, frame: Frame, what: str, error: Exception) -> None:
        """A message is here, but not to be read: its call fails, and no other."""
        log.warning("what a message from %s says of %s cannot be read: %r", self.peer, what, error)
        frame.buffers = ()
        frame.filling = _Unreadable(f"what a message from {self.peer} says of its {what} makes no sense: {error!r}")

    def _land(self, frame: Frame) -> None:
        """Take note of the device memory that a message refers to. It is fetched when somebody unpacks the message."""
        if self.sharing is not None and frame.buffers is not None:
            try:
                self.sharing.handover.land(frame)
            except Exception as error:
                self._cannot_read_part(frame, "device memory", error)

    def _arrive(self, frame: Frame) -> None:
        """Have the references in a message noted. If that fails, the message is there but cannot be read: whoever waits
        for it is told so."""
        try:
            frame.arrival = self._arrived(frame)
        except Exception as error:
            self._cannot_read_part(frame, "references", error)

    def _settle_later(self, call: Call, frame: Frame) -> None:
        """The references in a reply are confirmed now: whoever waits for it may have it."""
        if self.take(call.id) is None:
            return
        call.reply = frame
        call.settle(self._pool.submit_system)
        self.look_up()

    def look_up(self) -> None:
        """A call was settled, but not by its reply: whoever waits for it may be reading the link, and sees it when
        something comes."""
        if self._reading.locked():
            self._pool.call_soon(partial(self.send_unsequenced, PING))

    def _pong(self) -> None:
        self.send_unsequenced(PONG)

    def _acknowledge(self) -> None:
        self.send_unsequenced(ACK)

    def await_reply(self, call: Call) -> None:
        """Wait until a synchronous call is settled, reading the link if no other thread does."""
        incoming = self.opposite
        if (
            not self._writing.free
            or not self._sorting.free
            or (incoming is not None and not (incoming._reading.free and incoming._writing.free and incoming._sorting.free))
        ):  # (`is_busy`)
            self.check_reentry(call)
        reading = self._reading
        while True:
            # (a thread of the pool is about to go on with what is in the inbox)
            registration = None if self._inbox else self._registration
            if registration is not None and reading.take():
                try:
                    self._read_reply(call, registration)
                finally:
                    reading.free[0] = True
                    if len(self.pending) > len(self.low_priority):
                        self._unwatched = False  # another thread waits
                    if not self._unwatched:
                        self.reconsider_reading()  # (there may be a new link, which was not armed because we had the role)
            elif registration is not None and reading.mine():  # a signal handler interrupted a frame that waits
                self._read_reply(call, registration, again=True)
            else:
                self.expect(call)
                if not call.sleep():
                    self._check_block(call)
            if call.reply is not None or call.failure is not None:
                return
            if call.deadline <= call.peer.now():
                self.forget(call)
                raise call.timed_out()

    def _read_reply(self, call: Call, registration: Registration, again: bool = False) -> None:
        """Read until a call is settled, its deadline has passed, or the link is gone. Has the role."""
        link = registration.link
        while call.id in self.pending and registration is self._registration:
            left = call.deadline - call.peer.now()
            if not link.await_bytes(left, again):
                self._check_block(call)
            if registration is not self._registration:
                break
            self._receive(registration, link.read_some)
            if self._answered:
                self.pass_answered()
            if call.reply is not None or self._inbox or left <= 0:
                break

    def _check_block(self, call: Call) -> None:
        """Nothing came for a second. Raise if this very thread keeps the answer from coming."""
        if not call.settled and call.deadline > call.peer.now() and blocks_itself():
            if not call.asynchronous:  # (else the program has a future of it, which goes on)
                self.forget(call)
            raise CallOutcomeUnknown(explain_block(call.what))

    def check_reentry(self, call: Call) -> None:
        """Raise if a frame of this very thread is in the midst of a message to or from this peer: no answer could be
        had before it goes on. Happens to signal handlers and destructors, within a few microseconds."""
        incoming = self.opposite
        if self.in_midst() or (incoming is not None and incoming.takes_in()):
            if not call.asynchronous:  # (else the program has a future of it, which goes on)
                self.forget(call)
            raise CallOutcomeUnknown(
                f"{call.what}: a signal handler or destructor called while Remora was in the midst of a message to or from "
                f"{self.peer} on the same thread, so the answer cannot be waited for there. The call is sent when it "
                f"returns. Use rpc_async there, or leave the call to another thread."
            )

    def in_midst(self) -> bool:
        """Whether a frame of this very thread is in the midst of a message to or from this peer."""
        return self._writing.mine() or self._sorting.mine()

    def is_busy(self) -> bool:
        """Whether some thread is: a quick look before `takes_in`."""
        return not (self._reading.free and self._writing.free and self._sorting.free)

    def takes_in(self) -> bool:
        """For the channel of the peer's own calls, which no thread of the program reads: the same as `in_midst`, or about
        to be. No other thread would read what the peer asks of us before it answers; and we are the peer, perhaps."""
        return self._reading.mine() or self.in_midst()

    def look_after_reader(self) -> None:
        """Called at each tick. A thread that has waited for the link since the last one may not go on, if a signal
        handler interrupted it: let the pool read, too."""
        if self._batched:
            self.flush()  # an exception may have struck the thread that was to do it
        if self._answered:
            self.pass_answered()  # likewise
        if self._inbox and not self._sorting.locked():
            self._pool.submit_final(self.go_on)  # likewise
        holder = self._reading.holder() if self.pending else None
        if holder is not None and holder is self._reader_seen and holder is not self._stalled:
            self._stalled = holder
            self.watch(again=True)
        self._reader_seen = holder

    def expect(self, call: Call) -> None:
        """Somebody wants to hear of the reply to this call, and does not read: see to it that it is noticed."""
        self.notify_ids.add(call.id)  # first: who leaves the link either sees this, or is seen by `watch`
        if call.id not in self.pending:
            self.notify_ids.discard(call.id)  # it has come
        self.watch()

    def unwatch(self) -> None:
        """A thread is going to send and read the reply itself: the poller should not wake another one for it. Undone by
        `watch` when somebody else's reply is due, and by the next tick, so that the end of an idle link is noticed."""
        registration = self._registration
        if registration is not None and not self._unwatched:
            self._unwatched = True
            self._update_interest(registration)

    def watch(self, again: bool = False) -> None:
        """Replies are due that no thread waits for. `again`: have the poller look in any case."""
        registration = self._registration
        if self._unwatched or again:
            self._unwatched = False
            if registration is not None:
                registration.again = registration.again or again
                self._update_interest(registration)

    def _update_interest(self, registration: Registration) -> None:
        """Have the poller watch for what there is to watch for now. A thread that has read calls this when it has left,
        unless the registration is armed for reading; which it is not, from before we look whether a thread reads."""
        arming = self._arming
        # if another thread, or a frame below of this one, decides at this moment, it does so once more
        registration.unsure = True
        while registration.unsure and arming.take():
            try:
                registration.unsure = False
                self._arm(registration)
            finally:
                arming.free[0] = True

    def _arm(self, registration: Registration) -> None:
        armed, registration.armed = registration.armed, -1
        events = WRITE if registration.link.outbox_bytes else 0
        if not self._unwatched and not self.flow_control.paused and not self._is_read():
            events |= READ  # (the thread that reads arms it afterwards)
        if registration is self._registration and (events != armed or registration.again or registration.link.unread):
            registration.again = False
            if events == READ and self._poller.lasts:
                self._poller.arm_to_last(registration)
            else:
                self._poller.arm(registration, events)
        registration.armed = events

    def _is_read(self) -> bool:
        """Whether a thread reads the link, and goes on."""
        if not self._reading.locked():
            return False
        return self._stalled is None or self._reading.holder() is not self._stalled

    def _drain(self, registration: Registration) -> None:
        writing = self._writing
        if not writing.take():
            return  # its holder has an outbox, and says so when it is done
        try:
            registration.link.flush()
        except OSError as error:
            self._broken(registration, error)
        finally:
            writing.free[0] = True
        self.flush()  # what others left for us to write

    def reconsider_reading(self) -> None:
        if self._registration is not None:
            self._update_interest(self._registration)

    # Calls.

    def take(self, call_id: int) -> Call | None:
        """Take a call off the list: whoever gets it settles it."""
        call = self.pending.pop(call_id, None)
        if self.low_priority:
            self.low_priority.discard(call_id)
        if self.arriving:
            self.arriving.discard(call_id)
        if self.notify_ids:
            self.notify_ids.discard(call_id)
        return call

    def forget(self, call: Call) -> bool:
        """Nobody waits for this call any more. False if it was answered meanwhile."""
        return self.take(call.id) is not None
