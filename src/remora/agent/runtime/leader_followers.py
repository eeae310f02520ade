"""One thread leads, the others follow: threads of a worker that wait for events. Knows nothing of what the events mean.

`remora.protocol.leader` decides, and says why. Here its decisions are carried out on a poller and its gate. Where there is
no gate (`remora.transport.gate`), no thread leads: all sleep at the poller, and each event wakes one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic

from remora.agent.runtime.watchdog import Watchdog
from remora.protocol.leader import ANSWERING, IDLE, NEVER, NONE, READING, RUNNING, TAKE_OVER, Leadership, Thresholds
from remora.transport.gate import Gate
from remora.transport.poller import Event, Poller, Seen
from remora.transport.spin import GLANCES, MOMENT, make_way

THRESHOLDS = Thresholds(spin=MOMENT)


class LeaderFollowers:
    """The threads at one poller. `start_thread` starts one, which has been counted as a follower; `queued` says how many
    tasks could be run now.
    """

    def __init__(
        self,
        poller: Poller,
        start_thread: Callable[[], None],
        queued: Callable[[], int],
        thresholds: Thresholds = THRESHOLDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.state = state = Leadership(thresholds)
        self.watchdog = Watchdog(state, poller, queued, clock)
        self.request_helper = self.watchdog.request_helper
        self._poller = poller
        self._gate = poller.gate
        self._start_thread = start_thread
        self._queued = queued
        self._clock = clock
        self._thresholds = thresholds
        self._long, self._long_answer, self._medium = thresholds.long, thresholds.long_answer, thresholds.medium
        self._stopped = False  # set once, before the threads are woken to end
        # Nothing is called or made while it is held, so no destructor can run there and wait.
        self._lock = threading.RLock()  # guards: state.thread and state.followers
        self._at_gate: set[int] = set()  # threads that count as followers, and are in `wait`; each change is one operation

    @property
    def idle(self) -> int:
        """Return the number of threads that have nothing to do."""
        return self.state.followers + (self.state.doing is IDLE)

    # Threads with nothing to do.

    def add_idle(self, n: int = 1) -> None:
        """Count one more thread on its way to the gate (or one less)."""
        with self._lock:
            self.state.followers += n

    def events(self) -> list[Event] | None:
        """Return what the current thread is to do next, while another thread follows; None if it is not needed any more.

        A leader's steps are inlined: `idle`, `shut_due`, `busy` and `alarm_due` of the machine.
        """
        state = self.state
        me = get_ident()
        if state.thread != me:
            return self._follow()
        state.doing = IDLE
        state.helped = 0
        clock = self._clock
        begun = clock()
        if state.open and begun > state.open_until:
            self.watchdog.apply(state.shut_due(begun))
        limits = self._thresholds
        seen = self._spin(begun + limits.spin) if state.streak >= limits.streak else None
        if seen:
            events = self._poller.fired(seen)
            now = clock()
        else:
            events = self._poller.wait()
            now = clock()
            if now - begun < limits.spin:
                state.streak += 1
            elif state.streak > 0:
                state.streak = 0
        if state.thread == me:
            state.steps += 1
            state.began = now
            state.long_at = now + self._long
            state.doing = READING
            if not state.alarm_set:
                self.watchdog.apply(state.alarm_due(now))
        if state.followers < 1:
            self.ensure_follower()
        return events

    def wait(self, term: float = -1.0) -> list[Event] | None:
        """Sleep until there is something to do, for `term` seconds at most if it is not negative, and return it. The current
        thread counts as a follower. None: it is not needed any more. While it works, another thread follows."""
        gate = self._gate
        if self.state.thread == NONE and gate is not None and self._take_over(NONE):
            self.add_idle(-1)
            return self.events()
        me = get_ident()
        self._at_gate.add(me)
        events = self._poller.wait() if gate is None else self._wait_at_gate(gate, term)
        self._at_gate.discard(me)
        if self.state.followers <= 1:
            self._start_thread()  # in its place
        else:
            self.add_idle(-1)
            self.ensure_follower()  # another one may have left at the same time
        return events

    def _follow(self) -> list[Event] | None:
        """Follow again after the current thread has helped."""
        limits = self._thresholds
        if self.state.followers >= limits.spare:
            return [] if self._queued() else None
        self.add_idle()
        return self.wait(limits.term)

    def _spin(self, end: float) -> Seen | None:
        """Poll until `end`, without sleeping. After an interruption the leader does not spin for a while."""
        look, clock, state, limits = self._poller.glance, self._clock, self.state, self._thresholds
        before = clock()
        while True:
            for _ in GLANCES:
                if seen := look():
                    if clock() - before > limits.interruption:
                        state.streak = -limits.rests
                    return seen
            now = clock()
            if now - before > limits.interruption:
                state.streak = -limits.rests
            if now > end:
                return None
            before = now
            make_way()

    def _take_over(self, leader: int) -> bool:
        me, now = get_ident(), self._clock()
        with self._lock:
            effects = self.state.take_over(me, leader, now)
        if effects is None:
            return False
        self.watchdog.apply(effects)
        return True

    def _wait_at_gate(self, gate: Gate, term: float) -> list[Event] | None:
        state, clock = self.state, self._clock
        end = clock() + term
        deferred = False
        while not self._stopped:
            if state.open and not deferred:
                self.watchdog.open_gate()  # (which lets one pass)
            may_pass, rang = gate.wait(-1.0 if term < 0 else max(end - clock(), 0.0))
            deferred = False
            if rang and self.watchdog.look():
                return []
            if may_pass and state.open:
                now = clock()
                if state.may_help(now):
                    seen = self._poller.glance()
                    if seen:
                        self.watchdog.open_gate()  # for the next one: to read this may take a while
                        return self._poller.fired(seen)
                else:
                    deferred = True  # else the gate would let this thread pass again at once
                    self.watchdog.apply(state.defer(now))
            if term > 0 and clock() > end:
                if state.open:
                    self.watchdog.open_gate()  # this thread may have used the last opening up
                return None
        return []

    # Threads that are busy.

    def ensure_follower(self) -> None:
        if self.state.followers < 1:
            self.add_idle()
            self._start_thread()

    def before_task(self) -> None:
        """Note that the current thread is about to run a task that may block: what else is queued must not wait for it long.

        A leader's step is inlined: `begin_task` of the machine.
        """
        state = self.state
        if state.followers < 1:
            self.ensure_follower()
        if state.thread != get_ident():
            self._before_help()
            return
        before = NEVER if state.doing is READING else state.began
        state.doing = RUNNING
        state.steps += 1
        clock = self._clock
        state.began = now = clock()
        state.long_at = now + self._long
        if now > state.renew_at and state.alarm_set:
            self.watchdog.apply(state.renew(now))
        if now - before > self._medium and self._queued():
            self.watchdog.apply(state.begin_next(now, now - before))

    def _before_help(self) -> None:
        leader = self.state.thread
        for effect in self.state.begin_help(self._queued()):
            if effect is not TAKE_OVER:
                self.watchdog.apply((effect,))
            elif not self._take_over(leader):
                self.watchdog.open_gate()

    def nearly_done(self) -> float:
        """Note that the current thread has almost nothing left to do. Return the time, which is real time. (`answer` of the
        machine, inlined.)"""
        state, clock = self.state, self._clock
        now = clock()
        if state.thread == get_ident():
            state.doing = ANSWERING
            state.steps += 1
            state.long_at = now + self._long_answer
        return now

    def leader_blocks(self) -> None:
        """Note that the current thread is about to block. If it leads, another thread takes over."""
        if self.state.thread == get_ident() and self._gate is not None:
            self.watchdog.apply(self.state.block())
        if get_ident() in self._at_gate:  # a destructor waits in `wait`: this thread counts as a follower, and is none
            self.add_idle()
            self._start_thread()
            self.request_helper()
        self.ensure_follower()

    def wake(self) -> None:
        """Wake a thread to see what there is to do."""
        if self.state.wakes_leader(get_ident()):
            self._poller.wake()
        else:
            self.request_helper()

    def leave(self) -> None:
        """Note that the current thread ends, or has failed. If it led, another thread takes over."""
        effects = self.state.leave(get_ident())
        if effects:
            self.ensure_follower()
            self.watchdog.apply(effects)
            self._poller.wake()  # the thread that leads next may be the only one: none hears the alarm then

    def stop(self) -> None:
        self._stopped = True
        self.watchdog.stop()
