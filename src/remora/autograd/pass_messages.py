"""The messages of a backward pass, and their handlers. The engine begins a pass.

A pass has two rounds. In the first (SMART alone) a worker follows its graph to received tensors and tells their senders,
which do the same with theirs; each answers when its own part of the search has been answered. In the second the gradients
flow along the same ways; a worker answers each batch when everything that it set going is done (see `ledger`). A worker that
fails says so in its answer, and the failure travels back to the worker that began, which ends the pass on all others. No
thread waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch.autograd.profiler import record_function

from remora.agent.agent import Agent
from remora.agent.calls.call import UNSET_TIMEOUT, Call, Counting
from remora.agent.calls.error_copies import fresh
from remora.agent.calls.future import Future
from remora.agent.peers.manager import Peer
from remora.agent.serving.dispatch import Request
from remora.autograd.backward_pass import GradientBatch, Key, Pass
from remora.autograd.context import Context
from remora.autograd.context_registry import Contexts
from remora.autograd.countdown import Countdown
from remora.autograd.failure import error_of, failure_of
from remora.autograd.nodes import SEND_NAME
from remora.autograd.pass_table import PassTable
from remora.devices import streams
from remora.errors import RemoraError, WorkerLost
from remora.vocabulary.messages import (
    BackwardAutogradReq,
    BackwardAutogradResp,
    BackwardEndReq,
    BackwardEndResp,
    BackwardPartReq,
    BackwardPartResp,
    Owed,
    Part,
    PassFailure,
)
from remora.wire.message_codec import encode, from_value, to_value
from remora.wire.pack_scope import PackScope

GRADIENTS, PART, END = BackwardAutogradReq.type, BackwardPartReq.type, BackwardEndReq.type
_GRADIENTS_DONE, _PART_DONE, _END_DONE = map(int, (BackwardAutogradResp.type, BackwardPartResp.type, BackwardEndResp.type))


class PassMessages:
    """The passes of one worker, and the messages about them."""

    def __init__(self, agent: Agent, contexts: Contexts, passes: PassTable) -> None:
        self.agent = agent
        self.contexts = contexts
        self._passes = passes
        agent.dispatch.on(GRADIENTS, self._on_gradients)
        agent.dispatch.on(PART, self._on_part, service=True)
        agent.dispatch.on(END, self._on_end, service=True)
        agent.peers.on_gone.append(self._on_peer_gone)

    # Telling others.

    def ask_all(self, this: Pass, parts: dict[Peer, Part], countdown: Countdown[PassFailure]) -> None:
        for peer, part in parts.items():
            self._call(this, countdown, peer, BackwardPartReq(this.key, part))

    def deliver(self, this: Pass, countdown: Countdown[PassFailure], peer: Peer, gradients: GradientBatch) -> None:
        self._call(this, countdown, peer, BackwardAutogradReq(this.key, None, gradients))

    def share(self, countdown: Countdown[PassFailure], work: Callable[[], None]) -> Callable[[], None]:
        """Have another thread do some of the work that is counted. The function that is returned takes it back, unless a
        thread has begun."""
        countdown.begin()
        waiting = {0: work}  # the thread that takes it out does it, or takes it back

        def begin() -> None:
            taken = waiting.pop(0, None)
            if taken is not None:
                self._act(countdown, taken)

        def take_back() -> None:
            if waiting.pop(0, None) is not None:
                countdown.finish()

        self.agent.pool.submit(begin)
        return take_back

    def deliver_with_part(self, this: Pass, peer: Peer, part: Part, gradients: GradientBatch) -> None:
        """Both rounds in one message, and wait for the answer. For a pass that goes to one worker and cannot come back:
        when that one has found every worker that takes part, all have been found."""
        packed = encode(BackwardAutogradReq(this.key, part, gradients), PackScope(peer, route=peer.routes.gradients))
        value = self.agent.caller.call(peer, int(GRADIENTS), packed, packed.flags, UNSET_TIMEOUT, "the backward pass")
        if value is None:  # (a FAST pass, which has to `learn` in any case, is not sent this way)
            return
        answer = from_value(BackwardAutogradResp, value, peer.name)
        self.learn(this, answer.owed)
        if answer.failure is not None:
            raise error_of(answer.failure)

    def _call(
        self, this: Pass, countdown: Countdown[PassFailure], peer: Peer, message: BackwardPartReq | BackwardAutogradReq
    ) -> None:
        countdown.begin()
        kind = BackwardPartResp if isinstance(message, BackwardPartReq) else BackwardAutogradResp

        def settled(call: Call) -> None:
            try:
                answer = from_value(kind, call.value(), peer.name)
            except BaseException as error:
                answer = kind(failure_of(error, self.agent.me))
            self.learn(this, answer.owed)
            countdown.finish(answer.failure)

        call = Call(peer, "the backward pass", Counting(settled))
        try:
            packed = encode(message, PackScope(peer, route=peer.routes.gradients))
            self.agent.caller.start_call(peer, call, int(message.type), packed, packed.flags, UNSET_TIMEOUT)
        except Exception as error:
            countdown.finish(failure_of(error, self.agent.me))

    def learn(self, this: Pass, owed: Owed) -> None:
        """FAST: take note of what others wait for, and of what we do."""
        if not this.smart:
            this.learn({**owed, self.agent.me.id: (this.arrived, this.owed)})

    # What others tell.

    def _on_part(self, request: Request) -> None:
        message = request.message(BackwardPartReq)
        key, part = message.key, message.part
        countdown: Countdown[PassFailure] = Countdown(
            lambda failure: request.reply(_PART_DONE, to_value(BackwardPartResp(failure)))
        )

        def look() -> None:
            this = self._passes.open(self.contexts.get(key[0]), key, serve=False)
            self.ask_all(this, this.take_part(part), countdown)

        self._act(countdown, look)

    def _on_gradients(self, request: Request) -> None:
        message = request.message(BackwardAutogradReq)
        key, part, gradients = message.key, message.part, message.gradients
        try:
            this = self._passes.open(self.contexts.get(key[0]), key, serve=True)
        except RuntimeError as error:
            request.reply(_GRADIENTS_DONE, to_value(BackwardAutogradResp(failure_of(error, self.agent.me))))
            return
        countdown: Countdown[PassFailure] = Countdown(partial(self._answer, request, this))
        point = streams.stream_point() if streams.watched else None
        job = partial(self._act, countdown, partial(self._feed, this, gradients, point, countdown))
        if part is not None:
            self._search_first(this, part, countdown, job)
        elif this.work_queue is not None:
            this.work_queue.put(job)
        else:
            job()

    def _feed(
        self, this: Pass, gradients: GradientBatch, point: streams.StreamPoint | None, countdown: Countdown[PassFailure]
    ) -> None:
        if point is not None:
            point.join(gradients)
        deliver = partial(self.deliver, this, countdown)
        share = partial(self.share, countdown) if this.work_queue is None else None
        if torch._C._autograd._profiler_enabled():
            with ExitStack() as stack:
                for _ in gradients:
                    stack.enter_context(record_function(SEND_NAME))
                this.feed(gradients, deliver, share)
        else:
            this.feed(gradients, deliver, share)

    def _search_first(self, this: Pass, part: Part, countdown: Countdown[PassFailure], job: Callable[[], None]) -> None:
        """The first round before the second: see `deliver_with_part`."""
        try:
            asked = this.take_part(part)
        except BaseException as error:
            countdown.finish(failure_of(error, self.agent.me))
            return
        if not asked:
            job()
            return

        def found(failure: PassFailure | None) -> None:
            if failure is not None:
                countdown.finish(failure)
            else:
                self.agent.pool.submit(job)  # answers come on threads that must not be kept

        search: Countdown[PassFailure] = Countdown(found)
        self._act(search, partial(self.ask_all, this, asked, search))

    def _act(self, countdown: Countdown[PassFailure], act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            countdown.finish(failure_of(error, self.agent.me))
        else:
            countdown.finish()

    def _answer(self, request: Request, this: Pass, failure: PassFailure | None) -> None:
        if not this.smart:
            self.learn(this, {})
        self._passes.served(this)
        request.reply(_GRADIENTS_DONE, to_value(BackwardAutogradResp(failure, this.owed_everywhere)))

    # The end of one that failed.

    def end(self, this: Pass, why: PassFailure) -> Future[PassFailure | None]:
        """End the pass on all workers. The future is done when no worker works on it any more."""
        quiet: Future[PassFailure | None] = Future(f"the end of {this!r}")
        countdown: Countdown[PassFailure] = Countdown(quiet._succeed)
        self._end_here(this.context, this.key, why, None, countdown, this)
        countdown.finish()
        return quiet

    def _end_here(
        self,
        context: Context,
        key: Key,
        why: PassFailure,
        told_by: Peer | None,
        countdown: Countdown[PassFailure],
        this: Pass | None = None,
    ) -> None:
        """End a pass on this worker, and on those that we gave a part in it."""
        this, told = self._passes.end(context, key, this)
        if this is not None:
            countdown.begin()
            this.abort(fresh(error_of(why)), countdown.finish)  # a copy: it keeps no frames, which would keep the pass
        for peer in told - {told_by}:
            self._send_end(peer, key, why, countdown)

    def _send_end(self, peer: Peer, key: Key, why: PassFailure, countdown: Countdown[PassFailure]) -> None:
        countdown.begin()
        call = Call(peer, "the end of a backward pass", Counting(lambda call: countdown.finish()))
        try:
            packed = encode(BackwardEndReq(key, why))
            self.agent.caller.start_call(peer, call, int(END), packed, 0, UNSET_TIMEOUT, control=True)
        except RemoraError:
            countdown.finish()  # it is gone, and the pass with it

    def _on_end(self, request: Request) -> None:
        message = request.message(BackwardEndReq)
        key, why = message.key, message.failure
        countdown: Countdown[PassFailure] = Countdown(lambda _: request.reply(_END_DONE, None))
        context = self.contexts.known(key[0])
        if context is not None:
            self._end_here(context, key, why, request.caller, countdown)
        countdown.finish()

    def _on_peer_gone(self, peer: Peer) -> None:
        """A worker is gone. Its contexts go, and the passes it had begun, or in which we wait for its gradients: it may have
        been the only one that would have told us of their end."""
        self.contexts.on_peer_gone(peer)
        for this in self._passes.running():
            if this.root == peer.id or (this.root != self.agent.me.id and this.waits_for(peer)):
                did = "began" if this.root == peer.id else "took part in"
                error = WorkerLost(f"{peer.info}, which {did} a backward pass, is gone: {peer.reason}")
                self.end(this, failure_of(error, self.agent.me))
