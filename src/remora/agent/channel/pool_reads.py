"""Has the pool read a link when something comes, unless a thread that waits for a reply reads it.

A thread that reads has the role `Inbox.reading`, and the poller looks away meanwhile. When it leaves, it has the poller
look again, if a reply is due that no thread comes to read. If the holder of the role does not go on (a signal handler on top
of it takes long), the tick lets the pool read in its stead.

What the poller watches for is decided by one thread at a time, the one that has the turn
`Registration.arming`. Each side first says what
it does and then looks at what the other side said: the deciding thread makes the registration UNDECIDED before it looks
whether a thread reads; a thread that read gives the role back before it looks whether the registration is armed.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.agent.calls.call import Call
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.outbox import Outbox
from remora.agent.channel.pending_calls import PendingCalls
from remora.agent.channel.registration import Registration
from remora.transport.poller import READ, WRITE, Poller


class PoolReads:
    """Decides what the poller watches for on a channel, and reads when the poller tells."""

    __slots__ = (
        "_broken", "_calls", "_flow_control", "_inbox", "_low_priority", "_outbox", "_pending", "_poller", "_seen",
        "_stalled", "_woken", "unwatched",
    )  # fmt: skip

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox,
        calls: PendingCalls,
        poller: Poller,
        broken: Callable[[Registration, BaseException], None],
    ) -> None:
        # The poller is not to look for replies: a waiting thread reads them, or none is due. Written by any thread.
        self.unwatched = False
        self._inbox = inbox
        self._outbox = outbox
        self._calls = calls
        self._pending, self._low_priority = calls.waiting, calls.low_priority
        self._flow_control = outbox.flow_control
        self._poller = poller
        self._broken = broken
        self._seen: int | None = None  # which turn of `reading` the last tick saw (written by the tick alone)
        self._stalled: int | None = None  # … and the one before: the pool may read in its stead
        self._woken: int | None = None  # … and was told that the pool did (written by pool threads)

    def ready(self, registration: Registration, events: int) -> None:
        """The poller says that the link can be read or written. Runs on a thread of the pool."""
        inbox = self._inbox
        if registration is not inbox.registration:
            return
        link = registration.link
        if events != READ or registration.armed != READ or not self._poller.lasts:
            registration.again = True
        if link.outbox_bytes:
            self._drain(registration)
        if events == WRITE:
            self.update(registration)
            return
        reading = inbox.reading
        if reading.take() or self._take_turn(registration):
            try:
                if registration is inbox.registration:
                    inbox.receive(registration, link.read, exposed=False)
            finally:
                reading.free[0] = True
        elif not self._read_instead(registration):
            self.update(registration)
            return
        if len(self._pending) > len(self._low_priority):
            self.unwatched = False  # a thread that found us reading sleeps now: no other thread looks for its reply
        to_arm = registration.armed != READ or registration.again or self.unwatched
        if to_arm or link.unread or link.outbox_bytes or self._flow_control.paused:
            self.update(registration)
        if inbox.answered:
            inbox.pass_answered()  # callbacks of the program: not while events wait

    def _take_turn(self, registration: Registration) -> bool:
        """Have the role, unless another thread has: then that one knows, before it goes, that something came."""
        reading = self._inbox.reading
        while not reading.take():
            registration.again = True
            if reading.locked():
                return False
        return True

    def _read_instead(self, registration: Registration) -> bool:
        """Another thread has the role. If it does not go on, read what is there in its stead. If a message came, the
        other thread has to see it, once: it may only have waited for long, and then it goes on with a new turn. The poller
        looks away first: the pong that wakes that thread would be read in its stead, too."""
        inbox = self._inbox
        holder = inbox.reading.holder()
        if self._stalled is None or holder is not self._stalled or registration is not inbox.registration:
            return False
        received = inbox.session.received
        inbox.receive(registration, registration.link.read, exposed=False)
        if inbox.session.received != received and holder is not self._woken:
            self._woken = holder
            self._stalled = None
            self.update(registration)
            inbox.look_up()
        return True

    def _drain(self, registration: Registration) -> None:
        """Write what the kernel did not take before."""
        outbox = self._outbox
        writing = outbox.writing
        if not writing.take():
            return  # its holder has an outbox, and says so when it is done
        try:
            registration.link.flush()
        except OSError as error:
            self._broken(registration, error)
        finally:
            writing.free[0] = True
        outbox.flush()  # what others left for us to write

    def tick(self) -> None:
        """Twice a second. A thread that has waited for the link since the last tick may not go on, if a signal handler
        interrupted it: let the pool read, too."""
        holder = self._inbox.reading.holder() if self._pending else None  # (one that was woken since has a new turn)
        if holder is not None and holder is self._seen and holder is not self._stalled:
            self._stalled = holder
            self.watch(again=True)
        self._seen = holder

    def expect(self, call: Call) -> None:
        """A thread wants to hear of the reply to this call, and does not read: see to it that it is noticed."""
        calls = self._calls
        calls.notify_ids.add(call.id)  # first: a thread that leaves the link either sees this, or is seen by `watch`
        if call.id not in calls.waiting:
            calls.notify_ids.discard(call.id)  # it has come
        self.watch()

    def unwatch(self) -> None:
        """A thread is going to send and read the reply itself: the poller should not wake another one for it. Undone by
        `watch` when another reply is due, and by the next tick, so that the end of an idle link is noticed."""
        registration = self._inbox.registration
        if registration is not None and not self.unwatched:
            self.unwatched = True
            self.update(registration)

    def watch(self, again: bool = False) -> None:
        """Replies are due that no thread waits for. `again`: have the poller look in any case."""
        registration = self._inbox.registration
        if self.unwatched or again:
            self.unwatched = False
            if registration is not None:
                registration.again = registration.again or again
                self.update(registration)

    def reconsider(self) -> None:
        """Something changed that decides what the poller is to watch for."""
        registration = self._inbox.registration
        if registration is not None:
            self.update(registration)

    def update(self, registration: Registration) -> None:
        """Have the poller watch for what there is to watch for now. A thread that has read calls this when it has left,
        unless the registration is armed for reading; which it is not, from before we look whether a thread reads."""
        arming = registration.arming
        # if another thread, or a frame below of this one, decides at this moment, it does so once more
        registration.unsure = True
        while registration.unsure and arming.take():
            try:
                registration.unsure = False
                self._arm(registration)
            finally:
                arming.free[0] = True

    def _arm(self, registration: Registration) -> None:
        armed = registration.decide()
        events = WRITE if registration.link.outbox_bytes else 0
        if not self.unwatched and not self._flow_control.paused and not self._is_read():
            events |= READ  # (the thread that reads arms it afterwards)
        if registration is self._inbox.registration:
            registration.ask(self._poller, events, armed)
        registration.armed = events

    def _is_read(self) -> bool:
        """Whether a thread reads the link, and goes on."""
        inbox = self._inbox
        if not inbox.reading.locked():
            return False
        if self._stalled is None or inbox.reading.holder() is not self._stalled:
            return True
        return inbox.sorting.locked()  # no other thread could read, and would be told of the same bytes for ever
