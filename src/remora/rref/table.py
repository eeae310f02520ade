"""What happens to references on one worker: every event goes to the machines, and what they ask for is carried out.

Decide under the lock, act after it. Nothing is sent from a destructor: a dropped reference is put on a list, and a thread
of the crew looks at it soon (`remora.rref.dropping`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from remora.agent.agent import Agent
from remora.agent.peers import Peer
from remora.errors import OwnerDied, RemoraError
from remora.rref.dropping import Dropping
from remora.rref.errands import Errands
from remora.rref.values import Value
from remora.vocabulary.effects import Effect, ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId

log = logging.getLogger("remora")


class Table(Errands):
    """See the head of this file."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        super().__init__(agent, first_id)
        self.closed = False
        self._confirmations: dict[ForkId, list[Callable[[], None]]] = {}  # who waits for them; guarded by the lock
        self._dropping = Dropping(agent, self._let_go)
        self.drop_soon = self._dropping.soon  # for destructors: takes no lock and sends nothing
        self.relieve = self._dropping.relieve  # for threads that make references
        agent.peers.obituaries.append(self.lost)

    # Values owned here.

    def create(self, rref: RRefId, fork: ForkId, creator: Worker, script: bool) -> Value:
        """A call arrived that makes a value. It may have been asked for before."""
        with self._lock:
            self.owner.create(rref, fork, creator)
            value = self.values.get(rref)
            if value is None:
                value = self.values[rref] = Value(rref)
            value.script = script
        return value

    def come_home(self, rref: RRefId, sender: Worker) -> Value:
        """A reference to a value of ours arrived: the value, which may have to be made yet."""
        with self._lock:
            value = self.values.get(rref)
            if value is None:
                value = self.values[rref] = Value(rref)
            effects = self.owner.come_home(rref, sender, self._creator(rref))
        if effects:
            self.perform(effects)
        return value

    def share_value(self, value: Value, fork: ForkId, to: Worker) -> None:
        """We hand out a reference to a value of ours."""
        with self._lock:
            self.values[value.id] = value
            effects = self.owner.share(value.id, fork, to)
        self.perform(effects)

    def counted(self, rref: RRefId, fork: ForkId, holder: Worker) -> None:
        """A new holder asks to be counted."""
        with self._lock:
            self.values.setdefault(rref, Value(rref))
            effects = self.owner.request(rref, fork, holder, self._creator(rref))
        self.perform(effects)

    def _creator(self, rref: RRefId) -> Worker | None:
        """The worker that has this value made, if it lives: the one of that number, unless the value has a number from
        before it was started, and so is of a former worker."""
        peer = self.agent.peers.of_id(rref.created_on) if self._first_id else None  # 0: a group to which nobody comes back
        if peer is None or peer.gone:
            return None
        first = peer.record.extra.get("first_id", 0)
        return peer.key if isinstance(first, int) and first <= rref.local_id else None

    def deleted(self, rref: RRefId, fork: ForkId) -> None:
        """A holder says goodbye."""
        self.deleted_all([rref, fork])

    def deleted_all(self, ids: list[GloballyUniqueId], never_made: bool = False) -> None:
        """A holder says goodbyes, many at once: a value and a fork in turn. Or: these values will never be made."""
        effects: list[Effect] = []
        say = self.owner.never_made if never_made else self.owner.delete
        with self._lock:
            for rref, fork in zip(ids[::2], ids[1::2], strict=True):
                effects += say(rref, fork)
        self.perform(effects)

    # References held here.

    def hold(self, rref: RRefId, fork: ForkId, owner: Worker) -> None:
        """We asked `owner` to make a value."""
        with self._lock:
            self.holder.create(rref, fork, owner)
            self._held_since[fork] = time.time()

    def adopt(self, rref: RRefId, fork: ForkId, owner: Worker, sender: Worker) -> bool:
        """A reference arrived. False if its owner has yet to count it."""
        with self._lock:
            effects = self.holder.adopt(rref, fork, owner, sender)
            self._held_since[fork] = time.time()
            confirmed = self.holder.forks[fork].confirmed
        self.perform(effects)
        return confirmed

    def share(self, fork: ForkId, child: ForkId, to: Worker) -> None:
        """The program hands a reference on."""
        with self._lock:
            self.holder.share(fork, child, to)

    def confirmed(self, fork: ForkId) -> None:
        """The owner counts a reference of ours."""
        with self._lock:
            effects = self.holder.confirm(fork)
            waiting = self._confirmations.pop(fork, None)
            if self._onlookers:
                self._tell_onlookers()
        if effects:
            self.perform(effects)
        if waiting:
            self._tell_all(waiting)

    def accepted(self, child: ForkId) -> None:
        """The owner counts a reference that we handed on."""
        with self._lock:
            effects = self.holder.accepted(child)
            self._tell_onlookers()
        self.perform(effects)

    def ruin(self, fork: ForkId, error: BaseException) -> None:
        """A reference will never work."""
        with self._lock:
            held = self.holder.forks.get(fork)
            if held is not None and held.in_use:
                self.failures.setdefault(fork, error)
            self.holder.forget(fork)
            self._held_since.pop(fork, None)
            waiting = self._confirmations.pop(fork, [])
            self._tell_onlookers()
        if held is not None and held.parent is not None:
            self.tell_accepted(held.parent, fork)  # it will never be counted: the parent need not wait
        self._tell_all(waiting)

    def forget(self, fork: ForkId) -> None:
        """A reference that never came to be."""
        with self._lock:
            self.holder.forget(fork)
            self._held_since.pop(fork, None)

    def spoil(self, fork: ForkId, error: BaseException) -> None:
        """A reference does not work, but its owner may know of it: it says goodbye like any other."""
        with self._lock:
            held = self.holder.forks.get(fork)
            if held is not None and held.in_use:
                self.failures[fork] = error
        self.confirmed(fork)

    def _tell_all(self, waiting: list[Callable[[], None]]) -> None:
        """What follows a confirmation may be code of the program: it does not run on a thread that happened to read."""
        for tell in waiting:
            self.agent.crew.serve(tell)

    def when_confirmed(self, fork: ForkId, tell: Callable[[], None]) -> None:
        """Call `tell` when the owner counts a reference, or never will; at once if that is known."""
        with self._lock:
            held = self.holder.forks.get(fork)
            pending = held is not None and not held.confirmed
            if pending:
                self._confirmations.setdefault(fork, []).append(tell)
        if pending:
            self.agent.peers.watch_all()
        else:
            tell()

    def when_all_confirmed(self, forks: list[ForkId], ready: Callable[[], None]) -> None:
        """Call `ready` when that holds for all of them."""
        missing = len(forks) + 1
        counting = threading.Lock()

        def one_more() -> None:
            nonlocal missing
            with counting:
                missing -= 1
                done = missing == 0
            if done:
                ready()

        for fork in forks:
            self.when_confirmed(fork, one_more)
        one_more()

    def _let_go(self) -> None:
        """Let go of what destructors put on the list."""
        effects: list[Effect] = []
        for batch in self._dropping.batches():
            with self._lock:
                for fork in batch:
                    self.failures.pop(fork, None)
                    self._held_since.pop(fork, None)
                    effects += self.holder.drop(fork)
                self._tell_onlookers()
        self.perform(effects)

    # Losses.

    def lost(self, peer: Peer) -> None:
        """A worker left or died."""
        survivors = {other.key for other in self.agent.peers.all() if other.state == "alive"} - {self.me}
        error = OwnerDied(f"{peer.info}, which owned the value, is gone: {peer.reason}")
        with self._lock:
            worthless, effects = self.holder.lost(peer.key)
            self.failures.update({fork: error for fork, in_use in worthless if in_use})
            told = [tell for fork, _ in worthless for tell in self._confirmations.pop(fork, [])]
            effects += self.owner.lost(peer.key, survivors)
            self._tell_onlookers()
        self.perform(effects)
        self._tell_all(told)

    def heard(self, survivor: Worker, lost: Worker) -> None:
        """Another worker confirms a loss."""
        with self._lock:
            effects = self.owner.heard(survivor, lost)
        self.perform(effects)

    # The end.

    def delete_all(self, timeout: float) -> None:
        """Before shutdown: say goodbye for every reference that is held here, and wait until ours are let go too."""
        end = self.agent.clock.now() + timeout
        self._let_go()
        self.agent.peers.watch_all()
        settled = self.wait_until(lambda: all(h.confirmed and not h.children for h in self.holder.forks.values()), end)
        if not settled:
            log.warning("%s: some references were not settled within %.0f s", self.agent.me, timeout)
        effects: list[Effect] = []
        with self._lock:
            for fork, held in list(self.holder.forks.items()):
                self.failures[fork] = deleted_error(held.rref, fork)
                effects += self.holder.drop(fork)
        self.perform(effects)
        self.agent.peers.watch_all()
        self.wait_until(lambda: not self._in_flight, end)

    def close(self) -> None:
        """No more messages: what is dropped from now on is dropped in silence."""
        self.closed = self._dropping.closed = True
        with self._lock:
            values: list[Any] = list(self.values.values())
            self.values.clear()
        del values  # destroyed outside the lock: their destructors may come back here


def deleted_error(rref: RRefId, fork: ForkId) -> RemoraError:
    """A reference that was let go by shutdown."""
    error = RemoraError(f"UserRRef(rref_id={rref}, fork_id={fork}) was deleted by shutdown")
    error.deleted = True  # type: ignore[attr-defined]
    return error
