"""One backward pass on one worker: which of its messages take part, which gradients came, and what is run with them.

It decides under its lock and runs the graph outside it. What leaves the worker goes through the two functions it is
given; it knows no messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch

from remora.autograd import segments
from remora.autograd.graph import Edge, Node, Reach, Segment, divide, edges_of, undivided
from remora.autograd.ledger import Ledger
from remora.autograd.nodes import Gradients, Recv, Send

if TYPE_CHECKING:
    from remora.agent.peers import Peer
    from remora.autograd.record import Context

ROOTS = -1  # the source that stands for the roots, among the numbers of messages
Part = dict[int, list[int]]  # of what was sent: by message, the tensors whose gradients will come
Owed = dict[int, tuple[int, list[str]]]  # by worker: how many gradients had come to it, and what it waited for then
Desk = SimpleQueue[Callable[[], None] | None]  # work for a thread
Parcel = dict[int, Gradients]  # gradients for what was sent: by message


class PassId(NamedTuple):
    """The `number`-th pass that worker `root` began."""

    root: int
    number: int


class Pass:
    """See the head of this file."""

    def __init__(self, id: PassId, context: Context, smart: bool, retain_graph: bool) -> None:
        self.id = id
        self.context = context
        self.smart = smart
        self.retain_graph = retain_graph
        self.told: set[Peer] = set()  # whom we gave a part in this pass
        self.failure: BaseException | None = None
        self.owed_everywhere: Owed = {}  # FAST: what others said they wait for
        self.on_abort: Callable[[BaseException], None] | None = None  # of the worker that began it
        # While a profile is made, the thread that began the pass does this worker's part of it: profiles are per thread.
        self.desk: Desk | None = None
        self._lock = threading.Lock()
        self._serving = 0  # requests that belong to it and are not answered
        self._running = 0  # segments
        self._when_idle: list[Callable[[], None]] = []
        self._reach = Reach()
        self._roots: list[Edge] = []
        self._part: dict[int, set[int]] = {}  # of our messages, the tensors whose gradients will come
        self._bits: dict[int, int] = {}
        self._segments: dict[int, Segment] = {}
        self._labels: dict[Node, int] = {}
        self._waiting: dict[int, segments.Incoming] = {}  # gradients that came in, by the label of their segment
        self._all_leaves: list[Node] | None = None
        self._ledger: Ledger | None = None

    # Finding out who takes part.

    def start_at(self, roots: Sequence[Edge]) -> dict[Peer, Part]:
        """The pass begins here. What it comes to, by the worker that sent it."""
        self._roots = list(roots)
        with self._lock:
            return self._parts_of(self._reach.follow(roots))

    def take_part(self, part: Part) -> dict[Peer, Part]:
        """Gradients will come for these. What the pass comes to because of it, by the worker that sent it."""
        with self._lock:
            self._check()
            if self._ledger is not None:
                raise RuntimeError(f"{self!r} has begun: nobody can take part any more")
            found: Iterable[Edge] = ()
            for message, numbers in part.items():
                known = self._part.setdefault(message, set())
                new = [number for number in numbers if number not in known]
                known.update(new)
                found = [*found, *self._follow_sent(self._send(message), new)]
            return self._parts_of(found)

    def _follow_sent(self, send: Send, numbers: list[int]) -> Iterable[Edge]:
        if not self._reach.nodes and len(numbers) == len(send.edges):
            ahead = send.seen_ahead()
            if ahead is not None:
                self._reach = ahead
                return ahead.outputs
        return self._reach.follow(edges_of(send.edges[number] for number in numbers))

    def _parts_of(self, received: Iterable[Edge]) -> dict[Peer, Part]:
        parts: dict[Peer, Part] = {}
        for node, number in received:
            recv: Recv = node.recv
            parts.setdefault(recv.peer, {}).setdefault(recv.message, []).append(number)
        self.told.update(parts)
        return parts

    def _send(self, message: int) -> Send:
        send = self.context.sends.get(message)
        if send is None:
            raise RuntimeError(
                f"Could not find send function for autograd message id {message} in the context {self.context.id}"
            )
        return send

    # Gradients come.

    def feed_roots(self, gradients: Sequence[torch.Tensor], deliver: Callable[[Peer, Parcel], None]) -> None:
        """The gradients of the roots: where every pass begins."""
        with self._lock:
            self._begin()
            for edge, gradient in zip(self._roots, gradients, strict=True):
                self._put(edge, gradient)
            ready = self._arrive([ROOTS])
        self._run(ready, deliver)

    def feed(self, parcel: Parcel, deliver: Callable[[Peer, Parcel], None]) -> None:
        """Gradients for what was sent. Runs what can be run with them, and has the gradients of what was received
        delivered."""
        with self._lock:
            self._check()
            self._begin()
            for message, gradients in parcel.items():
                send = self._send(message)
                send.check(gradients)
                for number, gradient in gradients.items():
                    edge = send.edges[number].node, send.edges[number].output_nr
                    self._put(edge, send.placed(number, gradient))
            ready = self._arrive(parcel)
        self._run(ready, deliver)

    def _begin(self) -> None:
        """Gradients flow only when it is known who takes part: from here on nothing of it changes."""
        if self._ledger is not None:
            return
        if not self.smart:
            self._part = {message: set(range(len(send.edges))) for message, send in self.context.sends.items()}
        names = [ROOTS, *self._part] if self._roots else list(self._part)
        self._bits = {name: bit for bit, name in enumerate(names)}
        if len(names) == 1:
            if not self._reach.nodes:  # a FAST pass has not looked yet
                self._reach.follow(self._source(names[0]))
            self._segments, self._labels = undivided(self._reach)
        else:
            self._segments, self._labels = divide([self._source(name) for name in names])
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # DistributedDataParallel writes to all its parameters when the last of them has its gradient.
                self._all_leaves = [leaf for segment in self._segments.values() for leaf in segment.leaves]
        self._ledger = Ledger(len(names), {label: each.after for label, each in self._segments.items()})

    def _source(self, name: int) -> list[Edge]:
        """Where the gradients of the roots, or of a message, come in."""
        if name == ROOTS:
            return self._roots
        edges = self._send(name).edges
        return edges_of(edges[number] for number in sorted(self._part[name]))

    def _put(self, edge: Edge, gradient: torch.Tensor) -> None:
        label = self._labels.get(edge[0])
        if label is not None:
            self._waiting.setdefault(label, []).append((edge, gradient))

    def _arrive(self, sources: Iterable[int]) -> list[int]:
        assert self._ledger is not None
        bits = []
        for source in sources:
            bit = self._bits.get(source)
            if bit is None:
                raise RuntimeError(f"{self!r}: gradients came for message {source}, which takes no part in it")
            bits.append(bit)
        return self._ledger.arrive(bits)

    def _run(self, ready: list[int], deliver: Callable[[Peer, Parcel], None]) -> None:
        assert self._ledger is not None
        while ready:
            label = ready.pop()
            segment = self._segments[label]
            with self._lock:
                self._check()
                incoming = self._waiting.pop(label, [])
                self._running += 1
            try:
                leaving, received = segments.run(
                    segment, incoming, self.context.gradients, self.retain_graph, self._all_leaves
                )
            finally:
                self.context.touch()
                self._rest()
            parcels = self._parcels(received)
            with self._lock:
                for edge, gradient in leaving:
                    self._put(edge, gradient)
                ready += self._ledger.ran(label)
            for peer, parcel in parcels.items():
                deliver(peer, parcel)

    def _parcels(self, received: segments.Received) -> dict[Peer, Parcel]:
        parcels: dict[Peer, Parcel] = {}
        for recv, gradients in received:
            parcels.setdefault(recv.peer, {})[recv.message] = gradients
        self.told.update(parcels)
        return parcels

    # The end.

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.context.released:
            self.context.check()

    def _rest(self) -> None:
        with self._lock:
            self._running -= 1
            told, self._when_idle = ([], self._when_idle) if self._running else (self._when_idle, [])
        for tell in told:
            tell()

    def abort(self, error: BaseException, idle: Callable[[], None] | None = None) -> None:
        """The pass is over: it failed here or elsewhere. `idle` is called when nothing of it runs here any more."""
        with self._lock:
            first = self.failure is None
            self.failure = self.failure or error
            if idle is not None and self._running:
                self._when_idle.append(idle)
                idle = None
        if first and self.on_abort is not None:
            self.on_abort(error)
        if idle is not None:
            idle()

    def serve(self) -> None:
        """A request that belongs to the pass is being served."""
        with self._lock:
            self._serving += 1

    def served(self) -> bool:
        """It is answered. Whether nothing is left to do here."""
        with self._lock:
            self._serving -= 1
            return self.done and not self._serving

    def learn(self, owed: Owed) -> None:
        """Take note of what workers wait for; later news are better."""
        with self._lock:
            for worker, news in owed.items():
                known = self.owed_everywhere.get(worker)
                if known is None or known[0] <= news[0]:
                    self.owed_everywhere = {**self.owed_everywhere, worker: news}

    @property
    def arrived(self) -> int:
        """How many sources have come."""
        return 0 if self._ledger is None else self._ledger.arrived.bit_count()

    @property
    def done(self) -> bool:
        """Whether all gradients came and went."""
        return self._ledger is not None and self._ledger.done

    @property
    def owed(self) -> list[str]:
        """What has not come, in words."""
        if self._ledger is None:
            return []
        sources = {bit: message for message, bit in self._bits.items()}
        return [repr(self.context.sends.get(sources[bit], sources[bit])) for bit in self._ledger.owed]

    def __repr__(self) -> str:
        return f"<Pass {self.id.number} of worker {self.id.root} in context {self.context.id}>"
