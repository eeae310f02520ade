"""The reference machines of one worker, and looks at them: figures and snapshots.

Here is the state, not what changes it (`remora.rref.ref_table`) or what follows (`remora.rref.effect_runner`). It is
changed by steps
only, one at a time (`remora.agent.runtime.serial_queue`). A look takes no step: it may come in the midst of one, and
looks at copies that
are made in one go.
"""

from __future__ import annotations

import itertools
import time
from weakref import WeakSet

from remora.agent.agent import Agent
from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owner
from remora.rref.snapshot import HeldReference, OwnedValue, Snapshot
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId

_serial = itertools.count()  # numbers of values and forks made by this process; never reset


class ControlMessage:
    """Stands for a message that was sent and is not answered."""

    __slots__ = ("__weakref__",)


class RefState:
    """Values owned here, references held here."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        self.agent = agent
        self.owner = Owner()
        self.holder = Holder()
        self.values: dict[RRefId, Value] = {}  # of those that others hold
        self.failures: dict[ForkId, BaseException] = {}  # references that will never work, and why
        self._first_id = first_id
        self._my_id = agent.me.id
        self._held_since: dict[ForkId, float] = {}
        # Control messages that are not answered. Each is kept by what waits for its answer, so one that a strike kept from
        # being sent is gone from here.
        self._in_flight: WeakSet[ControlMessage] = WeakSet()

    def new_id(self) -> GloballyUniqueId:
        """A number that no other value or fork has."""
        return GloballyUniqueId(self._my_id, self._first_id + next(_serial))

    @property
    def me(self) -> Worker:
        return self.agent.peers.me.key

    def find(self, rref: RRefId) -> Value | None:
        """A value that is counted here."""
        return self.values.get(rref)

    def is_confirmed(self, fork: ForkId) -> bool:
        """Whether the owner counts a reference of ours."""
        held = self.holder.forks.get(fork)
        return held is not None and held.confirmed

    # Figures.

    def counts(self) -> dict[str, int]:
        """PyTorch's debug counters."""
        return {
            "num_owner_rrefs": len(self.values),
            "num_pending_futures": len(self._in_flight),
            "num_pending_users": sum(not held.confirmed for held in self.holder.forks.copy().values()),
            "num_forks": sum(len(owned.forks) for owned in self.owner.values.copy().values()),
        }

    def snapshot(self) -> Snapshot:
        """What is owned and held here now."""
        now = time.time()
        owned = [
            OwnedValue(rref, value, now - value.made_at, [self._name(holder) for holder in entry.forks.copy().values()])
            for rref, entry in self.owner.values.copy().items()
            if (value := self.values.get(rref)) is not None
        ]
        held = [
            HeldReference(
                held.rref, fork, self._name(held.owner), self._state(fork, held), now - self._held_since.get(fork, now)
            )
            for fork, held in self.holder.forks.copy().items()
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
        return [
            f"Leaking RRef {rref} with fork Id {fork}"
            for rref, owned in self.owner.values.copy().items()
            for fork in owned.forks.copy()
        ]
