"""What the workers write to each other in a backward pass, and what each does with it. Not how a pass begins.

A pass has two rounds. In the first (SMART alone) a worker that its graph led to received tensors tells their senders, which
do the same with theirs; each answers when its own part of the search has been answered. In the second the gradients flow
along the same ways; each parcel is answered when everything it set going is done (see `ledger`). A worker that fails says
so in its answer, and the failure travels back to the worker that began, which ends the pass on all others. No thread waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from remora.agent.agent import Agent
from remora.agent.calls import UNSET_TIMEOUT, Call
from remora.agent.dispatch import Request
from remora.agent.futures import Future
from remora.agent.peers import Peer
from remora.autograd.blame import Blame, blame
from remora.autograd.contexts import Contexts
from remora.autograd.errands import Errand
from remora.autograd.nodes import SEND_NAME
from remora.autograd.passes import Owed, Parcel, Part, Pass, PassId
from remora.autograd.record import Context
from remora.devices import streams
from remora.errors import RemoraError
from remora.vocabulary.messages import MessageType
from remora.wire.pickling import pack
from remora.wire.scopes import PackScope

GRADIENTS, GRADIENTS_DONE = MessageType.BACKWARD_AUTOGRAD_REQ, MessageType.BACKWARD_AUTOGRAD_RESP
PART, PART_DONE = MessageType.BACKWARD_PART_REQ, MessageType.BACKWARD_PART_RESP
_GRADIENTS, _GRADIENTS_DONE = int(GRADIENTS), int(GRADIENTS_DONE)
END, END_DONE = MessageType.BACKWARD_END_REQ, MessageType.BACKWARD_END_RESP

Answer = tuple[Blame | None, Owed] | None  # how it failed, and what is waited for; None: there is nothing to say
_ALL_WELL: tuple[Blame | None, Owed] = (None, {})
Key = tuple[int, int, int, bool, bool]  # what a message says of its pass


class Correspondence:
    """The passes of one worker, and the messages about them."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self.agent = agent
        self.contexts = contexts
        agent.dispatch.on(GRADIENTS, self._on_gradients)
        agent.dispatch.on(PART, self._on_part, service=True)
        agent.dispatch.on(END, self._on_end, service=True)
        agent.peers.obituaries.append(self._bury)

    # Passes of this worker.

    def open(self, context: Context, id: PassId, smart: bool, retain_graph: bool) -> Pass:
        """The pass of that name, made if it is new here."""
        with context.lock:
            if context.released:
                context.check()
            if id in context.ended:
                raise RuntimeError(f"the backward pass {id.number} of worker {id.root} is over")
            found = context.passes.get(id)
            if found is None:
                found = context.passes[id] = Pass(id, context, smart, retain_graph)
            return found

    def _found(self, key: Key) -> Pass:
        context_id, root, number, smart, retain_graph = key
        return self.open(self.contexts.get(context_id), PassId(root, number), smart, retain_graph)

    def close(self, this: Pass) -> None:
        with this.context.lock:
            if this.context.passes.pop(this.id, None) is not None:
                this.context.ended[this.id] = this.told

    def _key(self, this: Pass) -> Key:
        return this.context.id, this.id.root, this.id.number, this.smart, this.retain_graph

    # Telling others.

    def ask_all(self, this: Pass, parts: dict[Peer, Part], errand: Errand[Blame]) -> None:
        for peer, part in parts.items():
            self._call(this, errand, peer, PART, (self._key(this), part))

    def deliver(self, this: Pass, errand: Errand[Blame], peer: Peer, parcel: Parcel) -> None:
        self._call(this, errand, peer, GRADIENTS, (self._key(this), None, parcel))

    def deliver_with_part(self, this: Pass, peer: Peer, part: Part, parcel: Parcel) -> None:
        """Both rounds in one message, and wait for the answer. For a pass that goes to one worker and cannot come back:
        when that one has found everybody who takes part, all have been found."""
        packed = pack((self._key(this), part, parcel), PackScope(peer, route=peer.ways.gradients))
        answer: Answer = self.agent.call(peer, _GRADIENTS, packed, packed.flags, UNSET_TIMEOUT, "the backward pass")
        failure, owed = answer or _ALL_WELL
        self.learn(this, owed)
        if failure is not None:
            raise failure.error()

    def _call(self, this: Pass, errand: Errand[Blame], peer: Peer, kind: MessageType, content: object) -> None:
        errand.begin()

        def settled(call: Call) -> None:
            try:
                failure, owed = call.value() or _ALL_WELL
            except BaseException as error:
                failure, owed = blame(error, self.agent.me), {}
            self.learn(this, owed)
            errand.finish(failure)

        call = Call(peer, "the backward pass", settled)
        try:
            packed = pack(content, PackScope(peer, route=peer.ways.gradients))
            self.agent.start_call(peer, call, int(kind), packed, packed.flags, UNSET_TIMEOUT)
        except Exception as error:
            errand.finish(blame(error, self.agent.me))

    def learn(self, this: Pass, owed: Owed) -> None:
        """FAST: take note of what others wait for, and of what we do."""
        if not this.smart:
            this.learn({**owed, self.agent.me.id: (this.arrived, this.owed)})

    # What others tell.

    def _on_part(self, request: Request) -> None:
        key, part = cast("tuple[Key, Part]", request.unpack())
        errand: Errand[Blame] = Errand(lambda failure: request.reply(int(PART_DONE), _answer(failure, {})))

        def look() -> None:
            this = self._found(key)
            self.ask_all(this, this.take_part(part), errand)

        self._act(errand, look)

    def _on_gradients(self, request: Request) -> None:
        content: Any = request.unpack()
        key, part, parcel = content
        try:
            this = self._found(key)
        except RuntimeError as error:
            request.reply(_GRADIENTS_DONE, _answer(blame(error, self.agent.me), {}))
            return
        this.serve()
        errand: Errand[Blame] = Errand(partial(self._answer, request, this))
        moment = streams.moment() if streams.watched else None

        def feed() -> None:
            if moment is not None:
                moment.join(parcel)
            shown((SEND_NAME for _ in parcel), this.feed, parcel, partial(self.deliver, this, errand))

        job = partial(self._act, errand, feed)
        if part is not None:
            self._search_first(this, part, errand, job)
        elif this.desk is not None:
            this.desk.put(job)
        else:
            job()

    def _search_first(self, this: Pass, part: Part, errand: Errand[Blame], job: Callable[[], None]) -> None:
        """The first round before the second: see `deliver_with_part`."""
        try:
            asked = this.take_part(part)
        except BaseException as error:
            errand.finish(blame(error, self.agent.me))
            return
        if not asked:
            job()
            return

        def found(failure: Blame | None) -> None:
            if failure is not None:
                errand.finish(failure)
            else:
                self.agent.crew.submit(job)  # answers come on threads that must not be kept

        search: Errand[Blame] = Errand(found)
        self._act(search, partial(self.ask_all, this, asked, search))

    def _act(self, errand: Errand[Blame], act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errand.finish(blame(error, self.agent.me))
        else:
            errand.finish()

    def _answer(self, request: Request, this: Pass, failure: Blame | None) -> None:
        self.learn(this, {})
        if this.served():
            self.close(this)
        request.reply(_GRADIENTS_DONE, _answer(failure, this.owed_everywhere))

    # The end of one that failed.

    def end(self, this: Pass, why: Blame) -> Future[Blame | None]:
        """Have everybody forget the pass. The future is done when nobody works on it any more."""
        quiet: Future[Blame | None] = Future(f"the end of {this!r}")
        errand: Errand[Blame] = Errand(quiet._succeed)
        self._end_here(this.context, this.id, why, self._key(this), None, errand)
        errand.finish()
        return quiet

    def _end_here(
        self, context: Context, id: PassId, why: Blame, key: Key, told_by: Peer | None, errand: Errand[Blame]
    ) -> None:
        """End a pass on this worker, and on those that we gave a part in it."""
        with context.lock:
            this = context.passes.pop(id, None)
            told = this.told if this is not None else context.ended.get(id, set())
            context.ended[id] = set()
        if this is not None:
            errand.begin()
            this.abort(why.error(), errand.finish)
        for peer in told - {told_by}:
            self._send_end(peer, key, why, errand)

    def _send_end(self, peer: Peer, key: Key, why: Blame, errand: Errand[Blame]) -> None:
        errand.begin()
        call = Call(peer, "the end of a backward pass", lambda call: errand.finish())
        try:
            self.agent.start_call(peer, call, int(END), pack((key, why)), 0, UNSET_TIMEOUT, control=True)
        except RemoraError:
            errand.finish()  # it is gone, and the pass with it

    def _on_end(self, request: Request) -> None:
        key, why = cast("tuple[Key, Blame]", request.unpack())
        errand: Errand[Blame] = Errand(lambda _: request.reply(int(END_DONE), None))
        context = self.contexts.known(key[0])
        if context is not None:
            self._end_here(context, PassId(key[1], key[2]), why, key, request.caller, errand)
        errand.finish()

    def _bury(self, peer: Peer) -> None:
        """A worker is gone. Its contexts go, and the passes it had begun: nobody else would end them."""
        self.contexts.bury(peer)
        for context in self.contexts.all():
            for this in list(context.passes.values()):
                if this.id.root == peer.id:
                    error = RemoraError(f"{peer.info}, which began a backward pass, is gone: {peer.reason}")
                    self.end(this, blame(error, self.agent.me))


def _answer(failure: Blame | None, owed: Owed) -> Answer:
    return (failure, owed) if owed or failure is not None else None


def shown(names: Iterable[str], run: Callable[..., None], *args: object) -> None:
    """Call `run(*args)`, under these names in a profile if one is being made."""
    if not torch._C._autograd._profiler_enabled():
        run(*args)
        return
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(record_function(name))
        run(*args)
