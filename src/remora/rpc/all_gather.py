"""All workers exchange a value: the smallest name leads, gathers what the others report and tells all of them.

Gatherings are counted by each worker for itself, per set of participants. Participants are told apart by incarnation, not
only by name: after one of them was restarted all count from the beginning, whatever happened before. A worker that dies
ends a gathering for all, with its name in the error. `settle` is built on it: it ends when no call is under way anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from remora.agent.agent import describe_wait
from remora.agent.calls.blocking import wait_until
from remora.agent.calls.future import Future
from remora.agent.peers.manager import Peer
from remora.agent.runtime.current import blocking_region
from remora.errors import CallNotSent, CallTimeout, NotInitialized, RemoraError, RendezvousError, WorkerLost
from remora.introspection.calls import copied
from remora.introspection.subject import Subject
from remora.introspection.wait_finder import explains
from remora.long_wait import LongWait, listed
from remora.observer.model import WaitKind, WaitStatus
from remora.rpc.constants import UNSET_RPC_TIMEOUT
from remora.rpc.internal import _internal_rpc_pickler
from remora.rpc.request_builder import pack_call
from remora.worker import Worker

LOOK_AGAIN = 1.0  # seconds
FIND_CULPRIT = 1.0  # seconds


class AllGatherStates:
    """One gathering, on one worker."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.expected: set[str] | None = None  # the leader knows the workers for which it waits
        self.failure: BaseException | None = None
        self.proceed_signal = threading.Event()

    def look(self) -> None:
        """Proceed if all have reported."""
        if self.expected is not None and self.expected <= set(self.gathered_objects):
            self.proceed_signal.set()


class Gatherings:
    """Those that one worker takes part in. No thread waits for another here: each change is one operation on one table, and
    the threads that look (`AllGatherStates.look`) do so after their own change, so the last one sees all of them."""

    def __init__(self) -> None:
        self._numbers: dict[str, Callable[[], int]] = {}  # of the gatherings of some participants: the next one
        self._begun: dict[str, int] = {}  # how many were begun
        self.states: dict[str, AllGatherStates] = {}

    def begin(self, participants: str) -> tuple[str, AllGatherStates]:
        """The next gathering of these: its id, and its state, to which some may have reported already."""
        number = self._numbers.setdefault(participants, itertools.count().__next__)()
        sequence_id = f"{participants}#{number}"
        state = self.states.setdefault(sequence_id, AllGatherStates())
        self._begun[participants] = number + 1  # after that: a worker that has begun and is not there any more came too late
        return sequence_id, state

    def report(self, sequence_id: str, name: str, obj: object) -> None:
        """On the leader: a worker is here with its object."""
        participants, _, number = sequence_id.rpartition("#")
        begun = int(number) < self._begun.get(participants, 0)  # first: see `begin`
        if begun and sequence_id not in self.states:
            raise CallTimeout(f"{name} came too late: the others timed out in _all_gather, or it failed for them")
        state = self.states.setdefault(sequence_id, AllGatherStates())
        assert name not in state.gathered_objects, f"{name} reported twice in {sequence_id}"
        state.gathered_objects[name] = obj
        state.look()

    def conclude(self, sequence_id: str, outcome: object) -> None:
        """On a follower: the leader says how it ended."""
        state = self.states.get(sequence_id)
        if state is None:
            return  # we gave up waiting
        if isinstance(outcome, BaseException):
            state.failure = outcome
        else:
            assert isinstance(outcome, dict)
            state.gathered_objects = outcome
        state.proceed_signal.set()

    def forget(self, peer: Peer) -> None:
        """A worker is gone: what it reported to gatherings that have not begun here is of no use."""
        for sequence_id, state in self.states.copy().items():
            participants, _, number = sequence_id.rpartition("#")
            begun = int(number) < self._begun.get(participants, 0)
            if not begun and set(state.gathered_objects) == {peer.name}:
                self.states.pop(sequence_id, None)


_gatherings: WeakKeyDictionary[Worker, Gatherings] = WeakKeyDictionary()


def gatherings_of(worker: Worker) -> Gatherings:
    """The gatherings that a worker takes part in."""
    found = _gatherings.get(worker)
    if found is None:
        made = Gatherings()
        found = _gatherings.setdefault(worker, made)
        if found is made:
            worker.agent.peers.on_gone.append(found.forget)
    return found


