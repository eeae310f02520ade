"""Calls in one direction between two workers: a session, the link that carries it now, and the calls that wait on it.

A worker has two channels with each peer it talks to: one it dialled, on which its requests go out and the replies come
back, and one the peer dialled, for the other direction. Because only replies come in on the first, a thread that waits
for a reply may read the link itself, which saves waking it up; it settles what belongs to waiting threads and leaves
everything that can run user code to the crew.

Two locks guard the halves, taken in this order if both: `_reading` (receiving) and `_writing` (sending). Two small ones
are taken last and held for a few instructions: `_arming` (what the poller watches) and `_room` (who waits for the peer to
take something). None is held while user code runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from remora.agent.bulk import lent_bytes
from remora.agent.calls import NEVER, Call
from remora.agent.crew import Crew
from remora.agent.injection import interposed
from remora.agent.sending import Kept, Large, Sending
from remora.errors import CallNotSent, ProtocolError
from remora.transport.poller import READ, WRITE, Poller
from remora.transport.stream import StreamLink
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire.frames import FAILED, HEADER, REFERENCES, SHARED, Damaged, Frame

log = logging.getLogger("remora")

ACK, PING, PONG = int(MessageType.ACK), int(MessageType.PING), int(MessageType.PONG)
VOID, GIVE_BACK = int(MessageType.VOID), int(MessageType.GIVE_BACK)
DAMAGE_LIMIT = 8


class LinkDamaged(OSError):
    """What came over a link is not what was sent: some of it is missing, or makes no sense."""


class Owner(Protocol):
    """Who is told what happens on a channel (`agent.peers`)."""

    def arrive(self, channel: Channel, frame: Frame) -> Any: ...
    def request(self, channel: Channel, frame: Frame) -> None: ...
    def word(self, channel: Channel, frame: Frame) -> None: ...
    def lost(self, channel: Channel, error: BaseException) -> None: ...
    def connect(self, channel: Channel) -> None: ...


class _Port:
    """A link in the poller."""

    __slots__ = ("channel", "link")

    def __init__(self, channel: Channel, link: StreamLink) -> None:
        self.channel = channel
        self.link = link

    def fileno(self) -> int:
        return self.link.fileno()

    def ready(self, writable: bool) -> None:
        self.channel.ready(self, writable)


class Channel(Sending):
    """See the head of this file."""

    def __init__(self, peer: str, session_id: str, dialled: bool, owner: Owner, crew: Crew, poller: Poller) -> None:
        super().__init__(peer)
        self.session_id = session_id
        self.dialled = dialled
        self.pending: dict[int, Call] = {}
        self.unhurried: set[int] = set()  # those of them whose replies may wait until somebody looks
        self.ever_connected = False
        self.lost_at = 0.0  # when the last link broke
        self._damages = 0  # links in a row that were of no use, since
        self._damaged_at = -1  # this many messages had arrived
        self._owner = owner
        self._crew = crew
        self._poller = poller
        self._port: _Port | None = None
        self._reading = threading.Lock()
        self._arming = threading.Lock()  # guards what is armed in the poller
        self._unwatched = False  # the poller is not to look for replies: a waiting thread reads them, or none is due

    # What the sending half needs to know.

    def _want_link(self) -> None:
        if self.dialled and not self.closed:
            self._owner.connect(self)

    def _want_flush(self) -> None:
        self._crew.serve_quickly(self.flush)

    def _has_outbox(self) -> None:
        if self._port is not None:
            self._rearm(self._port)

    def _link_failed(self, link: StreamLink, error: BaseException) -> None:
        port = self._port
        if port is not None and port.link is link:
            self._crew.serve(partial(self._last_words, port, error))

    def _last_words(self, port: _Port, error: BaseException) -> None:
        """Writing failed. What the peer said before, its replies and perhaps its goodbye, is read before the link goes."""
        with self._reading:
            replies = self._receive(port, port.link.read) if port is self._port else []
        self._broken(port, error)
        _settle(replies)

    # Receiving.

    def ready(self, port: _Port, writable: bool) -> None:
        """The poller says that the link can be read or written. Runs on a thread of the crew."""
        if port is not self._port:
            return
        if port.link.outbox_bytes:
            self._drain(port)
        if not writable and self._reading.acquire(False):
            try:
                replies = self._receive(port, port.link.read) if port is self._port else []
            finally:
                self._reading.release()
            if self._somebody_waits():  # a thread that found us reading sleeps now: nobody else looks for its reply
                self._unwatched = False
            self._rearm(port)
            if replies:
                self._crew.serve(partial(_settle, replies))  # callbacks of the program: not while events wait
        else:
            self._rearm(port)  # a waiting thread reads, and arms for reading when it leaves

    def _receive(self, port: _Port, read: Callable[..., list[Frame]], *how: Any) -> list[Call]:
        """Read and sort what came in; the asynchronous calls that were answered. The caller holds `_reading`."""
        answered: list[Call] = []
        try:
            self._sort(read(*how), answered)
        except BaseException as error:  # whatever it is, the stream is of no use from here on: a new link begins afresh
            if isinstance(error, Damaged):
                self._salvage(error.frames, answered)
            self._broken(port, self._damage(error) if isinstance(error, ProtocolError) else error)
            if not isinstance(error, Exception):
                raise
        return answered

    def _salvage(self, frames: list[Frame], answered: list[Call]) -> None:
        """What came before the damage counts: else a link that is damaged often would never get anywhere."""
        try:
            self._sort(frames, answered)
        except ProtocolError:
            pass  # a second kind of damage, on a link that is given up anyway

    def _sort(self, frames: list[Frame], answered: list[Call]) -> None:
        session, pending = self.session, self.pending
        requests = 0
        for frame in frames:
            if frame.ack > session.acked:
                session.acknowledged(frame.ack)
                if self._room_wanted:
                    self._tell_room()
            if frame.number == 0:
                session.expect(frame.call)
                if frame.kind == PING:
                    self._crew.serve_quickly(self._pong)
                elif frame.kind == PONG:
                    self.pacing.answered()
                continue
            shared = frame.flags & SHARED
            if not session.accept(frame.number, frame.size + lent_bytes(frame.body) if shared else frame.size):
                continue
            if shared:
                self._borrow(frame)
            if frame.flags & REFERENCES:
                self._arrive(frame)
            if frame.kind & RESPONSE:
                arriving = frame.arrival is not None and frame.arrival.pending
                call = pending.get(frame.call) if arriving else self.take(frame.call)
                if call is None:
                    continue  # it was given up: the reply is late
                if arriving:
                    frame.arrival.when_confirmed(partial(self._settle_later, call, frame))
                    continue
                call.reply = frame
                if not call.asynchronous:
                    call.wake()
                elif call.future is None and not frame.flags & FAILED:
                    _settle((call,))  # our own business: no code of the program runs
                else:
                    answered.append(call)
            elif frame.kind >= 0x100:
                requests += 1
                self._owner.request(self, frame)
            else:
                self._owner.word(self, frame)
        if session.owes:
            self._crew.serve_quickly(self._acknowledge)
        if requests:
            self.pacing.took(requests)

    def _borrow(self, frame: Frame) -> None:
        """Give a message the shared memory it refers to. If we cannot have it, its sender should not try again."""
        if self.sharing is None or not self.sharing.borrow(frame):
            frame.buffers = None
            self._crew.serve_quickly(partial(self.send, GIVE_BACK, 0, b""))

    def _arrive(self, frame: Frame) -> None:
        """Have the references in a message noted. If that fails, the message is there but cannot be read: whoever waits
        for it is told so."""
        try:
            frame.arrival = self._owner.arrive(self, frame)
        except Exception:
            log.exception("the references in a message from %s cannot be read", self.peer)
            frame.buffers = None

    def _settle_later(self, call: Call, frame: Frame) -> None:
        """The references in a reply are confirmed now: whoever waits for it may have it."""
        if self.take(call.id) is None:
            return
        call.reply = frame
        call.settle(self._crew.serve)
        if not call.asynchronous:
            self._crew.serve_quickly(
                partial(self.say, PING)
            )  # its thread may be reading the link: the answer lets it look up

    def _pong(self) -> None:
        self.say(PONG)

    def _acknowledge(self) -> None:
        self.say(ACK)

    def await_reply(self, call: Call) -> None:
        """Wait until a synchronous call is settled, reading the link if nobody else does."""
        while True:
            port = self._port
            if port is not None and self._reading.acquire(False):
                try:
                    answered = self._read_until_settled(port, call)
                finally:
                    self._reading.release()
                    if self._somebody_waits():
                        self._unwatched = False
                    if not self._unwatched:
                        self._rearm(port)
                if answered:
                    self._crew.serve(lambda calls=answered: _settle(calls))  # type: ignore[misc]
            else:
                call.sleep(call.remaining())
            if call.settled:
                return
            if call.deadline != NEVER and time.monotonic() >= call.deadline:
                self.forget(call)
                raise call.timed_out()

    def _read_until_settled(self, port: _Port, call: Call) -> list[Call]:
        answered: list[Call] = []
        link = port.link
        while not call.settled and port is self._port:
            left = call.remaining()
            answered += self._receive(port, link.read_waiting, left)
            if answered or (left is not None and left <= 0):
                break  # calls of others were answered: let the crew have them now
        return answered

    def unwatch(self) -> None:
        """A thread is going to send and read the reply itself: the poller should not wake another one for it. Undone by
        `watch` when somebody else's reply is due, and by the next tick, so that the end of an idle link is noticed."""
        port = self._port
        if port is not None and not self._unwatched:
            self._unwatched = True
            self._rearm(port)

    def watch(self, again: bool = False) -> None:
        """Replies are due that no thread waits for. `again`: have the poller look in any case."""
        port = self._port
        if self._unwatched or again:
            self._unwatched = False
            if port is not None:
                self._rearm(port)

    def _rearm(self, port: _Port) -> None:
        with self._arming:
            events = WRITE if port.link.outbox_bytes else 0
            if not self._unwatched and not self.pacing.paused and not self._reading.locked():
                events |= READ  # (whoever reads arms it afterwards)
            if port is self._port:
                self._poller.arm(port, events)

    def _drain(self, port: _Port) -> None:
        with self._writing:
            try:
                port.link.flush()
            except OSError as error:
                self._broken(port, error)
        self.flush()  # what others left for us to write

    def reconsider_reading(self) -> None:
        if self._port is not None:
            self._rearm(self._port)

    @property
    def paused(self) -> bool:
        """Whether we do not read from this peer for now: what it says meanwhile is not heard."""
        return self.pacing.paused

    # Calls.

    def take(self, call_id: int) -> Call | None:
        """Take a call off the list: whoever gets it settles it."""
        if self.unhurried:
            self.unhurried.discard(call_id)
        return self.pending.pop(call_id, None)

    def _somebody_waits(self) -> bool:
        return len(self.pending) > len(self.unhurried)

    def forget(self, call: Call) -> bool:
        """Nobody waits for this call any more. False if it was answered meanwhile."""
        return self.take(call.id) is not None

    def fail_pending(self, make_error: Callable[[Call], BaseException]) -> None:
        """Settle every call that waits on this channel with an error of its own."""
        while self.pending:
            try:
                _, call = self.pending.popitem()
            except KeyError:
                break
            self.unhurried.discard(call.id)
            call.fail(make_error(call))
            call.settle(self._crew.serve)

    # Links come and go.

    def attach(self, link: StreamLink, arrived: int, leftover: bytes = b"") -> None:
        """Carry on over a new link; the peer has `arrived` of our messages."""
        voided: list[int] = []
        with self._reading:
            if self.closed:
                link.close()
                return
            with self._writing:
                self._retire(self._port)
                again = self.session.resume(arrived)
                link = interposed(self._crew, self.peer, link, leftover)
                self._port = port = _Port(self, link)
                self.link = link
                self._unwatched = False
                self.ever_connected = True
                self._poller.add(port)
                self._repeat(again, voided)
            if self.closed:  # nobody wants it any more
                self._retire(port)
                return
            replies = self._receive(port, link.feed, leftover)  # before anybody reads on
        for call_id in voided:
            self._void(call_id)
        self._rearm(port)
        if replies:
            self._crew.serve(partial(_settle, replies))
        self.flush()
        self.pacing.connected_again()

    def _repeat(self, again: list[tuple[int, Kept]], voided: list[int]) -> None:
        """Say again what the peer does not have; what cannot be repeated faithfully is void. Holds `_writing`."""
        for number, kept in again:
            if isinstance(kept, Large) and not kept.intact():
                voided.append(kept.call)
                kept = HEADER.pack(0, VOID, 0, 0, kept.call, number, 0, 0.0)
            self._put((kept,) if isinstance(kept, bytes) else kept.parts)

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
        call.settle(self._crew.serve)

    def _broken(self, port: _Port, error: BaseException) -> None:
        if port is not self._port:
            return
        self._port = self.link = None
        self.lost_at = time.monotonic()
        self._discard(port)
        self._crew.serve(lambda: self._owner.lost(self, error))

    def _damage(self, error: ProtocolError) -> Exception:
        """What was lost or cannot be understood is said again on a new link. Only if nothing at all gets through, time and
        again, is the peer itself at fault."""
        self._damages = self._damages + 1 if self.session.received == self._damaged_at else 1
        self._damaged_at = self.session.received
        return error if self._damages > DAMAGE_LIMIT else LinkDamaged(str(error))

    def _discard(self, port: _Port) -> None:
        self._poller.remove(port, port.link.fileno())
        port.link.sever()  # wakes whoever reads it; the descriptor is closed when both halves are free
        self._crew.serve(lambda: self._close_link(port.link))

    def _close_link(self, link: StreamLink) -> None:
        with self._reading, self._writing:
            link.close()
        self.flush()

    def _retire(self, port: _Port | None) -> None:
        if port is not None:
            self._port = self.link = None
            self._discard(port)

    def received_for_good(self) -> int:
        """The caller has a new link for this session: nothing more is read from the old one. How much arrived."""
        port = self._port
        if port is not None:
            self._port = self.link = None
            self._discard(port)
        with self._reading:
            return self.session.received

    def cut(self, error: Exception) -> None:
        """Drop the link as if it had broken (it is silent, or a fault plan says so)."""
        port = self._port
        if port is not None:
            self._broken(port, error)

    def linger(self, deadline: float) -> None:
        """Before closing: let the peer have what was written, and wait until it hangs up. To close while it still sends
        would make its kernel throw away our last words."""
        while (link := self.link) is not None and self._unwritten(link) and time.monotonic() < deadline:
            time.sleep(0.001)
        if link is not None:
            link.finish()
        while self.link is not None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _unwritten(self, link: StreamLink) -> bool:
        """Whether something is still to be written, here or by the thread that is writing now."""
        return bool(link.outbox_bytes or self._lazy or self._writing.locked())

    def close(self) -> None:
        """No more messages. Pending calls have been failed before."""
        self.closed = True
        self._retire(self._port)
        with self._reading:
            pass  # whatever came in before has been dealt with
        self._tell_room()
        self._forget_unsent()
        self.pacing.go_on()


def _settle(calls: Sequence[Call]) -> None:
    for call in calls:
        try:
            call.finish()
        except BaseException:
            log.exception("the outcome of the %s could not be passed on", call.what)
