"""The state of references on one worker: the two protocol machines, the values, and views of them.

`remora.rref.owned_values` and `remora.rref.held_refs` change the state, by steps that run one at a time
(`remora.agent.runtime.serial_queue`). A view takes no step: it may come in the midst of one, on any thread, so it reads
copies, each of which is made by one call of C code.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from weakref import WeakSet

from remora.agent.agent import Agent
from remora.names import Name
from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owner
from remora.rref.reference_snapshot import HeldReference, OwnedValue, Snapshot
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId

_serial = itertools.count()  # numbers of values and forks made by this process; never reset


HeldNote = tuple[float, Name | None, str]


class ControlMessage:
    """Stands for a message that was sent and is not answered."""

    __slots__ = ("__weakref__",)


class RefState:
    """Values owned here, references held here. Only steps write to it, except where a field says otherwise."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        self.agent = agent
        self.owner = Owner()
        self.holder = Holder()
        self.values: dict[RRefId, Value] = {}  # those that other workers hold
        self.failures: dict[ForkId, BaseException] = {}  # references that will never work, and the reason
        # Callbacks for references that the owner has yet to count. The step that confirms or fails one removes its entry.
        self.waiters: dict[ForkId, list[Callable[[], None]]] = {}
        # Since when, made by which function and in which line. Any thread adds a new fork, by one assignment.
        self.held_notes: dict[ForkId, HeldNote] = {}
        self.first_id = first_id
        self.ended = False  # the worker has stopped: no more values are made. Set once, by `OwnedValues.end`
        # Control messages that are not answered. The callback that waits for the answer keeps the message, so one that an
        # exception of a signal handler kept from being sent disappears from here.
        self.in_flight: WeakSet[ControlMessage] = WeakSet()
        self._my_id = agent.me.id

    def new_id(self) -> GloballyUniqueId:
        """An id that no other value or fork has. It comes from a counter, so no caller waits for a step."""
        return GloballyUniqueId(self._my_id, self.first_id + next(_serial))

    @property
    def me(self) -> Worker:
        """The key of this worker."""
        return self.agent.peers.me.key

    def is_confirmed(self, fork: ForkId) -> bool:
        """True if the owner counts a reference of ours."""
        held = self.holder.forks.get(fork)
        return held is not None and held.confirmed

    def is_pending(self, fork: ForkId) -> bool:
        """True if the owner has yet to count a reference of ours."""
        held = self.holder.forks.get(fork)
        return held is not None and not held.confirmed

    def all_settled(self) -> bool:
        """True if every reference held here is confirmed, and so are the children made of it."""
        return all(each.confirmed and not each.children for each in self.holder.forks.copy().values())

    # Views.

    def counts(self) -> dict[str, int]:
        """PyTorch's debug counters."""
        return {
            "num_owner_rrefs": len(self.values),
            "num_pending_futures": len(self.in_flight),
            "num_pending_users": sum(not held.confirmed for held in self.holder.forks.copy().values()),
            "num_forks": sum(len(owned.forks) for owned in self.owner.values.copy().values()),
        }

    def snapshot(self) -> Snapshot:
        """The values owned and the references held here now."""
        now = time.time()
        owned = [
            OwnedValue(
                rref,
                value,
                now - value.made_at,
                [self._name(holder) for holder in entry.forks.copy().values()],
                maker=value.maker,
                site=value.site,
            )
            for rref, entry in self.owner.values.copy().items()
            if (value := self.values.get(rref)) is not None
        ]
        return Snapshot(owned, [self._held(fork, held, now) for fork, held in self.holder.forks.copy().items()])

    def _held(self, fork: ForkId, held: Held, now: float) -> HeldReference:
        since, maker, site = self.held_notes.get(fork, (now, None, ""))
        owner = self._name(held.owner)
        return HeldReference(held.rref, fork, owner, self._condition(fork, held), now - since, maker, site)

    def _name(self, worker: Worker) -> str:
        peer = self.agent.peers.by_key(worker)
        return str(worker) if peer is None else peer.name

    def _condition(self, fork: ForkId, held: Held) -> str:
        if fork in self.failures:
            return "unusable"
        if not held.in_use:
            return "leaving"
        return "confirmed" if held.confirmed else "pending"

    def leaks(self) -> list[str]:
        """Values that other workers still hold, in PyTorch's words."""
        return [
            f"Leaking RRef {rref} with fork Id {fork}"
            for rref, owned in self.owner.values.copy().items()
            for fork in owned.forks.copy()
        ]
