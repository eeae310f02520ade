"""Runs the steps of the reference machines and carries out their effects: it sends control messages and frees values.

The steps put their effects into a queue, in the order of the steps, and one thread at a time carries them out in that
order. So a worker's messages to another about references keep the order of the events that caused them.

No lock guards the two queues. `SerialQueue` lets one thread at a time take steps, and one carry out effects; a thread
that finds another one there leaves its step with it and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import assert_never

from remora.agent.agent import Agent
from remora.agent.runtime.serial_queue import SerialQueue
from remora.errors import NotInitialized, OwnerDied, RemoraError
from remora.rref.state import ControlMessage, RefState
from remora.rref.value import Value
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

Action = Effect | Callable[[], None]  # an effect of a machine, or a function to call in the same order


class EffectRunner:
    """Any thread may call any method. `answered` is called with a fork and a failure, or None, when its owner was asked to
    count it and has answered."""

    def __init__(
        self, agent: Agent, state: RefState, answered: Callable[[ForkId, BaseException | None], None]
    ) -> None:
        self.agent = agent
        self._state = state
        self._answered = answered
        self._steps = SerialQueue(agent.pool.call_soon, self._queue_actions)
        self._actions: deque[Action] = deque()  # steps append, one at a time; `_performing` takes from the left
        self._performing = SerialQueue(agent.pool.call_soon)

    def in_midst(self) -> bool:
        """True if a frame of this very thread is in the midst of a step, or carries out effects of one."""
        return self._steps.mine() or self._performing.mine()

    def has_steps(self) -> bool:
        """True if a step has yet to end."""
        return bool(self._steps)

    def is_busy(self) -> bool:
        """True if a step has yet to end, or an effect is not carried out."""
        return bool(self._steps or self._actions)

    def change(self, step: Callable[..., Iterable[Action]], *args: object) -> None:
        """Have `step(*args)` run, which changes the state and returns its effects. Both happen before this returns, unless
        another step is under way, or other effects are being carried out: then they happen right after those."""
        self._steps.post(step, *args)
        if self._actions:
            self._performing.post(self._perform)

    def _queue_actions(self, actions: Iterable[Action]) -> None:
        self._actions.extend(self._prepared(actions))

    def _prepared(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Effects on values belong to the step, since the next one may be about the same value. The pool destroys the values
        that a step frees, in one task: their destructors are code of the program. (No call on the path of an effect, but for
        what it does: a signal handler that raises after one would take an action with it.)"""
        values = self._state.values
        freed: list[Value | None] = []
        try:
            for each in actions:
                match each:
                    case Free(rref):
                        freed.append(values.pop(rref, None))
                        if freed[-1] is not None and not freed[-1].ready and not self.agent.running:
                            error: RemoraError = ended_error(self.agent, rref)  # a thread may wait for it
                            yield partial(self.agent.pool.submit_final, partial(freed[-1].fail, error))
                    case NeverMade(rref):
                        if rref in values:
                            error = OwnerDied(f"{rref} was never made: its creator is gone, or could not ask for it")
                            # By the pool: it may run code of the program.
                            yield partial(self.agent.pool.submit_final, partial(values[rref].fail, error))
                    case _:
                        yield each
            if freed:
                yield partial(self.agent.pool.submit_system, freed.clear)
        except BaseException:  # of a signal handler
            self.agent.pool.submit_system(freed.clear)
            raise

    def _perform(self) -> None:
        """Carry out the queued actions. They leave the queue afterwards: if an exception strikes this thread, the next one
        carries them out again, and a message that is sent twice does no harm."""
        batch = list(self._actions)
        self.perform(batch)
        for _ in batch:
            self._actions.popleft()

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions. Goodbyes to one worker share a message."""
        goodbyes: dict[Worker, list[GloballyUniqueId]] = {}
        for action in actions:
            match action:
                case AskOwner(owner, rref, fork):
                    self._tell(owner, RRefForkRequest(rref, fork), partial(self._answered, fork))
                case TellParent(parent, fork):
                    self._tell(parent, RRefChildAccept(fork))
                case Goodbye(owner, rref, fork):
                    goodbyes.setdefault(owner, []).extend((rref, fork))
                case Free() | NeverMade():
                    self.perform(self._prepared([action]))
                case AskSurvivors(lost, survivors):
                    peer = self.agent.peers.known(lost)
                    left = peer is not None and peer.state == "left"
                    question = ConfirmLeave(lost) if left else ConfirmDeath(lost)
                    for survivor in survivors:
                        self._tell(survivor, question)
                case _ if callable(action):
                    action()
                case _:
                    assert_never(action)
        for owner, ids in goodbyes.items():
            self._tell(owner, RRefUserDelete(False, tuple(ids)))

    # Control messages.

    def _tell(
        self, to: Worker, message: Message, done: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """Send a control message. `done` is called with the failure, or None, when it is answered, or `to` is gone."""
        peer = self.agent.peers.by_key(to)
        sent = ControlMessage()
        self._state.in_flight.add(sent)
        finish = partial(self._finish, sent, done)
        if peer is None:
            finish(OwnerDied(f"worker {to} is gone"))
        else:
            kind = message.type
            self.agent.retries.send(peer, int(kind), encode(message), kind.name, finish, urgent=kind in URGENT)

    def _finish(
        self, message: ControlMessage, done: Callable[[BaseException | None], None] | None, failure: BaseException | None
    ) -> None:
        self._state.in_flight.discard(message)
        if done is not None:
            done(failure)

    def tell_accepted(self, parent: Worker, child: ForkId) -> None:
        """Tell the parent of a reference that arrived at its owner: it need not wait for it."""
        self.change(lambda: [TellParent(parent, child)])

    def tell_heard(self, owner: Worker, lost: Worker) -> None:
        """Tell an owner that this worker knows of a loss, behind everything that it had to say before."""
        self.change(lambda: [partial(self._tell, owner, LossConfirmed(lost))])

    def tell_deleted(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """Say goodbye behind everything that was sent to the owner before."""
        self.change(lambda: [Goodbye(owner, rref, fork)])

    def tell_never_made(self, owner: Worker, rref: RRefId, fork: ForkId) -> None:
        """Tell the owner that it will never be asked to make this value, so that waits for it there fail."""
        self.change(lambda: [partial(self._tell, owner, RRefUserDelete(True, (rref, fork)))])


def ended_error(agent: Agent, rref: RRefId) -> NotInitialized:
    """The error of a value that is not made when the worker ends."""
    return NotInitialized(f"the value of {rref} will not be made: RPC is no longer running on this node ({agent.me})")
