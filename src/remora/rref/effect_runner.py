"""What the reference machines ask for, carried out: control messages sent, values freed. It decides nothing.

Steps of the machines leave what they ask for in a queue, in the order of the steps; it is carried out in that order, by one
thread at a time. So what a worker says to another about references keeps the order in which it came to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import assert_never

from remora.agent.agent import Agent
from remora.agent.runtime.serial_queue import SerialQueue
from remora.errors import NotInitialized, OwnerDied
from remora.rref.state import ControlMessage, RefState
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
from remora.vocabulary.messages import (
    ConfirmDeath,
    ConfirmLeave,
    LossConfirmed,
    Message,
    MessageType,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
)
from remora.wire.message_codec import encode

# The sender waits for the answer to these.
URGENT = (
    MessageType.RREF_FORK_REQUEST, MessageType.CONFIRM_DEATH, MessageType.CONFIRM_LEAVE, MessageType.LOSS_CONFIRMED,
)  # fmt: skip

Errand = Effect | Callable[[], None]


class EffectRunner(RefState, ABC):
    """See the head of this file."""

    def __init__(self, agent: Agent, first_id: int = 0) -> None:
        super().__init__(agent, first_id)
        self._steps = SerialQueue(agent.pool.call_soon, self._keep)
        self._errands: deque[Errand] = deque()
        self._performing = SerialQueue(agent.pool.call_soon)

    def in_midst(self) -> bool:
        """Whether a frame of this very thread is in the midst of a step, or carries out what one asked for."""
        return self._steps.mine() or self._performing.mine()

    def change(self, step: Callable[..., Iterable[Errand]], *args: object) -> None:
        """Have the machines take a step, which returns what they ask for. It is taken and that is carried out before this
        returns, unless the machines, or those who carry things out, are in the midst of something: right after it, then."""
        self._steps.post(step, *args)
        if self._errands:
            self._performing.post(self._perform)

    def _keep(self, errands: Iterable[Errand]) -> None:
        self._errands.extend(self._prepared(errands))

    def _prepared(self, errands: Iterable[Errand]) -> Iterator[Errand]:
        """What concerns values belongs to the step: the next one may be about the same value. (No call on the way of the
        others: a signal handler that raises after one would take an errand with it.)"""
        for each in errands:
            if each.__class__ is Free:
                assert isinstance(each, Free)
                value = self.values.pop(each.rref, None)
                if value is not None:
                    if not value.ready and not self.agent.running:  # it will not be made, and a thread may wait for it
                        yield partial(self.agent.pool.submit_final, partial(value.fail, ended_error(self.agent, each.rref)))
                    yield partial(self.agent.pool.submit_system, [value].clear)  # no destructor of the program's runs here
            elif each.__class__ is NeverMade:
                assert isinstance(each, NeverMade)
                value = self.values.get(each.rref)
                if value is not None:
                    error = OwnerDied(f"{each.rref} was never made: its creator is gone, or could not ask for it")
                    yield partial(
                        self.agent.pool.submit_final, partial(value.fail, error)
                    )  # which may run code of the program
            else:
                yield each

    def _perform(self) -> None:
        """Carry out what there is. It leaves the queue afterwards: who is interrupted leaves it to the next, and to say
        something twice does no harm."""
        batch = list(self._errands)
        self.perform(batch)
        for _ in batch:
            self._errands.popleft()

    @abstractmethod
    def confirmed(self, fork: ForkId) -> None:
        """The owner counts a reference of ours."""

    @abstractmethod
    def fail_ref(self, fork: ForkId, error: BaseException) -> None:
        """A reference will never work."""

    def perform(self, errands: Iterable[Errand]) -> None:
        """Carry out what the machines asked for. Goodbyes to one worker share a message."""
        goodbyes: dict[Worker, list[GloballyUniqueId]] = {}
        for errand in errands:
            match errand:
                case AskOwner(owner, rref, fork):
                    self._ask_owner(owner, rref, fork)
                case TellParent(parent, fork):
                    self._tell(parent, RRefChildAccept(fork))
                case Goodbye(owner, rref, fork):
                    goodbyes.setdefault(owner, []).extend((rref, fork))
                case Free() | NeverMade():
                    self.perform(self._prepared([errand]))
                case AskSurvivors(lost, survivors):
                    peer = self.agent.peers.known(lost)
                    left = peer is not None and peer.state == "left"
                    question = ConfirmLeave(lost) if left else ConfirmDeath(lost)
                    for survivor in survivors:
                        self._tell(survivor, question)
                case _ if callable(errand):
                    errand()
                case _:
                    assert_never(errand)
        for owner, ids in goodbyes.items():
            self._tell(owner, RRefUserDelete(False, tuple(ids)))

    # Control messages.

    def _ask_owner(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        def answered(failure: BaseException | None) -> None:
            if failure is None:
                self.confirmed(fork)
            else:
                self.fail_ref(fork, failure)

        self._tell(owner, RRefForkRequest(rref, fork), answered)

    def _tell(
        self, to: Worker, message: Message, done: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """Send a control message. If the worker is gone, that is the answer."""
        peer = self.agent.peers.by_key(to)
        sent = ControlMessage()
        self._in_flight.add(sent)
        finish = partial(self._finish, sent, done)
        if peer is None:
            finish(OwnerDied(f"worker {to} is gone"))
        else:
            kind = message.type
            self.agent.retries.send(peer, int(kind), encode(message), kind.name, finish, urgent=kind in URGENT)

    def _finish(
        self, message: ControlMessage, done: Callable[[BaseException | None], None] | None, failure: BaseException | None
    ) -> None:
        self._in_flight.discard(message)
        if done is not None:
            done(failure)

    def tell_accepted(self, parent: Worker, child: ForkId) -> None:
        """On the owner: a reference came home, its parent need not wait for it."""
        self.change(lambda: [TellParent(parent, child)])

    def tell_heard(self, owner: Worker, lost: Worker) -> None:
        """An owner wants to know when we know of a loss. We do, and said all we had to say before."""
        self.change(lambda: [partial(self._tell, owner, LossConfirmed(lost))])

    def tell_deleted(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """Say goodbye in order: behind what was sent to the owner before."""
        self.change(lambda: [Goodbye(owner, rref, fork)])

    def tell_never_made(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """The owner will never be asked to make this value; whoever waits for it there must know."""
        self.change(lambda: [partial(self._tell, owner, RRefUserDelete(True, (rref, fork)))])


def ended_error(agent: Agent, rref: RRefId) -> NotInitialized:
    """For a value that is still to be made when the worker ends."""
    return NotInitialized(f"the value of {rref} will not be made: RPC is no longer running on this node ({agent.me})")
