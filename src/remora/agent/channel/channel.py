"""Calls in one direction between two workers: a session, the link that carries it now, and the calls that wait on it.

A worker has two channels with each peer it talks to: one it dialled, on which its requests go out and the replies come
back, and one the peer dialled, for the other direction. Because only replies come in on the first, a thread that waits
for a reply may read the link itself, which saves waking it up; it settles what belongs to waiting threads and leaves
everything that can run user code to the pool.

Two turns guard the halves, taken in this order if both: `_sorting` (receiving) and `_writing` (sending). None is held
while user code runs. No thread of the program waits for one (`remora.agent.runtime.try_lock`); the pool does, when
links come and
go. """

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from remora.agent.calls.call import Call
from remora.agent.channel.function_table import Announced, Heard
from remora.agent.channel.inbox import Registration
from remora.agent.channel.outbox import Kept, Large
from remora.agent.channel.waiter_reads import WaiterReads
from remora.agent.fault_hooks import interposed
from remora.agent.runtime.pool import WorkerPool
from remora.errors import CallNotSent
from remora.transport.link import StreamLink, process_at
from remora.transport.poller import Poller
from remora.vocabulary.messages import MessageType
from remora.wire.frames import Frame, encode

VOID = int(MessageType.VOID)
CLOSING = 1.0  # seconds for which a channel that is closed waits for a thread that sorts what came
LETTING_GO = 0.2  # seconds for which the pool waits to close a link


class Owner(Protocol):
    """Who is told what happens on a channel (`agent.peers`)."""

    def arrive(self, channel: Channel, frame: Frame) -> Any: ...
    def requests_on(self, channel: Channel) -> Callable[[Frame], None]: ...
    def word(self, channel: Channel, frame: Frame) -> None: ...
    def lost(self, channel: Channel, error: BaseException) -> None: ...
    def connect(self, channel: Channel) -> None: ...