def all_gather(
    api: Any, worker: Worker, obj: object, names: set[str] | None, timeout: float, purpose: str = "_all_gather"
) -> dict[str, Any]:
    """Gather the objects of all workers at each of them. `api` is the module whose functions are called: programs may
    replace them there. `purpose` is the word for it in reports of a long wait."""
    names = set(names) if names else _everybody(worker)
    me = worker.get_worker_info().name
    assert me in names, f"{me} is not part of this gathering: {sorted(names)}"
    peers = {name: worker.peer(name) for name in names}
    gatherings, leader = gatherings_of(worker), min(names)
    sequence_id, state = gatherings.begin(_identity(peers))
    awaited = names if me == leader else {leader}  # the leader tells the others which worker it lost

    def note_loss(peer: Peer) -> None:
        waits = peer is peers.get(peer.name) and peer.name in awaited and peer.name not in state.gathered_objects
        if waits and not state.proceed_signal.is_set():
            state.failure = _lost(peer, me, purpose)
            state.proceed_signal.set()

    worker.agent.peers.on_gone.append(note_loss)
    try:
        for peer in peers.values():
            if peer.gone:
                note_loss(peer)
        if me == leader:
            gatherings.report(sequence_id, me, obj)
            state.expected = names
            state.look()
            return _lead(api, worker, state, sequence_id, names, timeout, purpose)
        return _follow(api, worker, state, sequence_id, obj, leader, timeout, purpose)
    except WorkerLost as error:
        raise _culprit(worker, peers, leader, purpose) or error from None
    finally:
        worker.agent.peers.on_gone.remove(note_loss)
        gatherings.states.pop(sequence_id, None)  # no thread here waits for it any more


def _everybody(worker: Worker) -> set[str]:
    """All workers of a static group; of a dynamic one, those that are there now."""
    try:
        worker.membership.refresh()
    except RendezvousError:
        pass  # those we know of must do
    return {info.name for info in worker.get_worker_infos()} | set(worker.static_names)


def _identity(peers: dict[str, Peer]) -> str:
    """Names the participants: the same on all of them, and another one after a restart."""
    lives = "".join(peers[name].key.incarnation for name in sorted(peers))
    return f"{''.join(sorted(peers))}/{hashlib.blake2b(lives.encode(), digest_size=8).hexdigest()}"


def _lost(peer: Peer, me: str, purpose: str) -> WorkerLost:
    return WorkerLost(f"{purpose}: {peer.info} was lost while {me} waited for it: {peer.reason}")


def _culprit(worker: Worker, peers: dict[str, Peer], leader: str, purpose: str) -> WorkerLost | None:
    """The leader has left in the midst of a gathering. That is what it does when a participant has died: that one is to
    blame, and we find out about it soon, if we have not yet."""
    if peers[leader].state != "left":
        return None

    def died() -> Peer | None:
        return next((peer for peer in peers.values() if peer.state == "dead"), None)

    worker.agent.peers.probe(peers)
    wait_until(lambda: died() is not None, time.monotonic() + FIND_CULPRIT)
    found, me = died(), worker.get_worker_info().name
    return None if found is None else _lost(found, me, purpose)


def _still_waiting(worker: Worker, names: set[str], state: AllGatherStates, purpose: str) -> str:
    """Describe the workers that have not come yet, and the calls of ours that they run: these may keep them."""
    missing = [describe_wait(worker.peer(name)) for name in sorted(names - set(state.gathered_objects))]
    return f"{purpose} waits for {listed(missing) or 'the outcome'}"


def _await(state: AllGatherStates, worker: Worker, names: set[str], timeout: float, purpose: str) -> bool:
    """Wait for the end of a gathering. Workers without a link are dialled, so that no thread waits for one that is dead."""
    clock = worker.clock
    end = float("inf") if timeout in (0, UNSET_RPC_TIMEOUT) else clock.now() + timeout
    report = LongWait(lambda: _still_waiting(worker, names, state, purpose), clock)
    with blocking_region():
        while not clock.block(state.proceed_signal.wait, min(clock.now() + LOOK_AGAIN, end)):
            report.look()
            if clock.now() >= end:
                return False
            if not worker.agent.running:  # another thread has ended it: no worker will tell us anything any more
                raise NotInitialized(f"RPC is no longer running on this node ({worker.get_worker_info()})")
            worker.agent.peers.probe(names - set(state.gathered_objects))
    return True


@explains(_await)
def _explain_wait(variables: dict[str, Any], subject: Subject) -> list[WaitStatus] | None:
    """Name the workers that have not come, for observers."""
    names, state, purpose = variables.get("names"), variables.get("state"), variables.get("purpose", "")
    if names is None or state is None:
        return None
    if variables["worker"].subject is not subject:
        return []
    missing = tuple(sorted(set(names) - set(copied(state.gathered_objects))))
    kind = WaitKind.SHUTDOWN if purpose == "shutdown" else WaitKind.GATHERING
    what = f"{purpose}: {listed(list(missing))} {'has' if len(missing) == 1 else 'have'} not come"
    return [WaitStatus(kind=kind, text=what if missing else f"{purpose}: the outcome", workers=missing)]


