"""The reference table of one worker: it takes every event about references and has the effects carried out.

Its parts: the state (`remora.rref.state`), the events about owned values (`remora.rref.owned_values`) and about held
references (`remora.rref.held_refs`), and the runner that carries out the effects (`remora.rref.effect_runner`). Events that
concern both halves are here: the loss of a worker, and shutdown.

No method waits for another thread or for a frame of its own, except `delete_all`: a destructor that the garbage collector
runs in the midst of a step may use references like any other code.
"""

from __future__ import annotations

import logging

from remora.agent.agent import Agent
from remora.agent.calls.blocking import wait_until
from remora.agent.peers.manager import Peer
from remora.errors import OwnerDied
from remora.long_wait import LongWait
from remora.rref.effect_runner import Action, EffectRunner
from remora.rref.held_refs import HeldRefs
from remora.rref.owned_values import OwnedValues
from remora.rref.state import RefState
from remora.vocabulary.effects import ForkId, Worker

log = logging.getLogger("remora")

POLL_INTERVAL = 0.001  # seconds between two looks while shutdown waits for all references to settle


class Table:
    """Puts the parts together."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        self._agent = agent
        self.state = RefState(agent, first_id)
        self.runner = EffectRunner(agent, self.state, self._answered)
        self.owned = OwnedValues(self.state, self.runner)
        self.held = HeldRefs(self.state, self.runner)
        self.closed = False
        self.in_midst = self.runner.in_midst
        self.tell_heard = self.runner.tell_heard
        self.end = self.owned.end  # the worker has stopped
        self.counts, self.snapshot, self.leaks = self.state.counts, self.state.snapshot, self.state.leaks
        agent.peers.on_gone.append(self.lost)
        agent.ticks.append(self.held.releases.check)

    def _answered(self, fork: ForkId, failure: BaseException | None) -> None:
        """An owner was asked to count a reference, and has answered."""
        if failure is None:
            self.held.confirmed(fork)
        else:
            self.held.fail(fork, failure)

    # Losses.

    def lost(self, peer: Peer) -> None:
        """A worker left or died."""
        survivors = {other.key for other in self._agent.peers.all() if other.state == "alive"} - {self.state.me}
        error = OwnerDied(f"{peer.info}, which owned the value, is gone: {peer.reason}")
        self.runner.change(self._lost_step, peer.key, survivors, error)

    def _lost_step(self, lost: Worker, survivors: set[Worker], error: BaseException) -> list[Action]:
        worthless, effects = self.state.holder.lost(lost)
        self.state.failures.update({fork: error for fork, in_use in worthless if in_use})
        woken = [action for fork, _ in worthless for action in self.held.wake_waiters(fork)]
        return [*effects, *self.state.owner.lost(lost, survivors), *woken]

    def heard(self, survivor: Worker, lost: Worker) -> None:
        """Another worker confirms a loss."""
        self.runner.change(self.state.owner.heard, survivor, lost)

    # Shutdown.

    def delete_all(self, timeout: float) -> None:
        """Before shutdown: wait until all references held here are settled, then say goodbye for each."""
        clock, runner = self._agent.clock, self.runner
        end = clock.now() + timeout
        self.held.releases.empty()
        self._agent.peers.watch_all()
        report = LongWait(lambda: "shutdown waits for references that are on their way between workers", clock)
        if not wait_until(
            lambda: not runner.has_steps() and self.state.all_settled(), end, clock, POLL_INTERVAL, report
        ):
            log.warning("%s: some references were not settled within %.0f s", self._agent.me, timeout)
        self.held.drop_all()
        self._agent.peers.watch_all()
        wait_until(lambda: not runner.is_busy() and not self.state.in_flight, end, clock, POLL_INTERVAL)

    def close(self) -> None:
        """Send no more messages: references that are dropped from now on are dropped in silence."""
        self.closed = self.held.releases.closed = True
