"""The contexts of one worker: made here or heard of, and released everywhere when their makers leave them."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from remora.agent.agent import Agent
from remora.agent.calls.call import Call
from remora.agent.calls.call_context import CallContext, Header, current_call_context
from remora.agent.peers.manager import Peer
from remora.agent.serving.dispatch import Request
from remora.autograd.context import LOCAL_BITS, Context
from remora.autograd.pass_table import PassTable
from remora.errors import RemoraError
from remora.vocabulary.messages import AutogradContextHeldReq, AutogradContextHeldResp, CleanupAutogradContextReq
from remora.wire.message_codec import encode, from_value, to_value

log = logging.getLogger("remora")

CLEANUP_REQ = int(CleanupAutogradContextReq.type)
HELD_REQ, HELD_RESP = int(AutogradContextHeldReq.type), int(AutogradContextHeldResp.type)
REMEMBERED = 1 << 14  # contexts released lately: a message of theirs that comes late must not bring them back


class Contexts:
    """The context registry that calls use (see `remora.agent.calls.call_context`)."""

    def __init__(self, agent: Agent, first_id: int, passes: PassTable) -> None:
        self._agent = agent
        self._passes = passes
        self._first = agent.me.id << LOCAL_BITS
        self._next_context = itertools.count(self._first + first_id).__next__
        self._next_message = itertools.count(self._first + first_id).__next__
        self._table: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.RLock()  # guards: _table and _released
        self.known: Callable[[int], Context | None] = self._table.get  # a context, if it is there (one look needs no lock)
        agent.dispatch.on(CleanupAutogradContextReq.type, self._clean_up, service=True)
        agent.dispatch.on(AutogradContextHeldReq.type, self._held, service=True)

    # Finding them.

    def enter(self, manager: ContextManager | None = None) -> Context:
        """Make a new context of this worker the current one. `manager` leaves it; without one, `_release_context` does."""
        current = current_call_context.get()
        if isinstance(current, Context) and current.is_abandoned:
            try:
                self._release(current.id, None)
            finally:
                current_call_context.set(None)
        elif current is not None and not getattr(current, "released", False):
            raise RuntimeError(
                f"Already have an autograd context id for this thread: {getattr(current, 'id', current)}. Contexts cannot "
                f"be nested; leave the first one, or use another thread."
            )
        context = Context(self._next_context(), self._next_message)
        context.manager = None if manager is None else weakref.ref(manager)
        try:
            with self._lock:
                self._table[context.id] = context
            current_call_context.set(context)
        except BaseException:  # of a signal handler: nothing will leave the context
            current_call_context.set(None)
            self._table.pop(context.id, None)
            raise
        return context

    def get(self, context_id: int) -> Context:
        """A context that is there."""
        context = self._table.get(context_id)
        if context is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return context

    def find(self, header: Header) -> CallContext:
        """The context that an arrived request belongs to. If it was released meanwhile: one that is released already, so
        that no worker gets a part of it that would never be released."""
        context_id = header[0]
        context = self._table.get(context_id)
        if context is not None:
            return context
        with self._lock:
            context = self._table.get(context_id) or Context(context_id, self._next_message)
            if context_id in self._released:
                context.release()
            else:
                self._table[context_id] = context
        return context

    def all(self) -> list[Context]:
        """Those that are there now."""
        with self._lock:
            return list(self._table.values())

    @property
    def largest_id(self) -> int:
        """The largest id that a context of this worker can have."""
        return self._first | (1 << LOCAL_BITS) - 1

    # Releasing them.

    def release(self, context_id: int) -> None:
        """Release a context here, and on every worker that has a part of it."""
        self.get(context_id)
        self._release(context_id, None)

    def release_again(self, context: Context) -> None:
        """Finish a release that an exception of a signal handler interrupted, wherever that was."""
        self._remove(context.id)
        self._end(context, None)

    def _release(self, context_id: int, told_by: Peer | None) -> None:
        context = self._remove(context_id)
        if context is not None:
            self._end(context, told_by)

    def _remove(self, context_id: int) -> Context | None:
        with self._lock:
            context = self._table.pop(context_id, None)
            self._released[context_id] = None
            while len(self._released) > REMEMBERED:
                self._released.popitem(last=False)
        return context

    def _end(self, context: Context, told_by: Peer | None) -> None:
        """To do it again does no harm: who has no part of the context takes no notice."""
        context_id = context.id
        context.released = True
        if told_by is None:
            context.release()
        else:
            self._agent.pool.call_idle(context.release)
        others = context.known_workers - {self._agent.me.id, told_by.id if told_by is not None else -1}
        for each in self._passes.release(context_id):
            each.abort(RuntimeError(f"the autograd context {context_id} was released during a backward pass"))
        for worker in others:
            self._tell(worker, context_id)

    def _tell(self, worker: int, context_id: int) -> None:
        try:
            peer = self._agent.peers.find(worker)
        except RemoraError as error:  # it is gone, and its part of the context with it
            log.debug("context %d could not be released on worker %d: %s", context_id, worker, error)
        else:
            message = CleanupAutogradContextReq(context_id)
            self._agent.retries.send(peer, CLEANUP_REQ, encode(message), message.type.name)

    def _clean_up(self, request: Request) -> None:
        self._release(request.message(CleanupAutogradContextReq).context_id, request.caller)
        request.drop()

    def on_peer_gone(self, peer: Peer) -> None:
        """A worker is gone: release its contexts, and ask the creators of contexts that it gave us a part of."""
        for context in self.all():
            if context.creator == peer.id:
                self._release(context.id, peer)
            elif peer.id in context.heard_from and context.creator != self._agent.me.id:
                self._ask(context)
            context.known_workers.discard(peer.id)

    def _ask(self, context: Context) -> None:
        """Let the creator of a context know that we have a part of it, and release that if the context is gone."""

        def answered(call: Call) -> None:
            if call.error() is None and not from_value(AutogradContextHeldResp, call.value(), call.peer.name).held:
                self._release(context.id, None)

        try:
            peer = self._agent.peers.find(context.creator)
            call = Call(peer, "an autograd context", answered)
            packed = encode(AutogradContextHeldReq(context.id))
            self._agent.caller.start_call(peer, call, HELD_REQ, packed, 0, 0.0, control=True)
        except RemoraError:
            self._release(context.id, None)  # its creator is gone, too

    def _held(self, request: Request) -> None:
        context = self._table.get(request.message(AutogradContextHeldReq).context_id)
        if context is not None:
            context.known_workers.add(request.caller.id)
        request.reply(HELD_RESP, to_value(AutogradContextHeldResp(context is not None)))


class ContextManager:
    """`with context() as context_id`: calls made inside, on this thread or in this coroutine, belong to one context."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._context: Context | None = None

    def __enter__(self) -> int:
        self._context = self._contexts.enter(self)
        return self._context.id

    def __exit__(self, *error: Any) -> None:
        assert self._context is not None
        try:
            if sys.is_finalizing():
                return  # of a generator that was never ended; a thread that is gone may hold any lock
            current_call_context.set(None)  # what was before, if anything, was released
            if not self._context.released:
                self._contexts.release(self._context.id)
        except BaseException:  # of a signal handler: no other frame would do the rest
            current_call_context.set(None)
            self._contexts.release_again(self._context)
            raise
