"""Has the pool read a link when something comes, unless a thread that waits for a reply reads it.

`remora.protocol.reader` decides: this part tells it what happens and does what it asks. The role of the machine is
`Inbox.reading`. What the poller watches for is decided by one thread at a time, the one that has the turn
`Registration.arming`.
"""

from __future__ import annotations

from remora.agent.calls.call import Call
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.registration import Registration
from remora.protocol.reader import ARM_AGAIN, TO_ARM, WAKE, Effects
from remora.transport.poller import WRITE, Poller


class PoolReads:
    """Has the poller watch a channel as the machine decides, and reads when the poller tells."""

    __slots__ = ("_calls", "_flow_control", "_inbox", "_outbox", "_poller", "_reader")

    def __init__(self, inbox: Inbox, poller: Poller) -> None:
        self._inbox = inbox
        self._calls, self._outbox = inbox.calls, inbox.outbox
        self._reader, self._flow_control = inbox.outbox.reader, inbox.outbox.flow_control
        self._poller = poller

    def ready(self, registration: Registration, events: int) -> None:
        """The poller says that the link can be read or written. Runs on a thread of the pool."""
        inbox = self._inbox
        if registration is not inbox.registration:
            return
        link = registration.link
        registration.told(events, self._poller.lasts)
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
        if self._reader.was_read(registration, link.unread, link.outbox_bytes > 0, self._flow_control.paused):
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
        """Read in the stead of the thread that has the role, if that one does not go on. Return False if it does."""
        reader, inbox = self._reader, self._inbox
        holder = inbox.reading.holder()
        if registration is not inbox.registration or not reader.may_replace(holder):
            return False
        received = inbox.session.received
        inbox.receive(registration, registration.link.read, exposed=False)
        self.perform(reader.replaced(holder, inbox.session.received != received))
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
            self._inbox.broken(registration, error)
        finally:
            writing.free[0] = True
        outbox.flush()  # what others left for us to write

    def tick(self) -> None:
        """Let the pool read, too, if the thread that has the role does not go on. Called twice a second."""
        holder = self._inbox.reading.holder() if self._calls.waiting else None
        self.perform(self._reader.tick(holder))

    def expect(self, call: Call) -> None:
        """A thread wants to hear of the reply to this call, and does not read: see to it that it is noticed."""
        calls = self._calls
        calls.notify_ids.add(call.id)  # first: a thread that leaves the link either sees this, or is seen by `watch`
        if call.id not in calls.waiting:
            calls.notify_ids.discard(call.id)  # it has come
        self.watch()

    def unwatch(self) -> None:
        """A thread is going to send and read the reply itself: the poller should not wake another one for it."""
        if not self._reader.unwatched and self._inbox.registration is not None:  # (most calls find it so already)
            self.perform(self._reader.sent())

    def watch(self, again: bool = False) -> None:
        """Replies are due that no thread waits for. `again`: have the poller look in any case."""
        self.perform(self._reader.watch_again() if again else self._reader.watch())

    def reconsider(self) -> None:
        """Something changed that decides what the poller is to watch for."""
        self.perform(TO_ARM)

    def perform(self, effects: Effects) -> None:
        """Do what the machine asks: have the poller watch, or wake the thread that reads."""
        for effect in effects:
            registration = self._inbox.registration
            if effect is WAKE:
                self._inbox.look_up()
            elif registration is not None:
                if effect is ARM_AGAIN:
                    registration.again = True
                self.update(registration)

    def update(self, registration: Registration) -> None:
        """Have the poller watch for what there is to watch for now."""
        arming = registration.arming
        # If another thread, or a frame below of this one, decides at this moment, it does so once more.
        registration.unsure = True
        while registration.unsure and arming.take():
            try:
                self._arm(registration)
            finally:
                arming.free[0] = True

    def _arm(self, registration: Registration) -> None:
        inbox, link = self._inbox, registration.link
        armed = registration.decide()  # first: a thread that has read sees it, or gave the role back before the next line
        holder = inbox.reading.holder()
        has_outbox, paused = link.outbox_bytes > 0, self._flow_control.paused
        events = self._reader.wanted_events(holder, inbox.sorting.locked(), has_outbox, paused)
        if registration is inbox.registration and registration.must_ask(events, armed, link.unread):
            registration.ask(self._poller, events)
        registration.armed = events
