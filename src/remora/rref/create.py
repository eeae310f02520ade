"""`remote()`: asks a worker to make a value, and returns a reference to it at once."""

from __future__ import annotations

import weakref
from typing import Any

from remora.agent.calls.call import Call
from remora.agent.calls.call_context import current_call_context, pack_recorded
from remora.agent.calls.pack_errors import explain_arguments
from remora.agent.peers.manager import Peer
from remora.errors import (
    CallNotSent,
    CallTimeout,
    OwnerDied,
    ProtocolError,
    RemoraError,
    SerializationError,
    WorkerLost,
)
from remora.names import Word, calling_line, name_parts
from remora.rref.handle import Handle
from remora.rref.references import References
from remora.rref.rref import RRef
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.messages import MessageType
from remora.wire import ref_header
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed

SCRIPT_REMOTE_CALL = int(MessageType.SCRIPT_REMOTE_CALL)
_EMPTY = PackScope()  # of a message that no reducer sees: it has no references, and nothing to undo


def create(
    references: References, peer: Peer, kind: int, target: tuple[Any, ...], what: object, flags: int, timeout: float
) -> RRef[Any]:
    """Ask `peer` to make a value; the reference to it is returned at once and may be used and shared at once."""
    rref = references.table.state.new_id()
    if peer is references.me:
        return _create_here(references, rref, kind, target, what, flags, timeout)
    table = references.table
    fork = table.state.new_id()
    # First: its destructor drops the fork, should an exception of a signal handler strike from here on.
    script = kind == SCRIPT_REMOTE_CALL
    handle = Handle(references, peer, rref, fork, None, script)

    def settled(call: Call) -> None:
        error = call.error()
        if error is None:
            table.held.confirmed(fork)
        else:
            _creation_failed(references, peer, rref, fork, error)

    try:
        table.held.hold(rref, fork, peer.key, name_parts(what), calling_line() if references.sites else "")
        call = Call(peer, what, settled)
    except BaseException:
        table.held.remove(fork)
        raise
    try:
        _ask(references, peer, call, kind, target, flags, timeout, (*rref, *fork, script))
    except BaseException:
        if call.id not in peer.outgoing.pending and not call.settled:  # else it was sent: the owner counts the fork
            table.held.remove(fork)
        raise
    table.held.releases.drain_inline()
    return RRef._of(handle)


def _create_here(
    references: References,
    rref: RRefId,
    kind: int,
    target: tuple[Any, ...],
    what: object,
    flags: int,
    timeout: float,
) -> RRef[Any]:
    """Make a value on this very worker. The call itself counts as a holder until it is answered."""
    table, me = references.table, references.me
    script = kind == SCRIPT_REMOTE_CALL
    value = Value(rref, script=script)
    if references.sites:
        value.site = calling_line()
    handle = Handle(references, me, rref, None, value, script)
    known = weakref.ref(handle)

    def settled(call: Call) -> None:
        error = call.error()
        alive = known()
        if error is not None and alive is not None:
            alive.creation_failed(_for_user(rref, error))
        if isinstance(error, CallTimeout):
            table.runner.tell_deleted(me.key, rref, rref)  # behind the call, which is still on its way
        else:
            table.owned.delete(rref, rref)
        if isinstance(error, CallNotSent):
            value.fail(_for_user(rref, error))

    try:
        table.owned.share(value, rref, me.key)
        _ask(references, me, Call(me, what, settled), kind, target, flags, timeout, (*rref, *rref, script))
    except BaseException:
        table.owned.delete(rref, rref)
        raise
    return RRef._of(handle)


def _ask(
    references: References,
    peer: Peer,
    call: Call,
    kind: int,
    target: tuple[Any, ...],
    flags: int,
    timeout: float,
    creates: ref_header.Creates,
) -> None:
    context = current_call_context.get()
    if context is None and type(target[0]) is int and not target[1] and not target[2]:  # a number, and no arguments
        packed = Packed(peer.outgoing.announced.bare[target[0]].body, [], [], [])
        more = ref_header.attach(packed, _EMPTY, creates)
    else:
        scope = PackScope(peer, ordered=True, route=peer.routes.requests, shares_main=peer.shares_main)
        try:
            packed, more = pack_recorded(target, scope, context, creates)
        except BaseException as error:
            args, kwargs = target[-2:] if type(call.target) is not Word else target[-2][2:]  # those of a method (proxy.py)
            explain_arguments(error, peer, call.target, args, kwargs)
            raise
    flags |= more
    try:
        references.agent.caller.start_call(peer, call, kind, packed, flags, timeout, urgent=False)
    except RemoraError:  # of ours: it was not sent
        call.rollback()
        raise


def _creation_failed(references: References, peer: Peer, rref: RRefId, fork: ForkId, error: BaseException) -> None:
    table = references.table
    if isinstance(error, WorkerLost) or peer.state != "alive":
        table.held.fail(fork, OwnerDied(f"{peer.info}, which was to own {rref}, is gone: {peer.reason}"))
    elif isinstance(error, CallNotSent):
        table.held.fail(fork, _for_user(rref, error))
        table.runner.tell_never_made(peer.key, rref, fork)
    else:
        if isinstance(error, (SerializationError, ProtocolError)):
            # Perhaps the owner could not even read which value it was to make: what waits for it there is to fail. (No fork
            # has the number of a value: if it was made, nothing comes of this.)
            table.runner.tell_never_made(peer.key, rref, rref)
        table.held.mark_broken(fork, _for_user(rref, error))


def _for_user(rref: RRefId, error: BaseException) -> RemoraError:
    """The error that every use of the reference raises from now on. Programs match on these words."""
    if isinstance(error, CallTimeout):
        text = f"RRef creation via rpc.remote() timed out, and it is possible that {rref} does not exist on its owner."
    else:
        text = f"RRef creation via rpc.remote() failed for {rref}: {error}"
    shown = RemoraError(text)
    shown.__cause__ = error
    return shown
