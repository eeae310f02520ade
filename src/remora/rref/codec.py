"""References on the wire: what a message that carries some says first, how they arrive, and who answers for them.

A message with references begins with a preamble: the value it makes, if any, and the forks inside. The thread that reads
the message takes note of them at once, in order of arrival, before anything is unpickled. So it does not matter whether
the rest can be unpickled, or whether anybody still waits for it: every fork that was sent is held by somebody.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any, cast

import torch

from remora.agent.agent import Agent
from remora.agent.calls.future import fresh
from remora.agent.peers.manager import Peer
from remora.agent.serving.dispatch import Request
from remora.agent.serving.execution import Execution, Held
from remora.errors import OwnerDied, RemoraError
from remora.rendezvous.record import WorkerRecord
from remora.rref.create import create
from remora.rref.proxy import Proxy, type_of
from remora.rref.ref_table import Table
from remora.rref.rref import RRef
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.ids import GloballyUniqueId
from remora.vocabulary.messages import MessageType
from remora.wire import ref_header
from remora.wire.fast_pickle import REFERENCE_CODE, by_number, register_writer
from remora.wire.frames import RECORDED, Frame
from remora.wire.id_codec import unpack_id, unpack_ids
from remora.wire.pack_scope import PackScope, current_unpack_scope
from remora.wire.pickler import register_reducer

ForkData = tuple[
    int, int, int, int, int, int, str
]  # owner, value's id (2), fork's id (2), parent, "script" or "PyObject"

NOBODY = -1
RREF_ACK = int(MessageType.RREF_ACK)
REMOTE_RET = int(MessageType.REMOTE_RET)
FETCH_RET, SCRIPT_FETCH_RET = int(MessageType.PYTHON_RREF_FETCH_RET), int(MessageType.SCRIPT_RREF_FETCH_RET)


class Arrival:
    """The references of one message that arrived: taken note of, waiting to be picked up while it is unpickled."""

    __slots__ = ("_references", "created", "handles", "pending")

    def __init__(self, references: References) -> None:
        self._references = references
        self.handles: list[RRef[Any] | None] = []  # in the order of the preamble; None: picked up
        self.pending: list[ForkId] = []  # the owner has yet to count these
        self.created: Value | None = None  # what the call in this message makes

    def when_confirmed(self, ready: Callable[[], None]) -> None:
        """Call `ready` when the owners count all of them."""
        self._references.table.held.when_all_confirmed(self.pending, ready)


class References:
    """Everything about references on one worker."""

    def __init__(self, agent: Agent, first_id: int = 0, dynamic: bool = False) -> None:
        self.agent = agent
        self.me: Peer = agent.peers.me
        self.dynamic = dynamic  # workers come and go: who sends a reference says who its owner is
        self.table = Table(agent, first_id)
        self.differentiate: Callable[[RRef[Any], int, bool], None] | None = None  # set by distributed autograd
        self.execution: Execution = agent.execution
        agent.peers.arrivals = self.arrive
        on = agent.dispatch.on
        on(MessageType.PYTHON_REMOTE_CALL, partial(self._make, self.execution.run_function))
        on(MessageType.SCRIPT_REMOTE_CALL, partial(self._make, self.execution.run_script))
        on(MessageType.PYTHON_RREF_FETCH_CALL, self._fetch, inline=True)  # a goodbye behind it must not come first
        on(MessageType.SCRIPT_RREF_FETCH_CALL, self._fetch, inline=True)
        on(MessageType.RREF_FORK_REQUEST, self._fork_request, inline=True)
        on(MessageType.RREF_USER_DELETE, self._user_delete, inline=True)
        on(MessageType.RREF_CHILD_ACCEPT, self._child_accept, inline=True)

    # Leaving.

    def serialize(self, rref: RRef[Any], scope: PackScope | None) -> ForkData:
        """Hand a reference to the peer of the scope: make a fork for it."""
        if rref._references is not self:
            raise RemoraError(f"{rref} belongs to another worker of this process, or to one that was shut down")
        to: Any = rref._owner if scope is None else scope.peer
        child = self.table.new_id()
        parent = self.agent.me.id
        if rref._creation_error is not None:
            raise fresh(rref._creation_error)
        if rref._value is not None:
            if scope is not None:
                scope.undo.append(partial(self.table.owned.delete, rref._rref_id, child))  # first: it may be for nothing
            self.table.owned.share(rref._value, child, to.key)
        else:
            rref._check_usable("fork an UserRRef")
            assert rref._fork is not None
            if scope is not None and scope.ordered and to is rref._owner:
                parent = NOBODY  # our goodbye cannot overtake this message: the owner has the value when it comes
            else:
                if scope is not None:
                    scope.undo.append(partial(self.table.held.accepted, child))  # first: it may be for nothing
                self.table.held.share(rref._fork, child, to.key)
        rid, kind = rref._rref_id, "script" if rref._script else "PyObject"
        data = (rref._owner.id, rid.created_on, rid.local_id, child.created_on, child.local_id, parent, kind)
        if scope is not None:
            owner = rref._owner
            scope.attachments.append((data, owner.record.incarnation, owner.record if self.dynamic else None))
        return data

    # Arriving.

    def arrive(self, sender: Peer, frame: Frame) -> Arrival:
        """Take note of the references in a message, before anything else is done with it."""
        arrival = Arrival(self)
        creates, forks, frame.body = ref_header.detach(frame.body)
        if creates is not None:
            value_on, value, fork_on, fork_id, script = creates
            rref, fork = GloballyUniqueId(value_on, value), GloballyUniqueId(fork_on, fork_id)
            arrival.created = self.table.owned.create(rref, fork, sender.key, script)
        for data, incarnation, record in forks:
            arrival.handles.append(self._adopt(data, sender, arrival, incarnation, record))
        return arrival

    def _adopt(
        self,
        data: ForkData,
        sender: Peer,
        arrival: Arrival | None,
        incarnation: str | None = None,
        record: WorkerRecord | None = None,
    ) -> RRef[Any]:
        if data[0] == self.me.id:
            former = incarnation is not None and incarnation != self.me.record.incarnation
            return self._of_a_former_worker(data, sender) if former else self._received_by_owner(data, sender)
        rref, fork = GloballyUniqueId(data[1], data[2]), GloballyUniqueId(data[3], data[4])
        script = data[6] == "script"
        if record is not None:
            self.agent.peers.add_unless_known(record)  # in a dynamic group, news of it may be on its way
        owner = self.agent.peers.find(data[0])
        if owner.state != "alive" or (incarnation is not None and owner.record.incarnation != incarnation):
            self.table.state.failures[fork] = OwnerDied(f"the worker {owner.name} that owned {rref} is gone")
            self.table.runner.tell_accepted(sender.key, fork)  # its parent need not wait for it to be counted
            return RRef._to_fork(self, owner, rref, fork, script)
        confirmed = self.table.held.adopt(rref, fork, owner.key, sender.key)
        handle: RRef[Any] = RRef._to_fork(self, owner, rref, fork, script)
        if not confirmed and arrival is not None:
            arrival.pending.append(fork)
        return handle

    def _received_by_owner(self, data: ForkData, sender: Peer) -> RRef[Any]:
        """A reference to a value of ours arrived: from here on the handle keeps the value, and the fork is not needed."""
        rref = GloballyUniqueId(data[1], data[2])
        value = self.table.owned.received_by_owner(rref, sender.key)
        if sender is self.me:
            self.table.owned.delete(rref, GloballyUniqueId(data[3], data[4]))
        elif data[5] != NOBODY:
            self.table.runner.tell_accepted(sender.key, GloballyUniqueId(data[3], data[4]))
        return RRef._to_value(self, value)

    def _of_a_former_worker(self, data: ForkData, sender: Peer) -> RRef[Any]:
        """A reference arrived to a value of a worker that had our id before us; its holder does not know yet."""
        rref, fork = GloballyUniqueId(data[1], data[2]), GloballyUniqueId(data[3], data[4])
        value = Value(rref)
        value.fail(OwnerDied(f"the worker {self.me.name} that owned {rref} is gone; this is another one"))
        self.table.runner.tell_accepted(sender.key, fork)  # its parent need not wait for it to be counted
        return RRef._to_value(self, value)

    def deserialize(self, data: ForkData) -> RRef[Any]:
        """The receiving end of `_serialize`."""
        return self._adopt(data, self.agent.peers.find(data[5]), None)

    # Answering.

    def _make(self, run: Callable[..., None], request: Request) -> None:
        """Run the function whose result becomes a value here; answer when it is there."""
        arrival: Arrival = request.frame.arrival
        value = arrival.created
        assert value is not None

        def finish(held: Held, error: BaseException | None) -> None:
            result = held.pop() if held else None
            request.acknowledge(REMOTE_RET, value.settle, result, error)  # who waits for the value is often the caller

        try:
            target = request.target()
        except BaseException as error:
            value.fail(error)
            raise
        run(request, target, finish)

    def _fetch(self, request: Request) -> None:
        frame = request.frame
        rref = cast(RRefId, request.unpack()) if frame.flags & RECORDED else unpack_id(frame.body)
        self.table.owned.when_known(rref, partial(self._fetch_value, request, rref))

    def _fetch_value(self, request: Request, rref: RRefId, value: Value | None) -> None:
        if value is None:
            request.fail(RemoraError(f"{rref} is not known to its owner {self.me.info}"))
            return
        kind = SCRIPT_FETCH_RET if value.script else FETCH_RET
        if not value.watch(partial(self._answer, request, kind, value)):
            self.agent.pool.submit_system(value.tell)  # not here: to pack it may run code of the program

    def _answer(self, request: Request, kind: int, value: Value) -> None:
        if not request.has_room(self._answer, kind, value):
            return  # the caller does not read its answers
        if value.error is not None:
            request.fail(value.error, value.stack)
        else:
            request.reply(kind, value.get())

    def _fork_request(self, request: Request) -> None:
        rref, fork = unpack_ids(request.frame.body)
        self.table.owned.count(rref, fork, request.caller.key)
        request.reply(RREF_ACK, None)

    def _user_delete(self, request: Request) -> None:
        body = memoryview(request.frame.body)
        self.table.owned.delete_all(unpack_ids(body[1:]), never_made=bool(body[0]))
        request.acknowledge(RREF_ACK)

    def _child_accept(self, request: Request) -> None:
        self.table.held.accepted(unpack_id(request.frame.body))
        request.acknowledge(RREF_ACK)

    # Asking.

    def remote(
        self, peer: Peer, kind: MessageType, target: tuple[Any, ...], what: object, flags: int, timeout: float
    ) -> RRef[Any]:
        """Have `peer` make a value, and return a reference to it at once."""
        return create(self, peer, kind, target, what, flags, timeout)

    def proxy(self, rref: RRef[Any], api: str, timeout: float) -> Any:
        """See `remora.rref.proxy`."""
        return Proxy(rref, api, timeout)

    def type_of(self, rref: RRef[Any], timeout: float, blocking: bool) -> Any:
        """See `remora.rref.proxy`."""
        return type_of(rref, timeout, blocking)

    def backward(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        """Backpropagate from the value."""
        assert self.differentiate is not None
        self.differentiate(rref, context_id, retain_graph)

    def check_value(self, value: object, type_hint: object) -> None:
        """PyTorch asks for the interface of a ScriptModule, and for none otherwise."""
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )

    def describe(self, rref: RRef[Any]) -> str:
        """The state of a reference, for people."""
        if rref._value is not None:
            state = "being made" if not rref._value.ready else ("failed" if rref._value.error else "ready")
            return f"{state} on {self.me.name}"
        assert rref._fork is not None
        if rref._creation_error is not None or rref._fork in self.table.state.failures:
            return f"unusable, of {rref._owner.name}"
        return f"{'confirmed' if rref.confirmed_by_owner() else 'pending'}, of {rref._owner.name}"


def _attach(rref: RRef[Any], scope: PackScope) -> int:
    """Hand a reference to the peer of the scope. Its number among those of the message."""
    if not isinstance(scope.peer, Peer):
        if not rref.is_owner():
            rref._check_usable("fork an UserRRef")
        rref.__reduce_ex__(5)
    rref._references.serialize(rref, scope)
    return len(scope.attachments) - 1


def _reduce(rref: RRef[Any], scope: PackScope) -> tuple[Any, ...]:
    return _rebuild, (_attach(rref, scope),)


def _write(rref: RRef[Any], scope: PackScope) -> bytes:
    """What pickle makes of `_reduce`."""
    return _BY_NUMBER + _NUMBER.pack(_attach(rref, scope)) + _REBUILT


def _rebuild(number: int) -> RRef[Any]:
    scope = current_unpack_scope()
    arrival = getattr(scope, "arrival", None)
    if arrival is None:
        raise RemoraError("a reference can only be rebuilt from a call")
    handle: RRef[Any] = arrival.handles[number]
    arrival.handles[number] = None
    return handle


_BY_NUMBER, _NUMBER, _REBUILT = by_number(REFERENCE_CODE) + pickle.BININT, Struct("<i"), pickle.TUPLE1 + pickle.REDUCE

register_reducer(RRef, _reduce)
register_writer(RRef, _write)
copyreg.add_extension(_rebuild.__module__, _rebuild.__qualname__, REFERENCE_CODE)