class Channel(WaiterReads):
    """See the head of this file."""

    __slots__ = (
        "__weakref__", "_owner", "announced", "dialled", "ever_connected", "heard", "lost_at", "session_id",
    )  # fmt: skip

    def __init__(self, peer: str, session_id: str, dialled: bool, owner: Owner, pool: WorkerPool, poller: Poller) -> None:
        super().__init__(peer, pool, poller)
        self.session_id = session_id
        self.dialled = dialled
        self.ever_connected = False
        self.lost_at = 0.0  # when the last link broke
        self.announced = Announced(self)  # functions of calls that go out
        self.heard = Heard()  # and of those that come in
        self._owner = owner
        self._arrived = partial(owner.arrive, self)
        self._requested = owner.requests_on(self)
        self._said = partial(owner.word, self)

    # What the sending half needs to know.

    def _want_link(self) -> None:
        if self.dialled and not self.closed:
            self._owner.connect(self)

    def _want_flush(self) -> None:
        self._pool.call_soon(self.flush)

    def _has_outbox(self) -> None:
        if self._registration is not None:
            self._update_interest(self._registration)

    def _link_failed(self, link: StreamLink, error: BaseException) -> None:
        registration = self._registration
        if registration is not None and registration.link is link:
            self._pool.submit_system(partial(self._last_words, registration, error))

    def _last_words(self, registration: Registration, error: BaseException) -> None:
        """Writing failed. What the peer said before, its replies and perhaps its goodbye, is read before the link
        goes."""
        if registration is self._registration:
            with self._sorting:
                self._take_in(registration, registration.link.read)
        self._broken(registration, error)
        self.pass_answered()
        self.reconsider_reading()  # something may have come on a new link while we were in the way

    @property
    def paused(self) -> bool:
        """Whether we do not read from this peer for now: what it says meanwhile is not heard."""
        return self.flow_control.paused

    def fail_pending(self, make_error: Callable[[Call], BaseException], answered_too: bool = True) -> None:
        """Settle every call that waits on this channel with an error of its own. If not `answered_too`, those are left
        whose reply is here and waits only for the owners of references in it."""
        while ids := [each for each in list(self.pending) if answered_too or each not in self.arriving]:
            for call_id in ids:
                call = self.take(call_id)
                if call is not None:
                    call.fail(make_error(call))
                    call.settle(self._pool.submit_system)

    # Links come and go.

    def attach(self, link: StreamLink, arrived: int, leftover: bytes = b"") -> None:
        """Carry on over a new link; the peer has `arrived` of our messages."""
        voided: list[int] = []
        process = process_at(link.sock)
        if self.sharing is not None and process:
            self.sharing.set_process(process)
        with self._sorting:
            if self.closed:
                link.close()
                return
            with self._writing:
                self._retire(self._registration)
                again = self.session.resume(arrived)
                link = interposed(self._pool, self.peer, link, leftover)
                registration = Registration(self, link)
                # The poller knows the link before any other thread can see it: the tick may arm it from here on, and
                # arming what the poller does not know yet is lost, while `armed` says that it is done.
                self._poller.add(registration)
                self._unwatched = False
                self._registration = registration
                self.link = link
                self.ever_connected = True
                self._repeat(again, voided)
            if self.closed:  # nobody wants it any more
                self._retire(registration)
                return
            self._take_in(registration, partial(link.feed, leftover))  # before any thread reads on
        for call_id in voided:
            self._void(call_id)
        self._update_interest(registration)
        self.pass_answered()
        self.flush()
        self.flow_control.connected_again()

    def _repeat(self, again: list[tuple[int, Kept]], voided: list[int]) -> None:
        """Say again what the peer does not have; what cannot be repeated faithfully is void. Holds `_writing`."""
        for number, kept in again:
            if isinstance(kept, Large) and not kept.intact():
                voided.append(kept.call)
                kept = encode(VOID, 0, 0, kept.call, number, 0, 0.0, 0, b"")
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
        call.settle(self._pool.submit_system)

    def _broken(self, registration: Registration, error: BaseException) -> None:
        if registration is not self._registration:
            return
        self._registration = self.link = None
        self.lost_at = self._pool.clock.now()
        self._discard(registration)
        self._pool.submit_system(lambda: self._owner.lost(self, error))

    def _discard(self, registration: Registration) -> None:
        self._poller.remove(registration, registration.link.fileno())
        registration.link.sever()  # wakes whoever reads it; the descriptor is closed when both halves are free
        self._pool.submit_final(partial(self._close_link, registration.link, self._reading.holder()))

    def _close_link(self, link: StreamLink, reader: int | None) -> None:
        """Close the descriptor of a link that no thread uses. If the one that does has been interrupted by a signal
        handler, it is closed with the last reference to it. `reader`: which turn of `_reading` may be at this link. It
        has no other turn when it is about to wait there, and the number may soon be that of another file."""
        writing, sorting, reading = self._writing, self._sorting, self._reading
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
            self._registration = self.link = None
            self._discard(registration)

    def received_for_good(self) -> int:
        """The caller has a new link for this session: nothing more is read from the old one. How much arrived."""
        registration = self._registration
        if registration is not None:
            self._registration = self.link = None
            self._discard(registration)
        with self._sorting:
            return self.session.received

    def cut(self, error: Exception) -> None:
        """Drop the link as if it had broken (it is silent, or a fault plan says so)."""
        registration = self._registration
        if registration is not None:
            self._broken(registration, error)

    def unheard(self) -> int:
        """How much of what was sent the peer has not confirmed, in no particular unit: it shrinks while the peer
        reads."""
        link = self.link
        return len(self.session.kept) + len(self._batched) + (link.outbox_bytes if link is not None else 0)

    def close(self) -> None:
        """No more messages. Pending calls have been failed before."""
        self.closed = True
        self._retire(self._registration)
        sorting = self._sorting
        if sorting.wait(CLOSING):  # what came in before has been dealt with
            sorting.free[0] = True
        self.pass_answered()
        self.pass_on(at_once=True)
        self._tell_room()
        self._forget_unsent()
        self.flow_control.go_on()
