"""What the reference machines ask for, carried out: control messages sent, values freed. It decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import assert_never

from remora.errors import OwnerDied
from remora.rref.machines import Machines
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

URGENT = (MessageType.RREF_FORK_REQUEST, MessageType.MEMBERSHIP)  # somebody waits for the answer

_DELETED, _NEVER_MADE = b"\0", b"\1"  # how a RREF_USER_DELETE begins


class Errands(Machines, ABC):
    """See the head of this file. All of it happens after the lock was released."""

    @abstractmethod
    def confirmed(self, fork: ForkId) -> None:
        """The owner counts a reference of ours."""

    @abstractmethod
    def ruin(self, fork: ForkId, error: BaseException) -> None:
        """A reference will never work."""

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
                    peer = self.agent.peers.known(lost)
                    news = "parted" if peer is not None and peer.state == "left" else "gone"
                    for survivor in survivors:
                        self._tell(survivor, MessageType.MEMBERSHIP, (news, lost))
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

    # Control messages.

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
