"""Carries out what the machine of `remora.protocol.leader` decides about the gate, its alarm and calls for help."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from remora.protocol.leader import HELP, OPEN, SHUT, Alarm, Effects, Leadership
from remora.transport.gate import AT_ONCE
from remora.transport.poller import Poller


class Watchdog:
    """The gate of a poller, and what followers do when its alarm rings. `queued` says how many tasks could be run now.

    A poller without a gate has no followers: no alarm is set, and a call for help wakes any thread at the poller.
    """

    def __init__(
        self, state: Leadership, poller: Poller, queued: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        self._state = state
        self._poller = poller
        self._gate = poller.gate
        self._queued = queued
        self._clock = clock

    def look(self) -> bool:
        """Return True if the current thread, a follower for which the alarm rang, leaves the gate to run what is queued."""
        gate, state = self._gate, self._state
        assert gate is not None
        called = state.rang()
        effects = state.decide(self._clock(), called, self._queued() > 0 or gate.crowded())
        self.apply(tuple(effect for effect in effects if effect is not HELP))
        return HELP in effects

    def apply(self, effects: Effects) -> None:
        """Carry out what the current thread decided."""
        for effect in effects:
            if effect is HELP:
                self._wake_follower()
            elif self._gate is None:
                continue
            elif isinstance(effect, Alarm):
                self._gate.alarm(effect.seconds)
                if self._state.called_meanwhile():
                    self._gate.alarm(AT_ONCE)
            elif effect is OPEN:
                self.open_gate()
            elif effect is SHUT:
                self._gate.shut()
                self.apply(self._state.was_shut())

    def open_gate(self) -> None:
        """Let one follower pass when the poller has something, unless the gate is to be shut by now."""
        if self._gate is not None:
            self._gate.open()
            self.apply(self._state.opened(self._clock()))

    def request_helper(self) -> None:
        """Wake a thread other than the leader to run what is queued."""
        self.apply(self._state.call_helper())

    def _wake_follower(self) -> None:
        if self._gate is None:
            self._poller.wake()
        else:
            self._gate.alarm(AT_ONCE)

    def stop(self) -> None:
        """Let every thread return: each thread that returns calls this again for the next."""
        self._poller.wake()
        if self._gate is not None:
            self._gate.alarm(AT_ONCE)
