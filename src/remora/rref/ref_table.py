"""What happens to references on one worker: every event is a step of the machines, and what they ask for is carried out.

No method waits for another thread, or for a frame of its own: a destructor that the garbage collector runs in the midst of
a step may use references like any other code. Nothing is sent from a destructor of ours: a dropped reference is put on a
list, and a thread of the pool looks at it soon (`remora.rref.release_queue`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from remora.agent.agent import Agent
from remora.agent.calls.future import wait_until
from remora.agent.peers.manager import Peer
from remora.errors import OwnerDied, RemoraError
from remora.long_wait import LongWait
from remora.rref.effect_runner import EffectRunner, Errand, ended_error
from remora.rref.release_queue import ReleaseQueue
from remora.rref.value import Value
from remora.vocabulary.effects import Effect, ForkId, RRefId, TellParent, Worker
from remora.vocabulary.ids import GloballyUniqueId

log = logging.getLogger("remora")

LOOK_AGAIN = 0.001  # seconds from one look to the next, when a worker waits for the end of all references


class Table(EffectRunner):
    """See the head of this file. Methods whose name begins with `_take_` are steps."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        super().__init__(agent, first_id)
        self.closed = False
        self._ended = False  # the worker has stopped: nothing more is made
        self._confirmations: dict[ForkId, list[Callable[[], None]]] = {}  # what to call when they are confirmed
        self._dropping = ReleaseQueue(agent, self._let_go)
        self.drop_soon = self._dropping.soon  # for destructors: sends nothing
        self.drain_inline = self._dropping.drain_inline  # for threads that make references
        agent.peers.on_gone.append(self.lost)
        agent.ticks.append(self._dropping.look_after)

    # Values owned here.

    def create(self, rref: RRefId, fork: ForkId, creator: Worker, script: bool) -> Value:
        """A call arrived that makes a value. It may have been asked for before."""
        value = self.values.get(rref) or Value(rref)
        value.script = script
        self.change(self._take_create, rref, fork, creator, value)
        return value

    def _take_create(self, rref: RRefId, fork: ForkId, creator: Worker, value: Value) -> list[Effect]:
        self._enter(rref, value)
        return self.owner.create(rref, fork, creator)

    def _enter(self, rref: RRefId, value: Value) -> None:
        """Keep a value that was found before this step, or made for it. Another one may have been entered in between."""
        known = self.values.setdefault(rref, value)
        if known is not value:
            known.script = known.script or value.script
            known.join(value)
        if self._ended:  # looked at after it is entered: `end` sees the value, or we see that it has ended
            value.fail(ended_error(self.agent, rref))

    def received_by_owner(self, rref: RRefId, sender: Worker) -> Value:
        """A reference to a value of ours arrived: the value, which may have to be made yet."""
        value = self.values.get(rref) or Value(rref)
        self.change(self._take_received_by_owner, rref, sender, self._creator(rref), value)
        return value

    def _take_received_by_owner(self, rref: RRefId, sender: Worker, creator: Worker | None, value: Value) -> list[Effect]:
        self._enter(rref, value)
        return self.owner.received_by_owner(rref, sender, creator)

    def share_value(self, value: Value, fork: ForkId, to: Worker) -> None:
        """We hand out a reference to a value of ours."""
        self.change(self._take_share_value, value, fork, to)

    def _take_share_value(self, value: Value, fork: ForkId, to: Worker) -> list[Effect]:
        self._enter(value.id, value)
        return self.owner.share(value.id, fork, to)

    def counted(self, rref: RRefId, fork: ForkId, holder: Worker) -> None:
        """A new holder asks to be counted."""
        self.change(self._take_counted, rref, fork, holder, self._creator(rref))

    def _take_counted(self, rref: RRefId, fork: ForkId, holder: Worker, creator: Worker | None) -> list[Effect]:
        if rref not in self.values:
            self.values[rref] = Value(rref)
        return self.owner.request(rref, fork, holder, creator)

    def _creator(self, rref: RRefId) -> Worker | None:
        """The worker that has this value made, if it lives: the one of that number, unless the value has a number from
        before it was started, and so is of a former worker."""
        peer = self.agent.peers.of_id(rref.created_on) if self._first_id else None  # 0: a group to which nobody comes back
        if peer is None or peer.gone:
            return None
        first = peer.record.extra.get("first_id", 0)
        return peer.key if isinstance(first, int) and first <= rref.local_id else None

    def when_known(self, rref: RRefId, tell: Callable[[Value | None], None]) -> None:
        """Call `tell` with a value that is counted here, or None, as it is after all steps that came before."""
        value = self.values.get(rref)
        if value is not None:
            tell(value)
        else:
            self.change(lambda: [partial(tell, self.values.get(rref))])

    def deleted(self, rref: RRefId, fork: ForkId) -> None:
        """A holder says goodbye."""
        self.deleted_all([rref, fork])

    def deleted_all(self, ids: list[GloballyUniqueId], never_made: bool = False) -> None:
        """A holder says goodbyes, many at once: a value and a fork in turn. Or: these values will never be made."""
        self.change(self._take_deleted, ids, never_made)

    def _take_deleted(self, ids: list[GloballyUniqueId], never_made: bool) -> Iterator[Effect]:
        say = self.owner.never_made if never_made else self.owner.delete
        for rref, fork in zip(ids[::2], ids[1::2], strict=True):
            yield from say(rref, fork)

    # References held here.

    def hold(self, rref: RRefId, fork: ForkId, owner: Worker) -> None:
        """We ask `owner` to make a value. No step: the fork is new, nothing else is about it yet, and it is entered in one
        go, whatever is under way."""
        self._held_since[fork] = time.time()
        self.holder.create(rref, fork, owner)

    def adopt(self, rref: RRefId, fork: ForkId, owner: Worker, sender: Worker) -> bool:
        """A reference arrived. False if its owner has yet to count it."""
        self._held_since[fork] = time.time()
        self.change(self.holder.adopt, rref, fork, owner, sender)
        return owner == sender

    def share(self, fork: ForkId, child: ForkId, to: Worker) -> None:
        """The program hands a reference on."""
        self.change(self._take_share, fork, child, to)

    def _take_share(self, fork: ForkId, child: ForkId, to: Worker) -> list[Effect]:
        if fork in self.holder.forks:  # else its owner was lost just now
            self.holder.share(fork, child, to)
        return []

    def confirmed(self, fork: ForkId) -> None:
        """The owner counts a reference of ours."""
        self.change(self._take_confirmed, fork)

    def _take_confirmed(self, fork: ForkId) -> list[Errand]:
        effects: list[Errand] = list(self.holder.confirm(fork))
        return effects + self._told(fork) if fork in self._confirmations else effects

    def accepted(self, child: ForkId) -> None:
        """The owner counts a reference that we handed on."""
        self.change(self.holder.accepted, child)

    def fail_ref(self, fork: ForkId, error: BaseException) -> None:
        """A reference will never work."""
        self.change(self._take_fail_ref, fork, error)

    def _take_fail_ref(self, fork: ForkId, error: BaseException) -> list[Errand]:
        held = self.holder.forks.get(fork)
        if held is not None and held.in_use:
            self.failures.setdefault(fork, error)
        errands = self._told(fork)
        if held is not None and held.parent is not None:
            errands.append(TellParent(held.parent, fork))  # it will never be counted: the parent need not wait
        self.holder.forget(fork)
        self._held_since.pop(fork, None)
        return errands

    def forget(self, fork: ForkId) -> None:
        """A reference that never came to be."""
        self.change(self._take_forget, fork)

    def _take_forget(self, fork: ForkId) -> list[Effect]:
        self.holder.forget(fork)
        self._held_since.pop(fork, None)
        return []

    def mark_broken(self, fork: ForkId, error: BaseException) -> None:
        """A reference does not work, but its owner may know of it: it says goodbye like any other."""
        self.change(self._take_mark_broken, fork, error)

    def _take_mark_broken(self, fork: ForkId, error: BaseException) -> list[Errand]:
        held = self.holder.forks.get(fork)
        if held is not None and held.in_use:
            self.failures[fork] = error
        return self._take_confirmed(fork)

    def _told(self, fork: ForkId) -> list[Errand]:
        """Have those told who wait for a confirmation. What follows may be code of the program: it does not run on a thread
        that happened to take this step."""
        serve = self.agent.pool.submit_system
        return [partial(serve, tell) for tell in self._confirmations.pop(fork, ())]

    def when_confirmed(self, fork: ForkId, tell: Callable[[], None]) -> None:
        """Call `tell` when the owner counts a reference, or never will; at once if that is known."""
        if not self._steps and not self._is_pending(fork):
            tell()
            return
        self.change(self._take_when_confirmed, fork, tell)
        self.agent.peers.watch_all()

    def _is_pending(self, fork: ForkId) -> bool:
        held = self.holder.forks.get(fork)
        return held is not None and not held.confirmed

    def _take_when_confirmed(self, fork: ForkId, tell: Callable[[], None]) -> list[Errand]:
        if not self._is_pending(fork):
            return [partial(self.agent.pool.submit_system, tell)]
        waiting = self._confirmations.setdefault(fork, [])
        if tell not in waiting:
            waiting.append(tell)
        return []

    def when_all_confirmed(self, forks: list[ForkId], ready: Callable[[], None]) -> None:
        """Call `ready` when that holds for all of them."""
        if not forks:
            ready()
            return
        confirmed = itertools.count(1).__next__  # no two threads get the same number

        def one_more() -> None:
            if confirmed() == len(forks):
                ready()

        for fork in list(forks):
            self.when_confirmed(fork, one_more)

    def _let_go(self) -> None:
        """Let go of what destructors put on the list."""
        for batch in self._dropping.batches():
            try:
                self.change(self._take_drops, batch)
            except BaseException:  # of a signal handler: to drop one twice does no harm
                self._dropping.put_back(batch)
                raise

    def _take_drops(self, forks: Iterable[ForkId]) -> Iterator[Effect]:
        for fork in forks:
            self.failures.pop(fork, None)
            self._held_since.pop(fork, None)
            yield from self.holder.drop(fork)

    # Losses.

    def lost(self, peer: Peer) -> None:
        """A worker left or died."""
        survivors = {other.key for other in self.agent.peers.all() if other.state == "alive"} - {self.me}
        error = OwnerDied(f"{peer.info}, which owned the value, is gone: {peer.reason}")
        self.change(self._take_loss, peer.key, survivors, error)

    def _take_loss(self, lost: Worker, survivors: set[Worker], error: BaseException) -> list[Errand]:
        worthless, effects = self.holder.lost(lost)
        self.failures.update({fork: error for fork, in_use in worthless if in_use})
        told = [errand for fork, _ in worthless for errand in self._told(fork)]
        return [*effects, *self.owner.lost(lost, survivors), *told]

    def heard(self, survivor: Worker, lost: Worker) -> None:
        """Another worker confirms a loss."""
        self.change(self.owner.heard, survivor, lost)

    # The end.

    def delete_all(self, timeout: float) -> None:
        """Before shutdown: say goodbye for every reference that is held here, and wait until ours are let go too."""
        clock = self.agent.clock
        end = clock.now() + timeout
        self._let_go()
        self.agent.peers.watch_all()
        report = LongWait(lambda: "shutdown waits for references that are on their way between workers", clock)
        if not wait_until(self._all_settled, end, clock, LOOK_AGAIN, report):
            log.warning("%s: some references were not settled within %.0f s", self.agent.me, timeout)
        self.change(self._take_end)
        self.agent.peers.watch_all()
        wait_until(lambda: not self._steps and not self._errands and not self._in_flight, end, clock, LOOK_AGAIN)

    def _all_settled(self) -> bool:
        return not self._steps and all(each.confirmed and not each.children for each in self.holder.forks.copy().values())

    def _take_end(self) -> Iterator[Effect]:
        for fork, held in self.holder.forks.copy().items():
            self.failures[fork] = deleted_error(held.rref, fork)
            yield from self.holder.drop(fork)

    def close(self) -> None:
        """No more messages: what is dropped from now on is dropped in silence."""
        self.closed = self._dropping.closed = True

    def end(self) -> None:
        """The worker has stopped. What is still to be made never will be, and threads that wait for it are told so."""
        self._ended = True
        for rref, value in list(self.values.items()):
            if not value.ready:
                value.fail(ended_error(self.agent, rref))
        values, self.values = self.values, {}
        del values  # their destructors may come back here


def deleted_error(rref: RRefId, fork: ForkId) -> RemoraError:
    """A reference that was let go by shutdown."""
    error = RemoraError(f"UserRRef(rref_id={rref}, fork_id={fork}) was deleted by shutdown")
    error.deleted = True  # type: ignore[attr-defined]
    return error
