"""Begins a backward pass, and waits until it has ended on all workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.profiler import record_function

from remora.agent.agent import Agent
from remora.agent.calls.future import Future
from remora.agent.peers.manager import Peer
from remora.agent.runtime.current import blocking_region
from remora.autograd.backward_pass import GradientBatch, Pass, WorkQueue
from remora.autograd.context_registry import Contexts
from remora.autograd.countdown import Countdown
from remora.autograd.failure import error_of, failure_of
from remora.autograd.pass_messages import PassMessages
from remora.autograd.pass_table import PassTable
from remora.options import FAST_PATHS
from remora.vocabulary.messages import Part, PassFailure

QUIET_LIMIT = 1.0  # seconds that a failed pass waits for segments that are being run on other workers


class Engine:
    """Distributed autograd on one worker."""

    def __init__(self, agent: Agent, first_id: int) -> None:
        self._me = agent.me
        self._passes = PassTable()
        self.contexts = Contexts(agent, first_id, self._passes)
        self._others = PassMessages(agent, self.contexts, self._passes)
        self._next_pass = itertools.count().__next__

    def running(self) -> list[Pass]:
        """The passes that run on this worker now."""
        return self._passes.running()

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, smart: bool) -> None:
        """Backpropagate from roots on this worker; the gradients are in the contexts of all workers when it returns."""
        context = self.contexts.get(context_id)
        edges = _checked(roots)
        key = (context.id, self._me.id, self._next_pass(), smart, retain_graph)
        this = self._passes.open(context, key, serve=True)  # until `_drive` closes it
        if torch._C._autograd._profiler_enabled():
            this.work_queue = SimpleQueue()
            with record_function("torch::distributed::autograd::backward"):
                self._drive(this, edges, roots)
        else:
            self._drive(this, edges, roots)

    def _drive(self, this: Pass, edges: Sequence[GradientEdge], roots: Sequence[torch.Tensor]) -> None:
        try:
            parts = this.start_at(edges)
            seeds = list(map(torch.ones_like, roots))
            one_way = FAST_PATHS.one_way_pass and len(parts) == 1 and not this.context.sends
            if this.smart and one_way and this.work_queue is None:
                self._go_one_way(this, parts, seeds)
                return
            if this.smart and parts:
                self._wait(this, partial(self._others.ask_all, this, parts))
            self._wait(this, lambda countdown: this.feed_roots(seeds, partial(self._others.deliver, this, countdown)))
            self._check_fast(this)
        except BaseException as error:
            quiet = self._others.end(this, failure_of(error, self._me))
            with suppress(TimeoutError):  # what still runs somewhere should not add to gradients that are looked at now
                quiet.wait(QUIET_LIMIT)
            raise
        finally:
            self._passes.close(this)

    def _go_one_way(self, this: Pass, parts: dict[Peer, Part], seeds: Sequence[torch.Tensor]) -> None:
        """Nothing was sent from here that gradients could come back for, so nothing that others find out concerns us."""
        batches: dict[Peer, GradientBatch] = {}
        this.feed_roots(seeds, batches.__setitem__)
        for peer, batch in batches.items():
            self._others.deliver_with_part(this, peer, parts[peer], batch)

    def _wait(self, this: Pass, start: Callable[[Countdown[PassFailure]], None]) -> None:
        """Start something and wait until all that came of it is done."""
        failure = self._outcome(this, start)
        if failure is not None:
            try:
                raise error_of(failure)
            finally:
                del failure  # or the error would keep itself, and all that it saw, through this frame

    def _outcome(self, this: Pass, start: Callable[[Countdown[PassFailure]], None]) -> PassFailure | None:
        outcome: Future[PassFailure | None] = Future(repr(this))
        countdown: Countdown[PassFailure] = Countdown(outcome._succeed)
        this.on_abort = lambda error: countdown.finish(failure_of(error, self._me))
        try:
            start(countdown)
            countdown.finish()
            if this.work_queue is not None:
                self._run_tasks(this.work_queue, outcome)
            return outcome.wait()
        finally:
            # An error that `start` raised ends the pass, and no thread waits any more. Told to the outcome, it would be kept
            # for ever: its traceback leads back here, and no collector can follow from the outcome to the error.
            this.on_abort = None

    def _run_tasks(self, queue: WorkQueue, outcome: Future[PassFailure | None]) -> None:
        """Run the tasks of the queue until there is an outcome."""
        outcome._when_settled(lambda _: queue.put(None))
        while True:
            with blocking_region():
                task = queue.get()
            if task is None:
                return
            task()

    def _check_fast(self, this: Pass) -> None:
        """In a FAST pass every message has to get its gradient. Nothing is under way any more: a gradient that has
        not come never will, and the workers that wait for it must not do so for ever."""
        if this.smart:
            return
        self._others.learn(this, {})
        owed = [text for _, texts in this.owed_everywhere.values() for text in texts]
        if owed:
            raise RuntimeError(
                f"the backward pass stopped before its end, because these never get a gradient: {', '.join(owed)}. "
                f'With mode="fast" every result of every call in the context has to be used for the roots; '
                f'mode="smart" has no such rule.'
            )

    def counts(self) -> dict[str, int]:
        """Counters under PyTorch's names."""
        return {
            "num_current_backward_passes": len(self._passes.running()),
            "num_autograd_contexts": len(self.contexts.all()),
        }


def _checked(roots: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """The edges behind the roots. The words are those programs match on."""
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    edges = []
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{list(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function")
        edges.append(GradientEdge(root.grad_fn, root.output_nr))  # (the roots, which the caller has, keep the nodes)
    return edges
