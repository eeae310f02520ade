"""The sending half of a channel: numbers messages, keeps them until they arrived, and gets them to the kernel in order.

One thread at a time writes, the one that has the turn `writing`. A thread with a small message never waits for it: it
leaves the message with those that wait to be written (`batched`), and the writer writes them before it is done. (Large
ones do wait: `remora.agent.channel.bulk`.)

A message is sent when the session keeps it; what is kept and not written is written again on the next link. So an
exception that strikes a writer between the two costs the link, and nothing else (`struck`). """

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from remora.agent.calls.call import Call
from remora.agent.channel.flow_control import FlowControl
from remora.agent.memory.shared import PeerSharedMemory, lent_bytes
from remora.agent.runtime.try_lock import TryLock, Waiters
from remora.errors import CallNotSent
from remora.long_wait import LongWait
from remora.protocol.reader import Reader
from remora.protocol.session import Session
from remora.transport.link import Part, StreamLink, is_of_socket
from remora.vocabulary.messages import MessageType
from remora.wire import raw_memory
from remora.wire.frames import HEADER, SHARED, encode
from remora.wire.packed import Packed

GIVE_BACK = int(MessageType.GIVE_BACK)
BURST_GAP = 100e-6  # asynchronous calls closer together than this are written together
BURST = 200e-6  # … and, on a waiter-owned channel, by the thread that makes them: so long after the first of them
NO_TIME = 200e-6  # what follows a message within this time could have shared its write
BATCH_LIMIT = 1 << 17
STALL = 0.25  # how long a large message may make no progress before the rest of it is copied aside


class Large(NamedTuple):
    """A large message, to be said again after a reconnect: it lies in memory that the program may have changed
    since."""

    call: int
    parts: Sequence[Part]
    packed: Packed
    fingerprint: raw_memory.Fingerprint

    def intact(self) -> bool:
        return raw_memory.unchanged(self.packed, self.fingerprint)


# What a session keeps of a message: most are one piece of bytes, which the garbage collector ignores.
Kept = bytes | Large
# Type, flags, call, timeout, number of buffers, length of the body, body and buffers.
Batched = tuple[int, int, int, float, int, int, bytes]


class OutboxEvents(Protocol):
    """The owner of an outbox, which is told what happens. All of it may be told on any thread, by one that has the turn
    `writing`."""

    def want_link(self) -> None: ...  # there is something to say, and no link
    def want_flush(self) -> None: ...  # a thread is to call `flush` soon
    def reconsider_reading(self) -> None: ...  # the kernel did not take everything: the rest is written when there is room
    def link_failed(self, link: StreamLink, error: BaseException) -> None: ...  # writing failed


