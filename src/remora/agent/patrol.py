"""When others help the leader of a crew: they look after it now and then, and open the gate if it is stuck, or behind.

A look costs the leader its interpreter for a moment. So it is rare while all is well; the leader itself puts it off while it
does many short things; and who others keep from the processor is left alone: more threads would not help it. The rules are
in docs/threads.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from remora.agent import processor
from remora.transport.gate import AT_ONCE, Gate
from remora.transport.poller import Poller

PATROL = 0.001  # seconds from one look after the leader to the next
RELAXED = 8  # times that, if all was well each time; or while it takes in what came: a look costs it its interpreter
FEW = 16  # steps; who takes fewer than this in the time of a patrol does long things
WARY = 0.1  # seconds without that, after the leader was found stuck or behind: where it happened once, it happens again
MEDIUM = 0.000125  # seconds for one thing, if so few are done
LONG = 0.001  # seconds that the leader must have been busy with one thing before another thread takes the next
A_WHILE = 0.00025  # … if it is behind
WRAP_UP = 0.005  # … or with the rest of it, after an answer was sent: it takes longer only if the leader lost its processor
RELIEF = 0.05  # seconds for which the gate stays open after that

ROBBED = 0.4  # of the time
RECENT = 4  # times PATROL
PATIENCE = 0.05  # seconds more for who was robbed, or takes in what came (which does not block): others would be in its way

NOBODY = 0
NEVER = float("inf")


class Patrol:
    """What the leader does, as far as others have to know it, the gate, and its alarm. `queued` says how much there is that
    could be run now.

    What the leader and the others tell each other is not locked. Each first says what it does, then looks at what the other
    one said; so whoever is the second sees it.
    """

    def __init__(self, poller: Poller, queued: Callable[[], int]) -> None:
        self._poller = poller
        self._gate = poller.gate
        self._queued = queued
        self._native = 0  # what the system calls the leader
        # What the leader does.
        self._idle = False  # nothing
        self._running = False  # something that may block
        self._waiting = False  # it does
        self._wrapping_up = False  # it has sent the answer
        self._steps = 0  # things begun, or nearly done
        self._began = 0.0  # when the last one was
        self._long_at = 0.0  # when it takes long
        # The gate and its alarm.
        self._open = False
        self._open_until = 0.0  # at least
        self._set = False  # the alarm is
        self._pace = 1  # so many times PATROL
        self._wary_until = 0.0  # then: not more than one
        self._then = (0, 0, False)  # when it was set: `_steps`, how many more are few, and whether the leader was behind
        self._renew_at = NEVER  # when the leader sets it again, if it does many short things
        self._robbed = (0, 0.0, 0.0)  # at the last patrol: of whom, when, and how long it had waited for a processor
        self._summoned = False  # somebody is to come and see

    # The leader.

    def _begin(self) -> None:
        self._steps += 1
        self._wrapping_up = False
        self._began = now = time.monotonic()
        self._long_at = now + LONG

    def _shut(self) -> None:
        self._open = False
        assert self._gate is not None
        self._gate.shut()

    def _renew_alarm(self) -> None:
        """Say that all is well, before somebody comes to look: that would take the interpreter from the leader. But who does
        few things in that time has to be looked after; and who is called is to come (this may have put its alarm off)."""
        steps, few, _ = self._then
        if self._steps - steps >= few // 2 and not self._summoned:
            self._pace = RELAXED if self._began > self._wary_until else 1
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

    # The others.

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
            self._leave_to_others(gate, now, 0.0)
            return True
        behind = is_late and not robbed
        self._pace = 1 if is_long or is_late or now < self._wary_until else min(2 * self._pace, RELAXED)
        self._set_alarm(self._pace if self._running else RELAXED, behind)
        if behind and was_behind:
            self._leave_to_others(gate, now, now + RELIEF)
            return True
        return summoned

    def _is_robbed(self, now: float) -> bool:
        """Whether others had the processor, and the leader did not, for much of the time since it was last asked; or whether
        that is not known, since that was too long ago."""
        leader, then, waited = self._robbed
        self._robbed = self._native, now, processor.waited(self._native)
        known = leader == self._native and now - then < RECENT * PATROL
        return not known or self._robbed[2] - waited > ROBBED * (now - then)

    def _leave_to_others(self, gate: Gate, now: float, until: float) -> None:
        self._pace = 1
        self._wary_until = now + WARY
        self._open_until = max(self._open_until, until)
        self._open = True
        gate.open()
        if self._idle and not until:  # it came back meanwhile
            self._shut()

    def _look_again_soon(self) -> None:
        """What has come is left to the leader, for a while."""
        self._set_alarm(A_WHILE / PATROL)

    # All.

    def summon(self) -> None:
        """Have another thread than the leader see that there is something to do."""
        if self._gate is None:
            self._poller.wake()
        else:
            self._summoned = True
            self._gate.alarm(AT_ONCE)
