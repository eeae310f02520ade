"""Calls in one direction between two workers: a session, the link that carries it now, and the calls that wait on it.

A worker has two channels with each peer it talks to: one it dialled, on which its requests go out and the replies come
back, and one the peer dialled, for the other direction. Because only replies come in on the first, a thread that waits
for a reply may read the link itself, which saves waking it up; it settles what belongs to waiting threads and leaves
everything that can run user code to the pool.

The parts of a channel, each of which knows those above it:

    PendingCalls      calls that are not answered
    FlowControl       how much of the peer's requests is taken on
    Opener            gives a message what its body refers to: shared memory, device memory, references
    Outbox            numbers, keeps and writes messages (`remora.agent.channel.bulk`: those with buffers)
    Inbox             reads the link, and handles what came
    PoolReads         has the poller tell the pool of what comes, unless a waiting thread reads
    DeferredReplies   replies that a waiting thread met and that others wait for
    WaiterReads       lets threads that wait read the link

Two turns guard the halves, taken in this order if both: `sorting` (receiving) and `writing` (sending). None is held while
user code runs. No thread of the program waits for one (`remora.agent.runtime.try_lock`); the pool does, when links come and
go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from remora.agent.channel.bulk import send_packed
from remora.agent.channel.deferred_replies import DeferredReplies
from remora.agent.channel.flow_control import FlowControl
from remora.agent.channel.function_table import Announced, Heard
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.opener import Opener
from remora.agent.channel.outbox import Kept, Large, Outbox
from remora.agent.channel.pending_calls import PendingCalls
from remora.agent.channel.pool_reads import PoolReads
from remora.agent.channel.registration import Registration
from remora.agent.channel.waiter_reads import WaiterReads
from remora.agent.memory.shared import PeerSharedMemory
from remora.agent.runtime.pool import WorkerPool
from remora.errors import CallNotSent
from remora.faults.worker_faults import REMADE, WorkerFaults
from remora.options import FAST_PATHS
from remora.protocol.reader import USUAL, Reader
from remora.protocol.session import Session
from remora.transport.link import StreamLink, process_at
from remora.transport.poller import Poller
from remora.vocabulary.messages import MessageType
from remora.wire.enclosed import Arrival
from remora.wire.frames import Body, Frame, encode

ACK, PING, VOID = int(MessageType.ACK), int(MessageType.PING), int(MessageType.VOID)
# Of the reader: without the fast path, no thread is counted on.
THRESHOLDS = USUAL if FAST_PATHS.waiter_owned else replace(USUAL, memory=0.0)
CLOSING = 1.0  # seconds for which a channel that is closed waits for a thread that sorts what came
LETTING_GO = 0.2  # seconds for which the pool waits to close a link


class Owner(Protocol):
    """Is told what happens on a channel (`agent.peers`)."""

    @property
    def incoming(self) -> Channel | None: ...
    @property
    def faults(self) -> WorkerFaults: ...
    def arrive(self, channel: Channel, body: Body) -> tuple[Body, Arrival]: ...
    def requests_on(self, channel: Channel) -> Callable[[Frame], None]: ...
    def control_message(self, channel: Channel, frame: Frame) -> None: ...
    def lost(self, channel: Channel, error: BaseException) -> None: ...
    def connect(self, channel: Channel) -> None: ...


def _of(path: str) -> Any:
    """Return an attribute of a part that changes, as one of the channel. It is read in C: no frame, and nothing strikes in
    between."""
    return property(attrgetter(path))


class Channel:
    """Composes the parts, and changes the link."""

    __slots__ = (
        "__weakref__", "_owner", "_poller", "_pool", "announced", "attend", "calls", "deferred", "dialled", "enqueue",
        "ever_connected", "fail_pending", "flow_control", "flush", "forget", "give_back", "give_back_to_poller", "heard",
        "in_midst", "inbox", "links", "look_up", "lost_at", "low_priority", "notify", "outbox", "parked", "peer", "pending",
        "pool_reads", "read_before", "reader", "reading", "reconsider_reading", "send", "send_packed", "send_unsequenced",
        "session", "session_id", "sorting", "take", "takes_in", "unsent_bytes", "waiter_reads", "watch", "writing",
    )  # fmt: skip

    closed: bool = _of("outbox.closed")
    link: StreamLink | None = _of("outbox.link")
    paused: bool = _of("flow_control.paused")  # we do not read from this peer for now: what it says meanwhile is not heard
    waiter_owned: bool = _of("reader.waiter_owned")

    def __init__(
        self,
        peer: str,
        session_id: str,
        dialled: bool,
        owner: Owner,
        pool: WorkerPool,
        poller: Poller,
        shared_memory: PeerSharedMemory | None = None,
    ) -> None:
        self.peer = peer
        self.session_id = session_id
        self.session: Session[Kept] = Session()
        self.dialled = dialled
        # Single assignments: by the thread that brings a link, and by the one that finds it broken.
        self.ever_connected = False
        self.lost_at = 0.0  # when the last link broke
        self.links = 0  # how many there were, one after the other
        self.read_before = 0  # bytes that came on those before this one
        self._owner = owner
        self._pool = pool
        self._poller = poller
        self.reader = reader = Reader(THRESHOLDS)
        self.calls = calls = PendingCalls(reader)
        self.flow_control = FlowControl(self)  # of the requests that come in
        self.outbox = outbox = Outbox(peer, self.session, reader, self.flow_control, self, shared_memory)
        self.announced = Announced(outbox)  # functions of calls that go out
        self.heard = Heard()  # and of those that come in
        opener = Opener(peer, shared_memory, partial(owner.arrive, self))
        told = partial(owner.control_message, self)
        self.inbox = inbox = Inbox(outbox, calls, opener, pool, owner.requests_on(self), told, self._broken)
        self.pool_reads = reads = PoolReads(inbox, poller)
        self.deferred = deferred = DeferredReplies(inbox)
        self.waiter_reads = waiters = WaiterReads(inbox, reads, deferred, owner)

        # What others use of the parts. (The path of a call asks the parts themselves: the interpreter has a short cut for a
        # method of a class, and none for a callable that an attribute holds.)
        self.pending, self.low_priority = calls.waiting, calls.low_priority
        self.parked = deferred.parked
        self.reading, self.sorting, self.writing = inbox.reading, inbox.sorting, outbox.writing
        self.take, self.forget, self.fail_pending = calls.take, calls.forget, partial(calls.fail_all, pool)
        self.send, self.enqueue, self.flush = outbox.send, outbox.enqueue, outbox.flush
        self.send_packed, self.send_unsequenced = partial(send_packed, outbox), outbox.send_unsequenced
        self.unsent_bytes, self.give_back, self.look_up = outbox.unsent_bytes, outbox.give_back, inbox.look_up
        self.watch, self.reconsider_reading = reads.watch, reads.reconsider
        self.attend, self.notify, self.give_back_to_poller = waiters.attend, waiters.notify, waiters.give_back_to_poller
        self.in_midst, self.takes_in = waiters.in_midst, waiters.takes_in

    # What the outbox and flow control tell us (`OutboxEvents`, `FlowControlled`).

    def want_link(self) -> None:
        if self.dialled and not self.closed:
            self._owner.connect(self)

    def want_flush(self) -> None:
        self._pool.call_soon(self.flush)

    def link_failed(self, link: StreamLink, error: BaseException) -> None:
        registration = self.inbox.registration
        if registration is not None and registration.link is link:
            self._pool.submit_system(partial(self._last_words, registration, error))

    def ask_to_read(self) -> None:
        self.send_unsequenced(PING)

    def _last_words(self, registration: Registration, error: BaseException) -> None:
        """Writing failed. What the peer said before, its replies and perhaps its goodbye, is read before the link
        goes."""
        if registration is self.inbox.registration:
            with self.sorting:
                self.inbox.take_in(registration, registration.link.read)
        self._broken(registration, error)
        self.inbox.pass_answered()
        self.reconsider_reading()  # something may have come on a new link while we were in the way

    def look_after_reader(self) -> None:
        """Called at each tick. An exception may have struck a thread before it did what it was to do; and a thread that
        reads may not go on."""
        inbox = self.inbox
        if self.outbox.batched:
            self.flush()
        if inbox.answered:
            inbox.pass_answered()
        if inbox.frames and not inbox.sorting.locked():
            self._pool.submit_final(inbox.go_on)
        if self.session.owes:
            self.send_unsequenced(ACK)
        self.pool_reads.tick()
        self.waiter_reads.tick()

    # Links come and go.

    def attach(self, link: StreamLink, arrived: int, leftover: bytes = b"") -> None:
        """Carry on over a new link; the peer has `arrived` of our messages."""
        voided: list[int] = []
        process = process_at(link.sock)
        if self.outbox.shared_memory is not None and process:
            self.outbox.shared_memory.set_process(process)
        with self.sorting:
            if self.closed:
                link.close()
                return
            with self.writing:
                self._retire(self.inbox.registration)
                again = self.session.resume(arrived)
                faults = self._owner.faults
                injector = faults.injector
                link = faults.interpose(self.peer, link, leftover)
                registration = Registration(link, self.pool_reads.ready)
                # The poller knows the link before any other thread can see it: the tick may arm it from here on, and
                # arming what the poller does not know yet is lost, while `armed` says that it is done.
                self._poller.add(registration)
                self.reader.watch()  # (it is armed below)
                self.inbox.registration = registration
                self.outbox.link = link
                self.ever_connected = True
                self.links += 1
                try:
                    self._repeat(again, voided)
                except BaseException as error:  # the new link may break at once: that is no lack of ours
                    self.outbox.struck(link, error)
            if self.closed:  # it was closed meanwhile
                self._retire(registration)
                return
            self.inbox.take_in(registration, partial(link.feed, leftover))  # before any thread reads on
        for call_id in voided:
            self._void(call_id)
        self.pool_reads.update(registration)
        self.inbox.pass_answered()
        self.flush()
        self.flow_control.connected_again()
        if faults.injector is not injector:  # a fault plan came after we asked for it, and before it saw this link
            self.cut(ConnectionError(REMADE))

    def _repeat(self, again: list[tuple[int, Kept]], voided: list[int]) -> None:
        """Say again what the peer does not have; what cannot be repeated faithfully is void. Holds `writing`."""
        for number, kept in again:
            if isinstance(kept, Large) and not kept.intact():
                voided.append(kept.call)
                kept = encode(VOID, 0, 0, kept.call, number, 0, 0.0, 0, b"")
            self.outbox.put((kept,) if isinstance(kept, bytes) else kept.parts)

    def _void(self, call_id: int) -> None:
        """A request could not be repeated faithfully: its tensors changed since. The peer never had it."""
        call = self.take(call_id)
        if call is None:
            return
        call.fail(
            CallNotSent(
                f"{call.what}: the connection broke while the call was being sent, and its tensors were changed before it "
                f"could be sent again. It did not run."
            )
        )
        call.settle(self._pool.submit_system)

    def _broken(self, registration: Registration, error: BaseException) -> None:
        if registration is not self.inbox.registration:
            return
        self.inbox.registration = self.outbox.link = None
        self.lost_at = self._pool.clock.now()
        self._discard(registration)
        self._pool.submit_system(lambda: self._owner.lost(self, error))

    def _discard(self, registration: Registration) -> None:
        self._poller.remove(registration, registration.link.fileno())
        self.read_before += registration.link.bytes_read
        registration.link.sever()  # wakes its reader; the descriptor is closed when both halves are free
        self._pool.submit_final(partial(self._close_link, registration.link, self.reading.holder()))

    def _close_link(self, link: StreamLink, reader: int | None) -> None:
        """Close the descriptor of a link that no thread uses. If the one that does has been interrupted by a signal
        handler, it is closed with the last reference to it. `reader`: which turn of `reading` may be at this link. It
        has no other turn when it is about to wait there, and the number may soon be that of another file."""
        writing, sorting, reading = self.writing, self.sorting, self.reading
        if reader is not None and not reading.mine():
            reading.waiters.wait(lambda: reading.holder() is not reader, LETTING_GO)
        if sorting.wait(LETTING_GO):
            try:
                if writing.wait(LETTING_GO):
                    try:
                        link.close()
                    finally:
                        writing.free[0] = True
            finally:
                sorting.free[0] = True
        self.reconsider_reading()  # something may have come on the new link while we were in the way
        self.flush()

    def _retire(self, registration: Registration | None) -> None:
        if registration is not None:
            self.inbox.registration = self.outbox.link = None
            self._discard(registration)

    def bytes_received(self) -> int:
        """Return how much came on all links of this session."""
        link = self.link
        return self.read_before + (0 if link is None else link.bytes_read)

    def received_for_good(self) -> int:
        """The caller has a new link for this session: nothing more is read from the old one. How much arrived."""
        self._retire(self.inbox.registration)
        with self.sorting:
            return self.session.received

    def cut(self, error: Exception) -> None:
        """Drop the link as if it had broken (it is silent, or a fault plan says so)."""
        registration = self.inbox.registration
        if registration is not None:
            self._broken(registration, error)

    def unheard(self) -> int:
        """Return how much of what was sent the peer has not confirmed, in no particular unit: it shrinks while the peer
        reads."""
        link = self.link
        return len(self.session.kept) + len(self.outbox.batched) + (link.outbox_bytes if link is not None else 0)

    def close(self) -> None:
        """Send no more messages. Pending calls have been failed before."""
        self.outbox.closed = True
        self._retire(self.inbox.registration)
        sorting = self.sorting
        if sorting.wait(CLOSING):  # what came in before has been dealt with
            sorting.free[0] = True
        self.inbox.pass_answered()
        self.deferred.pass_on(at_once=True)
        self.outbox.room.notify()
        self.outbox.clear()
        self.flow_control.go_on()
