"""Who of the crew is at the poller, and how. Knows nothing of what the events mean.

One thread *leads*. It waits for events, and runs what came itself: so nothing is handed over, its caches are warm, and
libraries that keep helpers for each thread that ever computed (OpenMP) keep them for one. The others stand at a gate, where
the kernel does not wake them for what the leader sees anyway. The gate opens for them when the leader waits for something
remote, and when it does not get on (`agent.patrol`). If one event follows upon the other, the leader does not sleep, but
looks for the next one for a moment.

Where there is no gate (`remora.transport.gate`), all sleep at the poller, and each event wakes one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident, get_native_id

from remora.agent import patrol
from remora.agent.patrol import NEVER, NOBODY, Patrol
from remora.transport.eagerness import GLANCES, INTERRUPTION, MOMENT, MOST_RESTS, make_way
from remora.transport.gate import AT_ONCE, Gate
from remora.transport.poller import Event, Poller, Seen

SPARE = 4  # threads on watch beyond which one that comes back goes home
STREAK = 8  # events in a row, each within a moment of the last, that make it worth to look for the next
TERM = 0.05  # seconds after which one that helped goes home, and what libraries keep for it with it


class Watch(Patrol):
    """See the head of this file. `hire` starts a thread, which has been counted as being on watch."""

    def __init__(self, poller: Poller, hire: Callable[[], None], queued: Callable[[], int]) -> None:
        super().__init__(poller, queued)
        self._hire = hire
        self._stopped = False
        # Guards the next two. Nothing is called or made while it is held, so no destructor can run there and wait.
        self._lock = threading.RLock()
        self._standing = 0  # threads with nothing to do, but for the leader
        self._leader = NOBODY
        self._watchers: set[int] = set()  # threads that count as standing, and are in `wait`
        self._streak = 0  # events in a row; below zero after an interruption: so many have to come before they count
        self._deputed = 0  # things that others began since the leader did

    @property
    def standing(self) -> int:
        """How many threads have nothing to do."""
        return self._standing + self._idle

    # For threads with nothing to do.

    def enrol(self, n: int = 1) -> None:
        """One more thread is on its way here (or will not come)."""
        with self._lock:
            self._standing += n

    def events(self) -> list[Event] | None:
        """What is to be done next; None if the thread is not needed any more."""
        if self._leader == get_ident():
            return self._lead()
        if self._standing >= SPARE:
            return [] if self._queued() else None
        self.enrol()
        return self.wait(TERM)

    def wait(self, term: float = -1.0) -> list[Event] | None:
        """Sleep until there is something to do. The thread has been counted."""
        gate = self._gate
        if self._leader == NOBODY and gate is not None and self._take_over(NOBODY):
            self.enrol(-1)
            return self._lead()
        me = get_ident()
        self._watchers.add(me)
        events = self._poller.wait() if gate is None else self._stand_by(gate, term)
        self._watchers.discard(me)
        if events is None and self._standing <= 1:
            self._hire()  # in its place
        else:
            self.enrol(-1)
        return events

    # The leader.

    def _lead(self) -> list[Event]:
        clock = time.monotonic
        self._idle = True
        begun = clock()
        if self._open and begun > self._open_until:
            self._shut()
        self._running = self._waiting = self._wrapping_up = False
        self._deputed = 0
        seen = self._look(begun + MOMENT) if self._streak >= STREAK else None
        if seen:
            events = self._poller.fired(seen)
            now = clock()
        else:
            events = self._poller.wait()
            now = clock()
            self._streak = self._streak + 1 if now - begun < MOMENT else min(self._streak, 0)
        self._began = now
        self._long_at = now + patrol.LONG
        self._steps += 1
        self._idle = False
        if not self._set:
            self._set_alarm()
        return events

    def _look(self, end: float) -> Seen | None:
        """What comes within a moment. If somebody else had the processor for long, nobody looks for a while."""
        look, clock = self._poller.glance, time.monotonic
        before = clock()
        while True:
            for _ in GLANCES:
                if seen := look():
                    if clock() - before > INTERRUPTION:
                        self._streak = -MOST_RESTS
                    return seen
            now = clock()
            if now - before > INTERRUPTION:
                self._streak = -MOST_RESTS
            if now > end:
                return None
            before = now
            make_way()

    def _take_over(self, leader: int) -> bool:
        me, native = get_ident(), get_native_id()
        with self._lock:
            if self._leader != leader:
                return False
            self._leader = me
            self._native = native
        self._begin()
        self._running, self._waiting = leader != NOBODY, False
        self._streak = self._deputed = 0
        self._shut()
        if leader != NOBODY:  # it is busy, and has to be looked after like any other
            self._set_alarm()
        return True

    # The others.

    def _stand_by(self, gate: Gate, term: float) -> list[Event] | None:
        clock = time.monotonic
        end = clock() + term
        deferred = False
        while not self._stopped:
            if self._open and not deferred:
                gate.open()  # (which lets one pass)
            may_pass, alarm = gate.wait(-1.0 if term < 0 else max(end - clock(), 0.0))
            deferred = False
            if alarm and self._patrol(gate):
                return []
            if may_pass and self._open:
                if self._may_help():
                    seen = self._poller.glance()
                    if seen:
                        gate.open()  # for the next one: to read this may take a while
                        return self._poller.fired(seen)
                else:
                    deferred = True
                    self._look_again_soon()
            if term > 0 and clock() > end:
                if self._open:
                    gate.open()  # this thread may have used the last opening up
                return None
        return []

    # For threads that are busy.

    def keep(self) -> None:
        """See to it that somebody is on watch."""
        if self._standing < 1:
            self.enrol()
            self._hire()

    def step(self) -> None:
        """The current thread is about to run something that may block: what else is queued should not wait for it long."""
        if self._standing < 1:
            self.keep()
        leader = self._leader
        if leader == get_ident():
            before = self._began if self._running else NEVER
            self._running = True
            self._steps += 1  # (`_begin`)
            self._wrapping_up = False
            self._began = now = time.monotonic()
            self._long_at = now + patrol.LONG
            if now > self._renew_at and self._set:
                self._renew_alarm()
            took = now - before
            if took > patrol.MEDIUM and self._queued():  # what comes next may take as long as what came before
                if took > patrol.LONG:
                    self.summon()
                elif self._pace > 1 and not self._summoned:
                    self._pace = 1
                    self._set_alarm()
            return
        self._deputed += 1
        away = self._deputed > STREAK  # the leader, all the time: let another one lead
        if self._open and not (away and self._take_over(leader)):
            assert self._gate is not None
            self._gate.open()
        if self._queued():
            self.summon()

    def nearly_done(self) -> None:
        """What the current thread has left to do takes no time."""
        if self._leader == get_ident():
            self._steps += 1
            self._wrapping_up = True
            self._long_at = time.monotonic() + patrol.WRAP_UP

    def block(self) -> None:
        """The current thread is about to wait. If it leads, others are to do what comes."""
        if self._leader == get_ident() and self._gate is not None:
            self._waiting = True
            if self._idle:  # a destructor waits, which the collector runs between two lines of `_lead`
                self._idle = False  # else the others would leave to us what comes
                self.summon()  # what we were woken for may be in our hands
            if not self._open:
                self._open = True
                self._gate.open()
        if get_ident() in self._watchers:  # the same in `wait`: this thread counts as standing, and does not watch
            self.enrol()
            self._hire()
            self.summon()
        self.keep()

    def wake(self) -> None:
        """Have a thread see that there is something to do."""
        if self._running and self._leader != get_ident():
            self.summon()
        else:
            self._poller.wake()

    def leave(self) -> None:
        """The current thread goes home, or has failed. If it led, another one is to do so."""
        if self._leader == get_ident():
            self._idle = False
            self._leader = NOBODY
            self.keep()
            self.summon()

    def stop(self) -> None:
        """Let everybody come back."""
        self._stopped = True
        self._poller.wake()
        if self._gate is not None:
            self._gate.alarm(AT_ONCE)
