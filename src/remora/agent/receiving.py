"""The receiving half of a channel: sorts what comes in, and lets threads that wait for a reply read the link themselves.

One lock, `_reading`, is held by whoever reads; nobody waits for it. A thread that finds another one reading sleeps until
that one meets its reply. A small lock, `_arming`, is held while the poller is told what to watch.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from remora.agent.bulk import lent_bytes
from remora.agent.calls import NEVER, Call
from remora.agent.crew import Crew
from remora.agent.large import SendingLarge
from remora.agent.settling import have_settled, settle
from remora.errors import ProtocolError
from remora.protocol.session import OWED_BYTES, OWED_MESSAGES
from remora.transport.poller import READ, WRITE, Poller
from remora.transport.stream import StreamLink
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire.frames import CARGO, FAILED, REFERENCES, SHARED, Damaged, Frame

log = logging.getLogger("remora")

ACK, PING, PONG = int(MessageType.ACK), int(MessageType.PING), int(MessageType.PONG)
GIVE_BACK = int(MessageType.GIVE_BACK)
DAMAGE_LIMIT = 8


class LinkDamaged(OSError):
    """What came over a link is not what was sent: some of it is missing, or makes no sense."""


class Port:
    """A link in the poller."""

    __slots__ = ("again", "armed", "fileno", "link", "ready")

    def __init__(self, channel: Receiving, link: StreamLink) -> None:
        self.link = link
        self.fileno = link.fileno
        self.ready: Callable[[int], None] = partial(channel.ready, self)
        self.armed = 0  # what the poller was asked to watch for (-1: that is being decided)
        self.again = False  # it has to be asked again in any case: what it said was its last word, or nobody listened


class Receiving(SendingLarge):
    """See the head of this file."""

    __slots__ = (
        "_arming", "_arrived", "_crew", "_damaged_at", "_damages", "_poller", "_port", "_reading", "_requested",
        "_said", "_unwatched", "arriving", "expected", "pending", "unhurried",
    )  # fmt: skip

    # What to do with what comes in.
    _arrived: Callable[[Frame], Any]  # a message with references: take note of them
    _requested: Callable[[Frame], None]  # a request
    _said: Callable[[Frame], None]  # something that wants no answer

    def __init__(self, peer: str, crew: Crew, poller: Poller) -> None:
        super().__init__(peer)
        self.pending: dict[int, Call] = {}
        self.unhurried: set[int] = set()  # those of them whose replies may wait until somebody looks
        self.arriving: set[int] = set()  # … whose replies are here, but for the word of the owners of references in them
        self._crew = crew
        self._poller = poller
        self._port: Port | None = None
        self._damages = 0  # links in a row that were of no use, since
        self._damaged_at = -1  # this many messages had arrived
        self._reading = threading.Lock()
        self._arming = threading.Lock()  # guards what is armed in the poller
        self._unwatched = False  # the poller is not to look for replies: a waiting thread reads them, or none is due
        self.expected: set[int] = set()  # those whose replies are to be noticed at once, though no thread may come to read

    @abstractmethod
    def _broken(self, port: Port, error: BaseException) -> None:
        """A link is of no use any more."""

    def ready(self, port: Port, events: int) -> None:
        """The poller says that the link can be read or written. Runs on a thread of the crew."""
        if port is not self._port:
            return
        link = port.link
        if events != READ or port.armed != READ or not self._poller.lasts:
            port.again = True
        if link.outbox_bytes:
            self._drain(port)
        if events == WRITE or not (self._reading.acquire(False) or self._take_turn(port)):
            self._rearm(port)
            return
        try:
            replies = self._receive(port, link.read) if port is self._port else []
        finally:
            self._reading.release()
        if len(self.pending) > len(self.unhurried):
            self._unwatched = False  # a thread that found us reading sleeps now: nobody else looks for its reply
        if port.armed != READ or port.again or link.unread or link.outbox_bytes or self._unwatched or self.pacing.paused:
            self._rearm(port)
        if replies:
            have_settled(self._crew, replies)  # callbacks of the program: not while events wait

    def _take_turn(self, port: Port) -> bool:
        """Have `_reading`, unless somebody else has: then that one knows, before it goes, that something came."""
        while not self._reading.acquire(False):
            port.again = True
            if self._reading.locked():
                return False
        return True

    def _receive(self, port: Port, read: Callable[..., list[Frame]], *how: Any) -> list[Call]:
        """Read and sort what came in; the asynchronous calls that were answered. The caller holds `_reading`."""
        answered: list[Call] = []
        try:
            self._sort(read(*how), answered)
        except BaseException as error:  # whatever it is, the stream is of no use from here on: a new link begins afresh
            if isinstance(error, Damaged):
                self._salvage(error.frames, answered)
            self._broken(port, self._damage(error) if isinstance(error, ProtocolError) else error)
            if not isinstance(error, Exception):
                have_settled(self._crew, answered)  # they are off the list: nobody else would
                raise
        return answered

    def _salvage(self, frames: list[Frame], answered: list[Call]) -> None:
        """What came before the damage counts: else a link that is damaged often would never get anywhere."""
        try:
            self._sort(frames, answered)
        except ProtocolError:
            pass  # a second kind of damage, on a link that is given up anyway

    def _damage(self, error: ProtocolError) -> Exception:
        """What was lost or cannot be understood is said again on a new link. Only if nothing at all gets through, time and
        again, is the peer itself at fault."""
        self._damages = self._damages + 1 if self.session.received == self._damaged_at else 1
        self._damaged_at = self.session.received
        return error if self._damages > DAMAGE_LIMIT else LinkDamaged(str(error))

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
            size = frame.size + lent_bytes(frame.body) if shared else frame.size
            if frame.number == session.received + 1:  # what `accept` says of most messages
                session.received = frame.number
                session.owed_bytes += size
            elif not session.accept(frame.number, size):
                continue
            if shared:
                self._borrow(frame)
            if frame.flags & CARGO:
                self._land(frame)
            if frame.flags & REFERENCES:
                self._arrive(frame)
            if frame.kind & RESPONSE:
                arriving = frame.arrival is not None and frame.arrival.pending
                call = pending.get(frame.call) if arriving else pending.pop(frame.call, None)
                if not arriving:
                    if self.unhurried:
                        self.unhurried.discard(frame.call)
                    if self.expected:  # (after it was taken off the list: see `expect`)
                        self.expected.discard(frame.call)
                if call is None:
                    continue  # it was given up: the reply is late
                if arriving:
                    self.arriving.add(frame.call)
                    frame.arrival.when_confirmed(partial(self._settle_later, call, frame))
                    continue
                call.reply = frame
                if not call.asynchronous:
                    if call.signal is not None:
                        call.wake()
                elif call.future is None and not frame.flags & FAILED:
                    settle((call,))  # our own business: no code of the program runs
                else:
                    answered.append(call)
            elif frame.kind >= 0x100:
                requests += 1
                self._requested(frame)
            else:
                self._said(frame)
        if session.received - session.told >= OWED_MESSAGES or session.owed_bytes >= OWED_BYTES:  # (`owes`)
            self._crew.serve_quickly(self._acknowledge)
        pacing = self.pacing
        if requests:
            pacing.took(requests)
        if pacing.parked or pacing.held:
            pacing.go_on()  # the peer may have said that it has what was lent to it

    def _borrow(self, frame: Frame) -> None:
        """Give a message the shared memory it refers to. If we cannot have it, its sender should not try again."""
        if self.sharing is None or not self.sharing.borrow(frame):
            frame.buffers = None
            self._crew.serve_quickly(partial(self.send, GIVE_BACK, 0, b""))

    def _land(self, frame: Frame) -> None:
        """Take note of the device memory that a message refers to. It is fetched when somebody unpacks the message."""
        if self.sharing is not None and frame.buffers is not None:
            try:
                self.sharing.handover.land(frame)
            except Exception:
                log.exception("what a message from %s says of memory of devices cannot be read", self.peer)
                frame.buffers = None

    def _arrive(self, frame: Frame) -> None:
        """Have the references in a message noted. If that fails, the message is there but cannot be read: whoever waits
        for it is told so."""
        try:
            frame.arrival = self._arrived(frame)
        except Exception:
            log.exception("the references in a message from %s cannot be read", self.peer)
            frame.buffers = None

    def _settle_later(self, call: Call, frame: Frame) -> None:
        """The references in a reply are confirmed now: whoever waits for it may have it."""
        if self.take(call.id) is None:
            return
        call.reply = frame
        call.settle(self._crew.serve)
        self.look_up()

    def look_up(self) -> None:
        """A call was settled, but not by its reply: whoever waits for it may be reading the link, and sees it when
        something comes."""
        if self._reading.locked():
            self._crew.serve_quickly(partial(self.say, PING))

    def _pong(self) -> None:
        self.say(PONG)

    def _acknowledge(self) -> None:
        self.say(ACK)

    def await_reply(self, call: Call) -> None:
        """Wait until a synchronous call is settled, reading the link if nobody else does."""
        deadline, now = call.deadline, call.peer.now
        while True:
            port = self._port
            if port is not None and self._reading.acquire(False):
                answered: list[Call] = []  # calls of others: the crew is to have them at once
                try:
                    while call.id in self.pending and port is self._port and not answered:
                        left = None if deadline == NEVER else deadline - now()
                        answered = self._receive(port, port.link.read_waiting, left)
                        if left is not None and left <= 0:
                            break
                finally:
                    self._reading.release()
                    if len(self.pending) > len(self.unhurried):
                        self._unwatched = False  # somebody else waits
                    if not self._unwatched:
                        self._rearm(port)
                if answered:
                    have_settled(self._crew, answered)
            else:
                self.expect(call)
                call.sleep()
            if call.reply is not None or call.failure is not None:
                return
            if deadline != NEVER and deadline <= now():
                self.forget(call)
                raise call.timed_out()

    def expect(self, call: Call) -> None:
        """Somebody wants to hear of the reply to this call, and does not read: see to it that it is noticed."""
        self.expected.add(call.id)  # first: who leaves the link either sees this, or is seen by `watch`
        if call.id not in self.pending:
            self.expected.discard(call.id)  # it has come
        self.watch()

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
                port.again = port.again or again
                self._rearm(port)

    def _rearm(self, port: Port) -> None:
        """Have the poller watch for what there is to watch for now. Whoever has read calls this when it has left, unless
        the port is armed for reading; which it is not, from before we look whether somebody reads."""
        with self._arming:
            armed, port.armed = port.armed, -1
            events = WRITE if port.link.outbox_bytes else 0
            if not self._unwatched and not self.pacing.paused and not self._reading.locked():
                events |= READ  # (whoever reads arms it afterwards)
            if port is self._port and (events != armed or port.again or port.link.unread):
                port.again = False
                if events == READ and self._poller.lasts:
                    self._poller.arm_to_last(port)
                else:
                    self._poller.arm(port, events)
            port.armed = events

    def _drain(self, port: Port) -> None:
        with self._writing:
            try:
                port.link.flush()
            except OSError as error:
                self._broken(port, error)
        self.flush()  # what others left for us to write

    def reconsider_reading(self) -> None:
        if self._port is not None:
            self._rearm(self._port)

    # Calls.

    def take(self, call_id: int) -> Call | None:
        """Take a call off the list: whoever gets it settles it."""
        call = self.pending.pop(call_id, None)
        if self.unhurried:
            self.unhurried.discard(call_id)
        if self.arriving:
            self.arriving.discard(call_id)
        if self.expected:
            self.expected.discard(call_id)
        return call

    def forget(self, call: Call) -> bool:
        """Nobody waits for this call any more. False if it was answered meanwhile."""
        return self.take(call.id) is not None
