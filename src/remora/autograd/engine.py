"""How a backward pass begins, and how the worker that began it learns that it has ended everywhere."""

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
from remora.autograd.failure import blame, error_of
from remora.autograd.pass_messages import PassMessages
from remora.options import FAST_PATHS
from remora.vocabulary.messages import Part, PassFailure

QUIET_PATIENCE = 1.0  # how long a failed pass waits for what is being run on other workers


class Engine:
    """Distributed autograd on one worker."""

    def __init__(self, agent: Agent, first_id: int) -> None:
        self._me = agent.me
        self.contexts = Contexts(agent, first_id)
        self._others = PassMessages(agent, self.contexts)
        self._next_pass = itertools.count().__next__

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, smart: bool) -> None:
        """Backpropagate from roots on this worker; the gradients are in the contexts of all workers when it returns."""
        context = self.contexts.get(context_id)
        edges = _checked(roots)
        key = (context.id, self._me.id, self._next_pass(), smart, retain_graph)
        this = self._others.open(context, key, serve=True)  # until `_drive` closes it
        if torch._C._autograd._profiler_enabled():
            this.desk = SimpleQueue()
            with record_function("torch::distributed::autograd::backward"):
                self._drive(this, edges, roots)
        else:
            self._drive(this, edges, roots)

    def _drive(self, this: Pass, edges: Sequence[GradientEdge], roots: Sequence[torch.Tensor]) -> None:
        try:
            parts = this.start_at(edges)
            seeds = list(map(torch.ones_like, roots))
            one_way = FAST_PATHS.one_way_pass and len(parts) == 1 and not this.context.sends
            if this.smart and one_way and this.desk is None:
                self._go_one_way(this, parts, seeds)
                return
            if this.smart and parts:
                self._wait(this, partial(self._others.ask_all, this, parts))
            self._wait(this, lambda errand: this.feed_roots(seeds, partial(self._others.deliver, this, errand)))
            self._check_fast(this)
        except BaseException as error:
            quiet = self._others.end(this, blame(error, self._me))
            with suppress(TimeoutError):  # what still runs somewhere should not add to gradients that are looked at now
                quiet.wait(QUIET_PATIENCE)
            raise
        finally:
            self._others.close(this)

    def _go_one_way(self, this: Pass, parts: dict[Peer, Part], seeds: Sequence[torch.Tensor]) -> None:
        """Nothing was sent from here that gradients could come back for, so nothing that others find out concerns us."""
        parcels: dict[Peer, GradientBatch] = {}
        this.feed_roots(seeds, parcels.__setitem__)
        for peer, parcel in parcels.items():
            self._others.deliver_with_part(this, peer, parts[peer], parcel)

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
        errand: Countdown[PassFailure] = Countdown(outcome._succeed)
        this.on_abort = lambda error: errand.finish(blame(error, self._me))
        try:
            start(errand)
            errand.finish()
            if this.desk is not None:
                self._work_at(this.desk, outcome)
            return outcome.wait()
        finally:
            # What `start` raised ends the pass, and nobody waits any more. Told to the outcome, it would have it for ever:
            # its traceback leads back here, and from the outcome to the error no collector can follow.
            this.on_abort = None

    def _work_at(self, desk: WorkQueue, outcome: Future[PassFailure | None]) -> None:
        """Do what is put there until there is an outcome."""
        outcome._when_settled(lambda _: desk.put(None))
        while True:
            with blocking_region():
                job = desk.get()
            if job is None:
                return
            job()

    def _check_fast(self, this: Pass) -> None:
        """In a FAST pass every message has to get its gradient. Nothing is under way any more: what has not come never
        will, and whoever waits for it must not do so for ever."""
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
        """How much is going on, under PyTorch's names."""
        contexts = self.contexts.all()
        return {
            "num_current_backward_passes": sum(len(context.passes) for context in contexts),
            "num_autograd_contexts": len(contexts),
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
        edges.append(GradientEdge(root.grad_fn, root.output_nr))  # (whoever began the pass keeps the nodes, with the roots)
    return edges
