"""The reference machines of one worker behind one lock, and looks at them: figures, snapshots, waiting for a change.

Here is the state and who may touch it, not what changes it (`remora.rref.table`) or what follows (`remora.rref.errands`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from remora.agent.agent import Agent
from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owner
from remora.rref.snapshot import HeldReference, OwnedValue, Snapshot
from remora.rref.values import Value
from remora.vocabulary.effects import ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId

_serial = itertools.count()  # numbers of values and forks made by this process; never reset


class Machines:
    """Values owned here, references held here."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        self.agent = agent
        self.owner = Owner()
        self.holder = Holder()
        self.values: dict[RRefId, Value] = {}  # of those that others hold
        self.failures: dict[ForkId, BaseException] = {}  # references that will never work, and why
        self._first_id = first_id
        self._my_id = agent.me.id
        self._lock = threading.Lock()  # guards everything above, and what is said to be below
        self._changed = threading.Condition(self._lock)
        self._onlookers = 0  # threads that wait for a change
        self._held_since: dict[ForkId, float] = {}
        self._in_flight = 0  # control messages that are not answered

    def new_id(self) -> GloballyUniqueId:
        """A number that no other value or fork has."""
        return GloballyUniqueId(self._my_id, self._first_id + next(_serial))

    @property
    def me(self) -> Worker:
        return self.agent.peers.me.key

    def find(self, rref: RRefId) -> Value | None:
        """A value that is counted here."""
        return self.values.get(rref)  # (one look needs no lock)

    def is_confirmed(self, fork: ForkId) -> bool:
        """Whether the owner counts a reference of ours."""
        held = self.holder.forks.get(fork)
        return held is not None and held.confirmed

    # Waiting.

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition of the machines; it is looked at under the lock. False at the deadline."""

        def look(seconds: float | None) -> bool:
            with self._lock:
                self._onlookers += 1
                try:
                    return self._changed.wait_for(ready, seconds)
                finally:
                    self._onlookers -= 1

        return self.agent.clock.block(look, deadline)

    def _tell_onlookers(self) -> None:
        """Something changed. The caller holds the lock."""
        if self._onlookers:
            self._changed.notify_all()

    # Figures.

    def counts(self) -> dict[str, int]:
        """PyTorch's debug counters."""
        with self._lock:
            return {
                "num_owner_rrefs": len(self.values),
                "num_pending_futures": self._in_flight,
                "num_pending_users": sum(not held.confirmed for held in self.holder.forks.values()),
                "num_forks": sum(len(owned.forks) for owned in self.owner.values.values()),
            }

    def snapshot(self) -> Snapshot:
        """What is owned and held here now."""
        now = time.time()
        with self._lock:
            owned = [
                OwnedValue(rref, value, now - value.made_at, [self._name(holder) for holder in entry.forks.values()])
                for rref, entry in self.owner.values.items()
                if (value := self.values.get(rref)) is not None
            ]
            held = [
                HeldReference(
                    held.rref,
                    fork,
                    self._name(held.owner),
                    self._state(fork, held),
                    now - self._held_since.get(fork, now),
                )
                for fork, held in self.holder.forks.items()
            ]
        return Snapshot(owned, held)

    def _name(self, worker: Worker) -> str:
        peer = self.agent.peers.by_key(worker)
        return str(worker) if peer is None else peer.name

    def _state(self, fork: ForkId, held: Held) -> str:
        if fork in self.failures:
            return "unusable"
        if not held.in_use:
            return "leaving"
        return "confirmed" if held.confirmed else "pending"

    def leaks(self) -> list[str]:
        """Values that somebody still holds, in words."""
        with self._lock:
            return [
                f"Leaking RRef {rref} with fork Id {fork}"
                for rref, owned in self.owner.values.items()
                for fork in owned.forks
            ]