def _ask(worker: Worker, name: str, func: Any, args: tuple[Any, ...], timeout: float) -> Future[Any]:
    """A call that does not count as the program's own."""
    peer = worker.peer(name)
    kind, packed, flags = pack_call(peer, func, args, None, _internal_rpc_pickler)
    return worker.agent.caller.call_async(peer, kind, packed, flags, timeout, func)


def _lead(
    api: Any, worker: Worker, state: AllGatherStates, sequence_id: str, names: set[str], timeout: float, purpose: str
) -> dict[str, Any]:
    me = worker.get_worker_info().name
    in_time = _await(state, worker, names - {me}, timeout, purpose)
    failure = state.failure
    if not in_time:
        missing = sorted(names - set(state.gathered_objects))
        failure = CallTimeout(
            f"{missing} timed out in _all_gather after {timeout:.2f} seconds. {me} waited for them."
            f"{_doubts(worker, missing)}"
        )
    outcome: object = dict(state.gathered_objects) if failure is None else failure
    here = names if failure is None else set(state.gathered_objects)
    errors = _tell(api, worker, sorted(here - {me}), (sequence_id, outcome), timeout)
    if failure is not None:
        raise failure
    dead = [peer for name in errors if (peer := worker.peer(name)).state == "dead"]
    if dead:
        raise WorkerLost(f"{purpose}: {dead[0].info} was lost before {me} could tell it the outcome: {dead[0].reason}")
    if errors:
        seconds = api.get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
        name, first = next(iter(errors.items()))
        raise RemoraError(
            f"Followers {sorted(errors)} timed out in _all_gather after {seconds:.2f} seconds. The first: {name}: {first}"
        ) from first
    return dict(state.gathered_objects)


def _tell(api: Any, worker: Worker, names: list[str], outcome: tuple[Any, ...], timeout: float) -> dict[str, Exception]:
    """Tell the followers; which of them did not take it, and why."""
    errors: dict[str, Exception] = {}
    started: dict[str, Future[Any]] = {}
    for name in names:
        try:
            started[name] = _ask(worker, name, api._broadcast_to_followers, outcome, timeout)
        except RuntimeError as error:
            errors[name] = error
    for name, future in started.items():
        try:
            future.wait()
        except (WorkerLost, CallNotSent) as error:
            if worker.peer(name).state != "left":  # one that left has heard it: that is why it left
                errors[name] = error
        except RuntimeError as error:  # it heard it, and could not take it
            errors[name] = error
    return errors


def _follow(
    api: Any,
    worker: Worker,
    state: AllGatherStates,
    sequence_id: str,
    obj: object,
    leader: str,
    timeout: float,
    purpose: str,
) -> dict[str, Any]:
    me = worker.get_worker_info().name
    try:
        _ask(worker, leader, api._gather_to_leader, (sequence_id, me, obj), timeout).wait()
    except RuntimeError:
        if not state.proceed_signal.is_set():  # else the leader has told us the end, and its answer does not matter
            peer = worker.peer(leader)
            if peer.gone:
                raise _lost(peer, me, purpose) from None
            raise
    in_time = _await(state, worker, {leader}, timeout, purpose)
    if state.failure is not None:
        raise state.failure
    if not in_time:
        raise CallTimeout(
            f"{leader} timed out in _all_gather after {timeout:.2f} seconds. {me} waited for it."
            f"{_doubts(worker, [leader])}"
        )
    return dict(state.gathered_objects)


def _doubts(worker: Worker, names: list[str]) -> str:
    """Describe what is known of the workers that were waited for in vain."""
    doubts = [f"{name} is suspected: {doubt}" for name in names if (doubt := worker.peer(name).suspicion)]
    return f" ({'; '.join(doubts)})" if doubts else ""


def settle(api: Any, worker: Worker, timeout: float) -> None:
    """Block until no call is under way on any worker.

    Every worker waits until it is idle, and tells how many calls it ever made. When the sum is the same twice in a
    row, no worker made a call in between, and none is running one that could make another.
    """
    end = worker.clock.now() + timeout if timeout else float("inf")
    before = -1
    while True:
        if not worker.agent.idle(end, "shutdown"):
            raise CallTimeout(
                f"{worker.get_worker_info()} still has calls under way after {timeout:.2f} seconds in shutdown"
            )
        worker.leaks = worker.references.table.leaks()  # while all are still here
        left = max(end - worker.clock.now(), 0.001) if timeout else 0
        made = sum(all_gather(api, worker, worker.calls_made, None, left, "shutdown").values())
        if made == before:
            return
        before = made
