"""References on the wire: a handle makes a fork for the receiver, and the receiver makes a handle of it.

A message with references begins with a header: the value it makes, if any, and the forks inside. The thread that reads the
message makes their handles at once, in order of arrival, before anything is unpickled. So every fork that was sent has a
holder, though the rest may fail to unpickle, or its caller may have given up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from remora.agent.calls.error_copies import fresh
from remora.agent.peers.manager import Peer
from remora.errors import OwnerDied, ProtocolError, RendezvousError
from remora.rendezvous.record import WorkerRecord
from remora.rref.handle import Handle
from remora.rref.references import References
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId
from remora.vocabulary.ids import GloballyUniqueId
from remora.wire import ref_header
from remora.wire.frames import Body
from remora.wire.pack_scope import ForkData, PackScope

NO_PARENT = -1


class Arrival:
    """The references of one message that arrived. Unpickling the message picks up their handles."""

    __slots__ = ("_references", "created", "handles", "pending")

    def __init__(self, references: References) -> None:
        self._references = references
        self.handles: list[Handle | None] = []  # in the order of the header; None: picked up
        self.pending: list[ForkId] = []  # the owner has yet to count these
        self.created: Value | None = None  # the value that the call in this message makes

    def when_confirmed(self, ready: Callable[[], None]) -> None:
        """Call `ready` when the owners count all of them."""
        self._references.table.held.when_all_confirmed(self.pending, ready)


def serialize(handle: Handle, scope: PackScope | None) -> ForkData:
    """Make a fork for the peer of the scope. Without a scope, for a receiver that is not known yet."""
    references, owner = handle.references, handle.owner
    to: Any = owner if scope is None else scope.peer
    table = references.table
    child = table.state.new_id()
    parent = references.me.id
    if handle.creation_error is not None:
        raise fresh(handle.creation_error)
    if handle.value is not None:
        if scope is not None:  # before the fork is made: an undo of nothing does no harm
            scope.undo.append(partial(table.owned.delete, handle.rref_id, child))
        table.owned.share(handle.value, child, to.key)
    else:
        handle.check_usable("fork an UserRRef")
        assert handle.fork is not None
        if scope is not None and scope.ordered and to is owner:
            parent = NO_PARENT  # our goodbye cannot overtake this message: the owner has the value when it comes
        else:
            if scope is not None:
                scope.undo.append(partial(table.held.accepted, child))
            table.held.share(handle.fork, child, to.key)
    rref, kind = handle.rref_id, "script" if handle.script else "PyObject"
    data = (owner.id, rref.created_on, rref.local_id, child.created_on, child.local_id, parent, kind)
    if scope is not None:
        record = owner.record.to_json() if references.dynamic else b""
        scope.attachments.append((data, owner.record.incarnation, record))
    return data


def deserialize(references: References, data: ForkData) -> Handle:
    """The receiving end of `serialize` without a scope."""
    return _adopt(references, data, references.agent.peers.find(data[5]), None)


def arrive(references: References, sender: Peer, body: Body) -> tuple[Body, Arrival]:
    """Make handles of the references in a message, before anything else is done with it. Return its body without their
    header, and the handles."""
    arrival = Arrival(references)
    creates, forks, rest = ref_header.detach(body)
    if creates is not None:
        value_on, value, fork_on, fork_id, script = creates
        rref, fork = GloballyUniqueId(value_on, value), GloballyUniqueId(fork_on, fork_id)
        arrival.created = references.table.owned.create(rref, fork, sender.key, script)
    for data, incarnation, record in forks:
        owner = _record_of(record) if record else None
        arrival.handles.append(_adopt(references, data, sender, arrival, incarnation, owner))
    return rest, arrival


def _record_of(data: bytes) -> WorkerRecord:
    try:
        return WorkerRecord.from_json(data)
    except RendezvousError:
        raise ProtocolError(f"a message carries a reference, and its owner's record is damaged: {data[:80]!r}") from None


def _adopt(
    references: References,
    data: ForkData,
    sender: Peer,
    arrival: Arrival | None,
    incarnation: str | None = None,
    record: WorkerRecord | None = None,
) -> Handle:
    me, table, peers = references.me, references.table, references.agent.peers
    rref, fork = GloballyUniqueId(data[1], data[2]), GloballyUniqueId(data[3], data[4])
    if data[0] == me.id:
        if incarnation is not None and incarnation != me.record.incarnation:
            # A value of a worker that had our id before us. Its holder does not know yet.
            value = Value(rref)
            value.fail(OwnerDied(f"the worker {me.name} that owned {rref} is gone; this is another one"))
            table.runner.tell_accepted(sender.key, fork)  # its parent need not wait for it to be counted
        else:  # from here on its handle keeps the value, and the fork is not needed
            value = table.owned.received_by_owner(rref, sender.key)
            if sender is me:
                table.owned.delete(rref, fork)
            elif data[5] != NO_PARENT:
                table.runner.tell_accepted(sender.key, fork)
        return Handle(references, me, rref, None, value, value.script)
    script = data[6] == "script"
    if record is not None:
        peers.add_unless_known(record)  # in a dynamic group, the news that the owner joined may be on its way
    owner = peers.find(data[0])
    if owner.state != "alive" or (incarnation is not None and owner.record.incarnation != incarnation):
        table.state.failures[fork] = OwnerDied(f"the worker {owner.name} that owned {rref} is gone")
        table.runner.tell_accepted(sender.key, fork)  # its parent need not wait for it to be counted
        return Handle(references, owner, rref, fork, None, script)
    confirmed = table.held.adopt(rref, fork, owner.key, sender.key)
    handle = Handle(references, owner, rref, fork, None, script)
    if not confirmed and arrival is not None:
        arrival.pending.append(fork)
    return handle
