"""The reference machines of one worker behind one lock, and what their effects mean here.

Decide under the lock, act after it. Nothing is sent from a destructor: a dropped reference is put on a list, and a thread
of the crew looks at it soon.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

from remora.agent.agent import Agent
from remora.agent.peers import Peer
from remora.errors import OwnerDied, RemoraError
from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owner
from remora.rref.snapshot import HeldReference, OwnedValue, Snapshot
from remora.rref.values import Value
from remora.vocabulary.effects import (
    AskOwner,
    AskSurvivors,
    Effect,
    ForkId,
    Free,
    Goodbye,
    NeverMade,
    RRefId,
    TellParent,
    Worker,
)
from remora.vocabulary.ids import GloballyUniqueId
from remora.vocabulary.messages import MessageType
from remora.wire.identities import pack_id, pack_ids
from remora.wire.packed import Packed
from remora.wire.pickling import pack

log = logging.getLogger("remora")

GATHER = 0.005  # seconds
URGENT = (MessageType.RREF_FORK_REQUEST, MessageType.MEMBERSHIP)  # somebody waits for the answer

_DELETED, _NEVER_MADE = b"\0", b"\1"  # how a RREF_USER_DELETE begins

_serial = itertools.count()  # numbers of values and forks made by this process; never reset


class Table:
    """Values owned here, references held here."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        self.agent = agent
        self.owner = Owner()
        self.holder = Holder()
        self.values: dict[RRefId, Value] = {}  # of those that others hold
        self.failures: dict[ForkId, BaseException] = {}  # references that will never work, and why
        self.closed = False
        self._first_id = first_id
        self._my_id = agent.me.id
        self._lock = threading.Lock()  # guards everything above
        self._changed = threading.Condition(self._lock)
        self._onlookers = 0  # threads that wait for a change
        self._confirmations: dict[ForkId, list[Callable[[], None]]] = {}
        self._held_since: dict[ForkId, float] = {}
        self._dropped: deque[ForkId] = deque()
        self._drop_timer = False  # it will look again by itself
        self._drop_due = False  # a thread of the crew was asked to look at them
        self._in_flight = 0
        agent.peers.obituaries.append(self.lost)

    def new_id(self) -> GloballyUniqueId:
        """A number that no other value or fork has."""
        return GloballyUniqueId(self._my_id, self._first_id + next(_serial))

    @property
    def me(self) -> Worker:
        return self.agent.peers.me.key

    # Values owned here.

    def find(self, rref: RRefId) -> Value | None:
        """A value that is counted here."""
        return self.values.get(rref)  # (one look needs no lock)

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
            value = self.values.setdefault(rref, Value(rref))
            effects = self.owner.come_home(rref, sender, self._creator(rref))
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

    def is_confirmed(self, fork: ForkId) -> bool:
        """Whether the owner counts a reference of ours."""
        held = self.holder.forks.get(fork)
        return held is not None and held.confirmed

    def drop_soon(self, fork: ForkId) -> None:
        """For destructors: takes no lock and sends nothing."""
        self._dropped.append(fork)
        if not self._drop_due:
            self._drop_due = True
            self.agent.crew.serve_quickly(self.drop_dropped)

    def drop_dropped(self) -> None:
        """Let go of what destructors put on the list. While there is something each time we look, we come back soon, so
        that goodbyes in quick succession share a message."""
        if not self._dropped:
            self._drop_due = False
            if not self._dropped:
                return
            self._drop_due = True  # one came in between
        if not self.closed and not self._drop_timer:
            self._drop_timer = True
            self.agent.timers.soon(GATHER, self._drop_again)
        self._let_go()

    def _drop_again(self) -> None:
        self._drop_timer = False
        self.agent.crew.serve_quickly(self.drop_dropped)

    def _let_go(self) -> None:
        effects: list[Effect] = []
        while self._dropped:
            batch = []
            while self._dropped:
                batch.append(self._dropped.popleft())
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

    # Effects.

    def perform(self, effects: list[Effect]) -> None:
        """Carry out what the machines asked for."""
        if not effects:
            return
        freed: list[RRefId] = []
        goodbyes: dict[Worker, list[GloballyUniqueId]] = {}
        for effect in effects:
            match effect:
                case AskOwner(owner, rref, fork):
                    self._ask_owner(owner, rref, fork)
                case TellParent(parent, fork):
                    self._tell(parent, MessageType.RREF_CHILD_ACCEPT, pack_id(fork))
                case Goodbye(owner, rref, fork):
                    goodbyes.setdefault(owner, []).extend((rref, fork))
                case Free(rref):
                    freed.append(rref)
                case NeverMade(rref):
                    value = self.find(rref)
                    if value is not None:
                        value.fail(OwnerDied(f"{rref} was never made: its creator is gone, or could not ask for it"))
                case AskSurvivors(lost, survivors):
                    for survivor in survivors:
                        self._tell(survivor, MessageType.MEMBERSHIP, ("gone", lost))
                case _:
                    assert_never(effect)
        if freed:
            self._free(freed)
        for owner, ids in goodbyes.items():
            self._tell(owner, MessageType.RREF_USER_DELETE, _DELETED + pack_ids(*ids))

    def _free(self, rrefs: list[RRefId]) -> None:
        with self._lock:
            values = [self.values.pop(rref, None) for rref in rrefs if rref not in self.owner.values]
            self._tell_onlookers()
        if any(value is not None for value in values):
            self.agent.crew.serve(values.clear)  # destructors of the program's values do not run here

    def _ask_owner(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        def answered(failure: BaseException | None) -> None:
            if failure is None:
                self.confirmed(fork)
            else:
                self.ruin(fork, failure)

        self._tell(owner, MessageType.RREF_FORK_REQUEST, pack_ids(rref, fork), answered)

    def _tell(
        self, to: Worker, kind: MessageType, body: object, done: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """Send a control message. If the worker is gone, that is the answer."""
        peer = self.agent.peers.by_key(to)
        with self._lock:
            self._in_flight += 1
        finish = partial(self._finish, done)
        if peer is None:
            finish(OwnerDied(f"worker {to} is gone"))
        else:
            packed = Packed(body, [], [], []) if isinstance(body, bytes) else pack(body)
            self.agent.retries.send(peer, int(kind), packed, kind.name, finish, urgent=kind in URGENT)

    def _finish(self, done: Callable[[BaseException | None], None] | None, failure: BaseException | None) -> None:
        with self._lock:
            self._in_flight -= 1
            self._tell_onlookers()
        if done is not None:
            done(failure)

    def tell_accepted(self, parent: Worker, child: ForkId) -> None:
        """On the owner: a reference came home, its parent need not wait for it."""
        self._tell(parent, MessageType.RREF_CHILD_ACCEPT, pack_id(child))

    def tell_heard(self, owner: Worker, lost: Worker) -> None:
        """An owner wants to know when we know of a loss. We do, and said all we had to say before."""
        self._tell(owner, MessageType.MEMBERSHIP, ("heard", lost))

    def tell_deleted(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """Say goodbye in order: behind what was sent to the owner before."""
        self._tell(owner, MessageType.RREF_USER_DELETE, _DELETED + pack_ids(rref, fork))

    def tell_never_made(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """The owner will never be asked to make this value; whoever waits for it there must know."""
        self._tell(owner, MessageType.RREF_USER_DELETE, _NEVER_MADE + pack_ids(rref, fork))

    # Figures, and the end.

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

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition of the tables; it is looked at under the lock. False at the deadline."""

        def look(seconds: float | None) -> bool:
            with self._lock:
                self._onlookers += 1
                try:
                    return self._changed.wait_for(ready, seconds)
                finally:
                    self._onlookers -= 1

        return self.agent.clock.block(look, deadline)

    def _tell_onlookers(self) -> None:
        if self._onlookers:
            self._changed.notify_all()

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

    def leaks(self) -> list[str]:
        """Values that somebody still holds, in words."""
        with self._lock:
            return [
                f"Leaking RRef {rref} with fork Id {fork}"
                for rref, owned in self.owner.values.items()
                for fork in owned.forks
            ]

    def close(self) -> None:
        """No more messages: what is dropped from now on is dropped in silence."""
        self.closed = True
        with self._lock:
            values: list[Any] = list(self.values.values())
            self.values.clear()
        del values  # destroyed outside the lock: their destructors may come back here


def deleted_error(rref: RRefId, fork: ForkId) -> RemoraError:
    """A reference that was let go by shutdown."""
    error = RemoraError(f"UserRRef(rref_id={rref}, fork_id={fork}) was deleted by shutdown")
    error.deleted = True  # type: ignore[attr-defined]
    return error