class Outbox:
    """Numbers, keeps and writes the small messages of a session, over one link after the other."""

    __slots__ = (
        "_events", "_flush_due", "_followed", "_held_since", "_last_send", "_lent_at", "_low_priority_at", "batched",
        "batched_bytes", "closed", "control_frames", "flow_control", "link", "peer", "reader", "room", "session",
        "shared_memory", "writing",
    )  # fmt: skip

    def __init__(
        self,
        peer: str,
        session: Session[Kept],
        reader: Reader,
        flow_control: FlowControl,
        events: OutboxEvents,
        shared_memory: PeerSharedMemory | None = None,
    ) -> None:
        self.peer = peer
        self.session = session
        self.reader = reader  # while waiters own the channel, they flush: threads come by all the time
        # What carries the session now. Assigned under `writing` when a link comes, without it when one breaks: a writer
        # takes it once, and `link.failed` tells it of the rest.
        self.link: StreamLink | None = None
        self.shared_memory = shared_memory  # memory that the peer and we share
        self.flow_control = flow_control  # of the requests that come in: it goes on when something was written
        self.closed = False  # nothing more is sent
        self.writing = TryLock()  # to number messages and write them
        # Any thread appends; the one that has the turn `writing` takes from the left.
        self.batched: deque[Batched] = deque()
        self.control_frames: deque[int] = deque()  # types of frames without number, for this link alone
        self.batched_bytes = 0  # about: two threads may count at the same time
        self.room = Waiters()  # threads that wait for the peer to take something
        self._events = events
        # Under `writing`.
        self._lent_at = 0  # the number of the last message with shared memory
        # By any thread, without a lock. They say when messages share a write: a stale one costs a write or a short delay.
        self._flush_due = False  # a thread was asked to flush and has not begun; it clears this before it looks
        self._last_send = 0.0
        self._held_since = 0.0  # when the first of those that wait to share a write came
        self._low_priority_at = 0.0  # when a message was sent that no thread waits for, if it was the last
        self._followed = False  # the last time another one came soon after

    # Small messages.

    def send(self, kind: int, call: int, body: bytes, flags: int = 0, timeout: float = 0.0) -> None:
        """Number a message and hand it to the kernel; without a link it is kept until there is one. Does not block."""
        if self.closed:
            return
        memory = self.shared_memory
        others = self.batched or self.control_frames or self._low_priority_at or (memory is not None and memory.unused)
        writing, session = self.writing, self.session
        if others or not writing.take():
            self.batched.append((kind, flags, call, timeout, 0, len(body), body))
            self.flush()
            return
        try:  # what `write_batched` does, for a message that is alone, as most are
            number, ack = session.sent + 1, session.received
            data = encode(kind, flags, 0, call, number, ack, timeout, len(body), body)
            size = len(data)
            if flags & SHARED:
                size += lent_bytes(body)
                self._lent_at = number
            session.keep(number, ack, size, data)
            link = self.link
            if link is not None and not link.failed and not link.write((data,), 0.0, 0.0):  # (`put`)
                self._events.reconsider_reading()
        except BaseException as error:
            session.recover()
            self.struck(self.link, error)
        finally:
            writing.free[0] = True
        if writing.waiters.asleep:
            writing.waiters.notify()
        flow_control = self.flow_control
        if self.batched or self.control_frames or self.link is None or flow_control.parked or flow_control.held:
            self.flush()

    def has_sent(self, call: int, before: int) -> bool:
        """Return True if the message of a call was sent, or will be. `before`: how many messages had been sent before
        it was tried."""
        if any(entry[2] == call for entry in list(self.batched)):
            return True
        kept = list(self.session.kept)
        if any((each.call if isinstance(each, Large) else HEADER.unpack_from(each)[5]) == call for _, _, each in kept):
            return True
        return self.session.acked > before  # it may have arrived

    def enqueue(self, kind: int, call: int, body: bytes, flags: int = 0) -> None:
        """Leave a message to be written with the next one. A caller that needs it to arrive calls `flush` soon, in any
        case."""
        if self.closed:
            return
        self.batched.append((kind, flags, call, 0.0, 0, len(body), body))

    def send_batched(self, kind: int, call: int, body: bytes, flags: int = 0, timeout: float = 0.0) -> None:
        """Like `send`, but messages in quick succession share one write, done by the pool (or by the next `send`)."""
        if self.closed:
            return
        now = time.monotonic()
        burst = now - self._last_send < BURST_GAP
        self._last_send = now
        if not self.batched:
            if not burst:
                self.send(kind, call, body, flags, timeout)
                return
            self._held_since = now
        self.batched.append((kind, flags, call, timeout, 0, len(body), body))
        if not burst or (self.reader.waiter_owned and now - self._held_since > BURST):
            self.flush()
            return
        self.batched_bytes += len(body)
        if self.batched_bytes > BATCH_LIMIT:
            self.flush()
        elif not self._flush_due and not self.reader.waiter_owned:
            self._flush_due = True
            self._events.want_flush()

    def send_low_priority(self, kind: int, call: int, body: bytes, flags: int = 0, timeout: float = 0.0) -> bool:
        """Like `send`, for what no thread waits for, yet. If the last such message was followed by another one in no time
        (as `remote` is by `to_here`), this one is held back to share a write with the next, and the peer is woken once.
        True if it is: its sender has `flush` called soon, in any case."""
        if self.closed:
            return False
        held = self._followed and self.batched_bytes < BATCH_LIMIT and self.link is not None
        if held:
            self.batched.append((kind, flags, call, timeout, 0, len(body), body))
            self.batched_bytes += len(body)
        else:
            self.send(kind, call, body, flags, timeout)
        self._low_priority_at = time.monotonic()
        return held

    def flush(self) -> None:
        """Write what waits; if another thread is writing, it does it."""
        self._flush_due = False
        writing = self.writing
        while (self.batched or self.control_frames) and not self.closed and writing.take():
            try:
                self.write_batched()
            finally:
                writing.free[0] = True
            if writing.waiters.asleep:
                writing.waiters.notify()
        if self.link is None:
            self._events.want_link()
        flow_control = self.flow_control
        if flow_control.parked or flow_control.held:
            flow_control.go_on()

    def unsent_bytes(self) -> int:
        """Return the number of bytes that wait to be written; without a link, or in shared memory, to be heard."""
        link = self.link
        if self._lent_at > self.session.acked and link is not None:
            return self.batched_bytes + link.outbox_bytes + self._lent_bytes()
        return self.batched_bytes + (self.session.kept_bytes if link is None else link.outbox_bytes)

    def _lent_bytes(self) -> int:
        """Return the bytes we have lent with messages that the peer has not read: what they count for beyond their own
        bytes."""
        before = self.session.acked_bytes
        lent = 0
        for _, total, message in list(self.session.kept):
            if isinstance(message, bytes):
                lent += total - before - len(message)
            before = total
        return lent

    def write_batched(self) -> None:
        batched, session = self.batched, self.session
        if self._low_priority_at:
            self._followed = time.monotonic() - self._low_priority_at < NO_TIME
            self._low_priority_at = 0.0
        if self.shared_memory is not None and self.shared_memory.unused:
            self.shared_memory.give_back(self._write_returns_first)
        batch: list[bytes] = []
        size = 0
        try:
            while self.control_frames:
                batch.append(encode(self.control_frames.popleft(), 0, 0, session.sent, 0, session.telling(), 0.0, 0, b""))
            while batched and size < BATCH_LIMIT:
                kind, flags, call, timeout, count, length, rest = batched[0]
                number, ack = session.sent + 1, session.received
                data = encode(kind, flags, count, call, number, ack, timeout, length, rest)
                kept = len(data)
                if flags & SHARED:
                    kept += lent_bytes(rest)
                    self._lent_at = number
                session.keep(number, ack, kept, data)
                if batched:  # (else the channel was closed meanwhile, by another thread or a handler on top of this frame)
                    batched.popleft()  # after it is kept: a message that a struck writer leaves is in one of the two
                batch.append(data)
                size += len(data)
            self.batched_bytes = max(self.batched_bytes - size, 0) if batched else 0
            if batch:  # (a large one among them is not copied again)
                self.put(batch if len(batch) == 1 or size > 2 * BATCH_LIMIT else (b"".join(batch),))
        except BaseException as error:
            if session.recover() and batched:
                batched.popleft()
            self.struck(self.link, error)

    def _write_returns_first(self, body: bytes) -> None:
        """(Holds `writing`, as what takes from the left does.)"""
        self.batched.appendleft((GIVE_BACK, 0, 0, 0.0, 0, len(body), body))  # first: the next call may need it

    def give_back(self) -> None:
        """Have shared memory that is not used any more go back to its owner, if it has not gone along with
        something."""
        if self.shared_memory is not None and self.shared_memory.unused and not self.closed:
            self.shared_memory.give_back(partial(self.enqueue, GIVE_BACK, 0))
            self.flush()

    def send_unsequenced(self, kind: int) -> None:
        """Send a control frame, which belongs to this connection alone: it is not numbered or repeated. Does not block."""
        if kind not in self.control_frames:
            self.control_frames.append(kind)
        self.flush()

    # To the kernel.

    def put(self, parts: Sequence[Part], until: float = 0.0) -> None:
        """Write, or leave to the outbox what the kernel does not take. Holds `writing`."""
        link = self.link
        if link is not None and not link.failed and not link.write(parts, STALL, until):
            self._events.reconsider_reading()

    def struck(self, link: StreamLink | None, error: BaseException) -> None:
        """An exception struck in the midst of a write. Half a frame may be on the link, or less than the session says,
        so the link is of no use: the session says it again on another one. Raises the error unless it is of the link
        itself."""
        if not is_of_socket(error):
            self.break_off(link, error)
            self._events.want_flush()  # what other threads left to us
            try:
                raise error
            finally:
                del error  # its traceback has this frame: what the program had in hand would wait for the collector
        if link is not None:
            link.failed = True
            self._events.link_failed(link, error)

    def break_off(self, link: StreamLink | None, error: BaseException) -> None:
        """Write nothing more to a link, which may be quite well, and make sure that the thread that reads it
        notices."""
        if link is not None and not link.failed:
            link.failed = True
            link.sever()
            self._events.link_failed(link, error)

    # Back-pressure.

    def is_full(self) -> bool:
        """Return True if the peer should take something before more is sent."""
        session = self.session
        return session.kept_total - session.acked_bytes > session.limit or self.batched_bytes > session.limit

    def wait_for_room(self, call: Call) -> None:
        """Return when the peer has taken enough of what was sent. Raises CallNotSent at the deadline."""
        report = LongWait(lambda: f"{call.what} waits until {call.peer.name} has taken what was sent before", call.clock)
        if not report.block(partial(self.room.wait, lambda: self.closed or not self.is_full()), call.deadline):
            raise self.not_sent(call)

    def not_sent(self, call: Call) -> CallNotSent:
        allowed, whose = call.allowance()
        return CallNotSent(
            f"{call.what} was not sent before its deadline: {self.peer} has not taken {self.session.kept_bytes} bytes sent "
            f"before (RPC ran for more than set timeout, {allowed:g} s). {whose}".rstrip()
        )

    def clear(self) -> None:
        """Drop what is left: the channel is closed, and the peer will not hear it."""
        self.batched.clear()
        self.control_frames.clear()
        self.batched_bytes = 0
        self.session.end()
