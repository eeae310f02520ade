"""Events about references that this worker holds. Each posts a step of the holder's machine (`remora.protocol.holder`).

A method whose name ends in `_step` is a step: it runs alone, on any thread, and may run again from its beginning if an
exception of a signal handler strikes it. So a step does nothing that would be wrong the second time.

A destructor sends nothing: a dropped reference goes to a queue, which a thread of the pool empties soon
(`remora.rref.release_queue`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from remora.agent.runtime.try_lock import may_be_struck
from remora.errors import RemoraError
from remora.names import Name
from remora.protocol.holder import Holder
from remora.rref.effect_runner import Action, EffectRunner
from remora.rref.release_queue import ReleaseQueue
from remora.rref.state import RefState
from remora.vocabulary.effects import Effect, ForkId, RRefId, TellParent, Worker


class HeldRefs:
    """The holder's half of the reference table."""

    def __init__(self, state: RefState, runner: EffectRunner) -> None:
        self._state = state
        self._holder = state.holder
        self._runner = runner
        self._agent = state.agent
        self.releases = ReleaseQueue(state.agent, partial(self._runner.change, self._drop_step))

    def hold(self, rref: RRefId, fork: ForkId, owner: Worker, maker: Name | None = None, site: str = "") -> None:
        """This worker asks `owner` to make a value. This is no step: the fork is new, so no step can be about it yet, and
        one assignment adds it, whatever step is under way."""
        self._state.held_notes[fork] = time.time(), maker, site
        self._holder.create(rref, fork, owner)

    def adopt(self, rref: RRefId, fork: ForkId, owner: Worker, sender: Worker) -> bool:
        """A reference arrived. False if its owner has yet to count it."""
        self._state.held_notes[fork] = time.time(), None, ""
        self._runner.change(self._holder.adopt, rref, fork, owner, sender)
        return owner == sender

    def share(self, fork: ForkId, child: ForkId, to: Worker) -> None:
        """The program hands a reference on."""
        self._runner.change(self._share_step, fork, child, to)

    def _share_step(self, fork: ForkId, child: ForkId, to: Worker) -> list[Effect]:
        if fork in self._holder.forks:  # else its owner was lost just now
            self._holder.share(fork, child, to)
        return []

    def accepted(self, child: ForkId) -> None:
        """The owner counts a reference that this worker handed on."""
        self._runner.change(self._accept_step, child)

    def _accept_step(self, child: ForkId) -> Iterable[Effect]:
        return self._accept_exposed(child) if may_be_struck() else self._holder.accepted(child)

    def _accept_exposed(self, child: ForkId) -> Iterator[Effect]:
        parents = self._holder.parents
        yield from self._exposed(parents.get(child), child, lambda holder: holder.accepted(child))
        parents.pop(child, None)

    def confirmed(self, fork: ForkId) -> None:
        """The owner counts a reference of ours."""
        self._runner.change(self._confirm_step, fork)

    def _confirm_step(self, fork: ForkId) -> Iterable[Action]:
        held, waiters = self._holder.forks.get(fork), self._state.waiters
        if held is not None and held.in_use and held.parent is None and fork not in waiters:
            return self._holder.confirm(fork)  # without effects, like most: their thread goes on to use what it asked for
        if may_be_struck():
            return self._confirm_exposed(fork)
        return [*self._holder.confirm(fork), *self.wake_waiters(fork)]

    def _confirm_exposed(self, fork: ForkId) -> Iterator[Action]:
        yield from self._exposed(fork, None, lambda holder: holder.confirm(fork))
        waiters = self._state.waiters
        for tell in waiters.get(fork, ()):
            yield partial(self._agent.pool.submit_system, tell)
        waiters.pop(fork, None)

    def _exposed(
        self, fork: ForkId | None, child: ForkId | None, event: Callable[[Holder], Iterable[Effect]]
    ) -> Iterator[Effect]:
        """Have an event that concerns one fork take place, on a thread that an exception of a signal handler may strike. A
        copy decides. The effects are in the queue before the state changes, in one operation: so a step that is struck
        leaves all of it to its repetition, and a message that is sent twice does no harm."""
        forks = self._holder.forks
        held = None if fork is None else forks.get(fork)
        if fork is None or held is None:
            return
        copy = Holder({fork: replace(held, children=held.children.copy())}, {} if child is None else {child: fork})
        yield from event(copy)
        if fork in copy.forks:
            forks[fork] = copy.forks[fork]
        else:
            forks.pop(fork, None)

    def fail(self, fork: ForkId, error: BaseException) -> None:
        """A reference will never work, and its owner does not count it."""
        self._runner.change(self._fail_step, fork, error)

    def _fail_step(self, fork: ForkId, error: BaseException) -> list[Action]:
        state = self._state
        held = self._holder.forks.get(fork)
        if held is not None and held.in_use:
            state.failures.setdefault(fork, error)
        actions = self.wake_waiters(fork)
        if held is not None and held.parent is not None:
            actions.append(TellParent(held.parent, fork))  # it will never be counted: the parent need not wait
        self._remove_step(fork)
        return actions

    def mark_broken(self, fork: ForkId, error: BaseException) -> None:
        """A reference does not work, but its owner may count it: it says goodbye like any other."""
        self._runner.change(self._mark_broken_step, fork, error)

    def _mark_broken_step(self, fork: ForkId, error: BaseException) -> Iterable[Action]:
        held = self._holder.forks.get(fork)
        if held is not None and held.in_use:
            self._state.failures[fork] = error
        return self._confirm_step(fork)

    def remove(self, fork: ForkId) -> None:
        """Remove a reference that was never sent."""
        self._runner.change(self._remove_step, fork)

    def _remove_step(self, fork: ForkId) -> list[Effect]:
        self._holder.forget(fork)
        self._state.held_notes.pop(fork, None)
        return []

    # Waiting for the owner.

    def when_confirmed(self, fork: ForkId, tell: Callable[[], None]) -> None:
        """Call `tell` when the owner counts a reference, or never will; at once if that is known."""
        if not self._runner.has_steps() and not self._state.is_pending(fork):
            tell()
            return
        self._runner.change(self._wait_step, fork, tell)
        self._agent.peers.watch_all()

    def _wait_step(self, fork: ForkId, tell: Callable[[], None]) -> list[Action]:
        if not self._state.is_pending(fork):
            return [partial(self._agent.pool.submit_system, tell)]
        waiters = self._state.waiters.setdefault(fork, [])
        if tell not in waiters:
            waiters.append(tell)
        return []

    def when_all_confirmed(self, forks: list[ForkId], ready: Callable[[], None]) -> None:
        """Call `ready` when that holds for all of them."""
        if not forks:
            ready()
            return
        confirmed = itertools.count(1).__next__  # atomic: no two threads get the same number

        def one_more() -> None:
            if confirmed() == len(forks):
                ready()

        for fork in list(forks):
            self.when_confirmed(fork, one_more)

    def wake_waiters(self, fork: ForkId) -> list[Action]:
        """In a step: remove the callbacks that wait for a confirmation, and return actions that have the pool call them.
        They may run code of the program, so the thread that happens to take this step does not."""
        submit = self._agent.pool.submit_system
        return [partial(submit, tell) for tell in self._state.waiters.pop(fork, ())]

    # Letting go.

    def _drop_step(self, forks: Iterable[ForkId]) -> Iterator[Effect]:
        state = self._state
        for fork in forks:
            state.failures.pop(fork, None)
            state.held_notes.pop(fork, None)
            yield from self._holder.drop(fork)

    def drop_all(self) -> None:
        """At shutdown: drop all references; to use one from now on is an error."""
        self._runner.change(self._drop_all_step)

    def _drop_all_step(self) -> Iterator[Effect]:
        holder = self._holder
        for fork, held in holder.forks.copy().items():
            self._state.failures[fork] = deleted_error(held.rref, fork)
            yield from holder.drop(fork)


def deleted_error(rref: RRefId, fork: ForkId) -> RemoraError:
    """The error of a reference that shutdown let go."""
    error = RemoraError(f"UserRRef(rref_id={rref}, fork_id={fork}) was deleted by shutdown")
    error.deleted = True  # type: ignore[attr-defined]
    return error
