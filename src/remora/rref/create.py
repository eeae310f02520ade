"""How a value comes to be on another worker, and what its creator learns of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from remora.agent.calls.call import Call
from remora.agent.calls.call_context import current_recording, pack_recorded
from remora.agent.calls.pack_errors import explain_arguments
from remora.agent.peers.manager import Peer
from remora.errors import CallNotSent, CallTimeout, OwnerDied, RemoraError, WorkerLost
from remora.rref.rref import RRef
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.messages import MessageType
from remora.wire.pack_scope import PackScope

if TYPE_CHECKING:
    from remora.rref.codec import References


def create(
    references: References, peer: Peer, kind: MessageType, target: tuple[Any, ...], what: object, flags: int, timeout: float
) -> RRef[Any]:
    """Ask `peer` to make a value; the reference to it is returned at once and may be used and shared at once."""
    rref = references.table.new_id()
    if peer is references.me:
        return _create_here(references, rref, kind, target, what, flags, timeout)
    table = references.table
    fork = table.new_id()
    # First: its destructor drops the fork, should an exception of a signal handler strike from here on.
    handle: RRef[Any] = RRef._to_fork(references, peer, rref, fork, kind == MessageType.SCRIPT_REMOTE_CALL)

    def settled(call: Call) -> None:
        error = call.error()
        if error is None:
            table.held.confirmed(fork)
        else:
            _creation_failed(references, peer, rref, fork, error)

    try:
        table.held.hold(rref, fork, peer.key)
        call = Call(peer, what, settled)
    except BaseException:
        table.held.remove(fork)
        raise
    try:
        _ask(references, call, kind, target, flags, timeout, rref, fork)
    except BaseException:
        if call.id not in peer.outgoing.pending and not call.settled:  # else it was sent: the owner counts the fork
            table.held.remove(fork)
        raise
    table.drain_inline()
    return handle


def _create_here(
    references: References,
    rref: RRefId,
    kind: MessageType,
    target: tuple[Any, ...],
    what: object,
    flags: int,
    timeout: float,
) -> RRef[Any]:
    """On this very worker: the call itself counts as a holder until it is answered."""
    table, me = references.table, references.me
    value = Value(rref, script=kind == MessageType.SCRIPT_REMOTE_CALL)
    handle: RRef[Any] = RRef._to_value(references, value)
    known = weakref.ref(handle)

    def settled(call: Call) -> None:
        error = call.error()
        alive = known()
        if error is not None and alive is not None:
            alive._creation_failed(_for_user(rref, error))
        if isinstance(error, CallTimeout):
            table.runner.tell_deleted(me.key, rref, rref)  # behind the call, which is still on its way
        else:
            table.owned.delete(rref, rref)
        if isinstance(error, CallNotSent):
            value.fail(_for_user(rref, error))

    try:
        table.owned.share(value, rref, me.key)
        _ask(references, Call(me, what, settled), kind, target, flags, timeout, rref, rref)
    except BaseException:
        table.owned.delete(rref, rref)
        raise
    return handle


def _ask(
    references: References,
    call: Call,
    kind: MessageType,
    target: tuple[Any, ...],
    flags: int,
    timeout: float,
    rref: RRefId,
    fork: ForkId,
) -> None:
    peer = call.peer
    scope = PackScope(peer, ordered=True, route=peer.ways.requests, shares_main=peer.shares_main)
    script = kind == MessageType.SCRIPT_REMOTE_CALL
    creates = (rref.created_on, rref.local_id, fork.created_on, fork.local_id, script)
    try:
        packed, more = pack_recorded(target, scope, current_recording.get(), creates)
    except BaseException as error:
        explain_arguments(error, peer, call.target, *target[-2:])
        raise
    flags |= more
    try:
        references.agent.start_call(peer, call, int(kind), packed, flags, timeout, urgent=False)
    except RemoraError:  # of ours: it was not sent
        call.take_back()
        raise


def _creation_failed(references: References, peer: Peer, rref: RRefId, fork: ForkId, error: BaseException) -> None:
    table = references.table
    if isinstance(error, WorkerLost) or peer.state != "alive":
        table.held.fail(fork, OwnerDied(f"{peer.info}, which was to own {rref}, is gone: {peer.reason}"))
    elif isinstance(error, CallNotSent):
        table.held.fail(fork, _for_user(rref, error))
        table.runner.tell_never_made(peer.key, rref, fork)
    else:
        table.held.mark_broken(fork, _for_user(rref, error))


def _for_user(rref: RRefId, error: BaseException) -> RemoraError:
    """What using the reference raises from now on. The words are those programs match on."""
    if isinstance(error, CallTimeout):
        text = f"RRef creation via rpc.remote() timed out, and it is possible that {rref} does not exist on its owner."
    else:
        text = f"RRef creation via rpc.remote() failed for {rref}: {error}"
    shown = RemoraError(text)
    shown.__cause__ = error
    return shown
