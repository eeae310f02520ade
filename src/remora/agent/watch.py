"""Who of the crew is at the poller, and how. Knows nothing of what the events mean.

One thread *leads*. It waits for events, and runs what came itself: so nothing is handed over, its caches are warm, and
libraries that keep helpers for each thread that ever computed (OpenMP) keep them for one. The others stand at a gate, where
the kernel does not wake them for what the leader sees anyway. The gate opens for them when the leader waits for something
remote; when it has been busy with one thing for a while; and when things pile up behind functions that take long. A leader
that others keep from the processor is not busy: more threads would not help it. If one event follows upon the other, the
leader does not sleep, but looks for the next one for a moment.

Where there is no gate (`remora.transport.gate`), all sleep at the poller, and each event wakes one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident, get_native_id

from remora.agent import processor
from remora.transport.eagerness import MOMENT
from remora.transport.gate import AT_ONCE, Gate
from remora.transport.poller import Event, Poller, Seen

SPARE = 4  # threads on watch beyond which one that comes back goes home
STREAK = 8  # events in a row, each within a moment of the last, that make it worth to look for the next
PATROL = 0.001  # seconds from one look after the leader to the next
RELAXED = 8  # times that, if all was well each time; or while it takes in what came: a look costs it its interpreter
FEW = 16  # steps; who takes fewer than this in the time of a patrol does long things
MEDIUM = 0.000125  # seconds for one thing, if so few are done
LONG = 0.001  # seconds that the leader must have been busy with one thing before another thread takes the next
A_WHILE = 0.00025  # … if it is behind
WRAP_UP = 0.005  # … or with the rest of it, after an answer was sent: it takes longer only if the leader lost its processor
TERM = 0.05  # seconds after which one that helped goes home, and what libraries keep for it with it
RELIEF = 0.05  # seconds for which the gate stays open after that: where it happened once, it happens again

ROBBED = 0.4  # of the time
RECENT = 4  # times PATROL
PATIENCE = 0.05  # seconds more for who was robbed, or takes in what came (which does not block): others would be in its way

NOBODY = 0
NEVER = float("inf")


class Watch:
    """See the head of this file. `hire` starts a thread, which has been counted as being on watch; `queued` says how much
    there is that could be run now.

    What the leader and the others tell each other is not locked. Each first says what it does, then looks at what the other
    one said; so whoever is the second sees it.
    """

    def __init__(self, poller: Poller, hire: Callable[[], None], queued: Callable[[], int]) -> None:
        self._poller = poller
        self._gate = poller.gate
        self._hire = hire
        self._queued = queued
        self._stopped = False
        self._lock = threading.Lock()  # guards the next two
        self._standing = 0  # threads with nothing to do, but for the leader
        self._leader = NOBODY
        self._native = 0  # what the system calls the leader
        # What the leader does.
        self._idle = False  # nothing
        self._running = False  # something that may block
        self._waiting = False  # it does
        self._wrapping_up = False  # it has sent the answer
        self._steps = 0  # things begun, or nearly done
        self._began = 0.0  # when the last one was
        self._long_at = 0.0  # when it takes long
        self._streak = 0  # events in a row
        self._deputed = 0  # things that others began since
        # The gate and its alarm.
        self._open = False
        self._open_until = 0.0  # at least
        self._set = False  # the alarm is
        self._pace = 1  # so many times PATROL
        self._then = (0, 0, False)  # when it was set: `_steps`, how many more are few, and whether the leader was behind
        self._renew_at = NEVER  # when the leader sets it again, if it does many short things
        self._robbed = (0, 0.0, 0.0)  # at the last patrol: of whom, when, and how long it had waited for a processor
        self._summoned = False  # somebody is to come and see

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
        with self._lock:
            if self._standing >= SPARE and not self._queued():
                return None
            self._standing += 1
        return self.wait(TERM)

    def wait(self, term: float = -1.0) -> list[Event] | None:
        """Sleep until there is something to do. The thread has been counted."""
        gate = self._gate
        if self._leader == NOBODY and gate is not None and self._take_over(NOBODY):
            self.enrol(-1)
            return self._lead()
        events = self._poller.wait() if gate is None else self._stand_by(gate, term)
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
            self._streak = self._streak + 1 if now - begun < MOMENT else 0
        self._began = now
        self._long_at = now + LONG
        self._steps += 1
        self._idle = False
        if not self._set:
            self._set_alarm()
        return events

    def _look(self, end: float) -> Seen | None:
        """What comes within a moment."""
        look, clock = self._poller.glance, time.monotonic
        while not (seen := look()):
            if clock() > end:
                return None
        return seen

    def _take_over(self, leader: int) -> bool:
        with self._lock:
            if self._leader != leader:
                return False
            self._leader, self._native = get_ident(), get_native_id()
        self._begin()
        self._running, self._waiting = leader != NOBODY, False
        self._streak = self._deputed = 0
        self._shut()
        if leader != NOBODY:  # it is busy, and has to be looked after like any other
            self._set_alarm()
        return True

    def _begin(self) -> None:
        self._steps += 1
        self._wrapping_up = False
        self._began = now = time.monotonic()
        self._long_at = now + LONG

    def _shut(self) -> None:
        self._open = False
        assert self._gate is not None
        self._gate.shut()

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
                    self._set_alarm(A_WHILE / PATROL)
            if term > 0 and clock() > end:
                if self._open:
                    gate.open()  # this thread may have used the last opening up
                return None
        return []

    def _may_help(self) -> bool:
        """The poller has something, and the gate was open: whether to take it, or to leave it to the leader."""
        if self._idle:
            return False
        now = time.monotonic()
        is_behind = now < self._open_until and not self._wrapping_up and now > self._began + A_WHILE
        if now < self._long_at and not is_behind:
            return self._waiting
        self._open_until = now + RELIEF
        return True

    def _patrol(self, gate: Gate) -> bool:
        """The alarm rang: look after the leader. Whether there is something to do that it does not come to do."""
        self._set = False
        summoned, self._summoned = self._summoned, False
        if self._idle:
            return summoned
        steps, few, was_behind = self._then
        done = self._steps - steps
        now = time.monotonic()
        is_long = now > self._long_at
        is_late = 0 < done < few and not self._wrapping_up and (self._queued() > 0 or gate.crowded())
        robbed = (is_long or is_late) and self._is_robbed(now)
        if is_long and now > self._long_at + (PATIENCE if robbed or not self._running else 0.0):
            self._pace = 1
            self._leave_to_others(gate, 0.0)
            return True
        behind = is_late and not robbed
        self._pace = 1 if is_long or is_late else min(2 * self._pace, RELAXED)
        self._set_alarm(self._pace if self._running else RELAXED, behind)
        if behind and was_behind:
            self._leave_to_others(gate, now + RELIEF)
            return True
        return summoned

    def _is_robbed(self, now: float) -> bool:
        """Whether others had the processor, and the leader did not, for much of the time since it was last asked; or whether
        that is not known, since that was too long ago."""
        leader, then, waited = self._robbed
        self._robbed = self._native, now, processor.waited(self._native)
        known = leader == self._native and now - then < RECENT * PATROL
        return not known or self._robbed[2] - waited > ROBBED * (now - then)

    def _leave_to_others(self, gate: Gate, until: float) -> None:
        self._open_until = max(self._open_until, until)
        self._open = True
        gate.open()
        if self._idle and not until:  # it came back meanwhile
            self._shut()

    def _renew_alarm(self) -> None:
        """Say that all is well, before somebody comes to look: that would take the interpreter from the leader. But who does
        few things in that time has to be looked after; and who is called is to come (this may have put its alarm off)."""
        steps, few, _ = self._then
        if self._steps - steps >= few // 2 and not self._summoned:
            self._pace = RELAXED
            self._set_alarm()
        else:
            self._renew_at = NEVER

    def _set_alarm(self, patrols: float = 0, behind: bool = False) -> None:
        patrols = patrols or self._pace
        seconds = patrols * PATROL
        self._set = True
        self._then = (self._steps, int(patrols * FEW), behind)
        self._renew_at = time.monotonic() + seconds / 2
        assert self._gate is not None
        self._gate.alarm(seconds)

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
            self._begin()
            if self._began > self._renew_at and self._set:
                self._renew_alarm()
            took = self._began - before
            if took > MEDIUM and self._queued():  # what comes next may take as long as what came before
                if took > LONG:
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
            self._long_at = time.monotonic() + WRAP_UP

    def block(self) -> None:
        """The current thread is about to wait. If it leads, others are to do what comes."""
        if self._leader == get_ident() and self._gate is not None:
            self._waiting = True
            if not self._open:
                self._open = True
                self._gate.open()
        self.keep()

    def wake(self) -> None:
        """Have a thread see that there is something to do."""
        if self._running and self._leader != get_ident():
            self.summon()
        else:
            self._poller.wake()

    def summon(self) -> None:
        """Have another thread than the leader see that there is something to do."""
        if self._gate is None:
            self._poller.wake()
        else:
            self._summoned = True
            self._gate.alarm(AT_ONCE)

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
