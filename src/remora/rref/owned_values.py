"""Events about values that this worker owns. Each posts a step of the owner's machine (`remora.protocol.owner`).

A method whose name ends in `_step` is a step, as in `remora.rref.held_refs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from remora.rref.effect_runner import EffectRunner, ended_error
from remora.rref.state import RefState
from remora.rref.value import Value
from remora.vocabulary.effects import Effect, ForkId, RRefId, Worker
from remora.vocabulary.ids import GloballyUniqueId


class OwnedValues:
    """The owner's half of the reference table."""

    def __init__(self, state: RefState, runner: EffectRunner) -> None:
        self._state = state
        self._runner = runner
        self._agent = state.agent

    def find(self, rref: RRefId) -> Value | None:
        """A value that is counted here."""
        return self._state.values.get(rref)

    def when_known(self, rref: RRefId, tell: Callable[[Value | None], None]) -> None:
        """Call `tell` with a value that is counted here, or None, as it is after all steps that came before."""
        value = self._state.values.get(rref)
        if value is not None:
            tell(value)
        else:
            self._runner.change(lambda: [partial(tell, self._state.values.get(rref))])

    def create(self, rref: RRefId, fork: ForkId, creator: Worker, script: bool) -> Value:
        """A call arrived that makes a value. A reference to it may have arrived before."""
        value = self._state.values.get(rref) or Value(rref)
        value.script = script
        self._runner.change(self._step, value, self._state.owner.create, rref, fork, creator)
        return value

    def _step(self, value: Value, event: Callable[..., list[Effect]], *about: object) -> list[Effect]:
        """Keep a value that was found before this step, or made for it, and tell the machine of the event. Another step may
        have added one in between."""
        known = self._state.values.setdefault(value.id, value)
        if known is not value:
            known.script = known.script or value.script
            known.join(value)
        if self._state.ended:  # read after the value is added: `end` sees the value, or this step sees the flag
            value.fail(ended_error(self._agent, value.id))
        return event(*about)

    def received_by_owner(self, rref: RRefId, sender: Worker) -> Value:
        """A reference to a value of ours arrived. Returns the value, which may not be made yet."""
        value = self._state.values.get(rref) or Value(rref)
        self._runner.change(self._step, value, self._state.owner.received_by_owner, rref, sender, self._creator(rref))
        return value

    def share(self, value: Value, fork: ForkId, to: Worker) -> None:
        """This worker hands out a reference to a value of its own."""
        self._runner.change(self._step, value, self._state.owner.share, value.id, fork, to)

    def count(self, rref: RRefId, fork: ForkId, holder: Worker) -> None:
        """A new holder asks to be counted."""
        self._runner.change(self._count_step, rref, fork, holder, self._creator(rref))

    def _count_step(self, rref: RRefId, fork: ForkId, holder: Worker, creator: Worker | None) -> list[Effect]:
        if rref not in self._state.values:
            self._state.values[rref] = Value(rref)
        return self._state.owner.request(rref, fork, holder, creator)

    def _creator(self, rref: RRefId) -> Worker | None:
        """The live worker that has this value made: the worker of that id, unless the number of the value is from before
        that worker started, and so belongs to a former one."""
        if not self._state.first_id:
            return None  # a static group: no worker comes back
        peer = self._agent.peers.of_id(rref.created_on)
        if peer is None or peer.gone:
            return None
        first = peer.record.extra.get("first_id", 0)
        return peer.key if isinstance(first, int) and first <= rref.local_id else None

    def delete(self, rref: RRefId, fork: ForkId) -> None:
        """A holder says goodbye."""
        self.delete_all([rref, fork])

    def delete_all(self, ids: list[GloballyUniqueId], never_made: bool = False) -> None:
        """A holder says many goodbyes: a value and a fork in turn. If `never_made`, these values will never be made."""
        self._runner.change(self._delete_step, ids, never_made)

    def _delete_step(self, ids: list[GloballyUniqueId], never_made: bool) -> Iterator[Effect]:
        owner = self._state.owner
        delete = owner.never_made if never_made else owner.delete
        for rref, fork in zip(ids[::2], ids[1::2], strict=True):
            yield from delete(rref, fork)

    def end(self) -> None:
        """The worker has stopped. Values that are not made yet fail, so threads that wait for them return."""
        state = self._state
        state.ended = True
        for rref, value in list(state.values.items()):
            if not value.ready:
                value.fail(ended_error(self._agent, rref))
        values, state.values = state.values, {}
        del values  # their destructors may come back here
