"""One backward pass on one worker: finds the messages that take part, takes their gradients, and runs segments with them.

A pass decides under its lock and runs the graph outside it. Gradients leave the worker through the function `deliver` that
it is given; it knows no messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from remora.autograd import segments
from remora.autograd.context import Context
from remora.autograd.graph import Edge, Joined, Reach, Segment, can_be_joined
from remora.autograd.nodes import Gradients, Incoming, Recv, Start
from remora.autograd.schedule import Divided, Ready, Whole
from remora.devices import streams
from remora.options import FAST_PATHS
from remora.vocabulary.messages import Owed, Part, PassId

if TYPE_CHECKING:
    from remora.agent.peers.manager import Peer

ROOTS = -1  # the source that stands for the roots, among the numbers of messages
Key = PassId
WorkQueue = SimpleQueue[Callable[[], None] | None]  # work for a thread
GradientBatch = dict[int, Gradients]  # gradients for what was sent: by message
Deliver = Callable[["Peer", GradientBatch], None]
# Have another thread do some work, too. Returned is a function that takes it back, unless a thread has begun.
Share = Callable[[Callable[[], None]], Callable[[], None]]

LONG = 0.001  # seconds: a segment that takes longer is worth another thread
MANY = 1 << 20  # elements in the leaves of a segment: to write and to add their gradients takes longer than that in any case
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_that_fit() -> int:
    """The number of threads that can run segments at once so that no processor has two. torch divides the work of an
    operation among threads of its own, a team for each thread that starts one. Two teams on the same processors are slower
    than one, and each thread keeps memory of freed gradients to itself."""
    return max(1, PROCESSORS // torch.get_num_threads())


def _takes_long(segment: Segment | Reach) -> bool:
    """True if it takes longer than `LONG` by the number of its leaves' elements alone."""
    return sum(leaf.numel() for leaf, _, _ in segment.leaves.values()) >= MANY


class Pace(Enum):
    """The time that the segments of a pass take, as far as is known."""

    UNKNOWN = 0
    QUICK = 1
    SLOW = 2


class Pass:
    """Made by `pass_table`, on each worker that takes part."""

    def __init__(self, key: Key, context: Context) -> None:
        self.key = key
        _, self.root, self.number, self.smart, self.retain_graph = key  # the `number`-th pass that worker `root` began
        self.context = context
        self.told: set[Peer] = set()  # the workers that we gave a part in this pass
        self.failure: BaseException | None = None
        self.owed_everywhere: Owed = {}  # FAST: the gradients that other workers said they wait for
        self.on_abort: Callable[[BaseException], None] | None = None  # of the worker that began it, while it waits
        # While a profile is made, the thread that began the pass does this worker's part of it: profiles are per thread.
        self.work_queue: WorkQueue | None = None
        self.began = time.monotonic()
        # Messages that were received and whose gradients have not gone back: to which worker. Each change is one operation.
        self._owes: dict[int, str] = {}
        self.serving = 0  # requests that belong to it and are not answered; guarded by the lock of its table (`pass_table`)
        # Reentrant: a destructor that the collector runs may abort the pass. No segment runs under it.
        self._lock = threading.RLock()  # guards: failure, the fields below, and the list of segments
        self._running = 0  # segments
        self._when_idle: list[Callable[[], None]] = []  # called when none runs any more
        self._reach: Reach | None = None  # what was found so far
        self._roots: Sequence[Start] = ()
        self._part: dict[int, set[int]] = {}  # of our messages, the tensors whose gradients will come
        self._schedule: Whole | Divided | None = None

    # Finding the messages that take part.

    def start_at(self, roots: Sequence[Start]) -> dict[Peer, Part]:
        """The pass begins here. What it comes to, by the worker that sent it."""
        self._roots = roots
        self._reach = Reach()
        with self._lock:
            return self._parts_of(self._reach.follow(roots))

    def take_part(self, part: Part) -> dict[Peer, Part]:
        """Gradients will come for these. What the pass comes to because of it, by the worker that sent it."""
        with self._lock:
            if self.failure is not None or self.context.released:
                self._refuse()
            if self._schedule is not None:
                raise RuntimeError(f"{self!r} has begun: no message can take part any more")
            if self._reach is None:
                self._reach = Reach()
            found: list[Edge] = []
            for message, numbers in part.items():
                send = self.context.sends.get(message)
                if send is None:
                    raise self._not_sent(message)
                known = self._part.setdefault(message, set())
                new = sorted(set(numbers) - known)
                known.update(new)
                found += self._reach.follow([send.starts[number] for number in new])
            return self._parts_of(found) if found else {}

    def _parts_of(self, received: Iterable[Edge]) -> dict[Peer, Part]:
        parts: dict[Peer, Part] = {}
        for node, number in received:
            recv: Recv = node.recv
            parts.setdefault(recv.peer, {}).setdefault(recv.message, []).append(number)
            self._owes[recv.message] = recv.peer.name
        self.told.update(parts)
        return parts

    # Gradients come.

    def feed_roots(self, gradients: Sequence[torch.Tensor], deliver: Deliver) -> None:
        """The gradients of the roots: where every pass begins."""
        with self._lock:
            schedule = self._schedule or self._begin()
            ready = schedule.arrive({ROOTS: list(zip(self._roots, gradients, strict=True))})
        self._run(schedule, ready, deliver, None, Pace.UNKNOWN)

    def feed(self, batch: GradientBatch, deliver: Deliver, share: Share | None = None) -> None:
        """Gradients for what was sent. Runs what can be run with them, and has the gradients of what was received
        delivered. What takes long is shared with other threads."""
        with self._lock:
            if self.failure is not None or self.context.released:
                self._refuse()
            schedule = self._schedule or self._begin()
            came: dict[int, Incoming] = {}
            for message, gradients in batch.items():
                send = self.context.sends.get(message)
                if send is None:
                    raise self._not_sent(message)
                part = self._part.get(message)
                if part is None:
                    raise RuntimeError(f"{self!r}: gradients came for message {message}, which takes no part in it")
                came[message] = send.incoming(gradients, part)
            ready = schedule.arrive(came)
        self._run(schedule, ready, deliver, share, Pace.UNKNOWN)

    def _begin(self) -> Whole | Divided:
        """Gradients flow only when the workers that take part are known: from here on nothing of it changes."""
        if not self.smart:
            self._part = {message: set(range(len(send.starts))) for message, send in self.context.sends.items()}
        names = [ROOTS, *self._part] if self._roots else list(self._part)
        sources = {name: self._source(name) for name in names}
        if self._reach is None or not self.smart:  # a FAST pass has not looked yet
            self._reach = Reach()
            for starts in sources.values():
                self._reach.follow(starts)
        held = self._reach.find_held()
        if FAST_PATHS.single_source and len(names) == 1 and not self._reach.has_native_ends(held):
            self._schedule = Whole(names[0], self._reach)
        else:
            self._schedule = Divided(sources, held)
        return self._schedule

    def _source(self, name: int) -> Sequence[Start]:
        """The places at which the gradients of the roots, or of a message, come in."""
        if name == ROOTS:
            return self._roots
        send = self.context.sends.get(name)
        if send is None:
            raise self._not_sent(name)
        return [send.starts[number] for number in sorted(self._part[name])]

    def _run(self, schedule: Whole | Divided, ready: Ready, deliver: Deliver, share: Share | None, pace: Pace) -> None:
        """Run what is ready, and what becomes ready because of it.

        The first segment is run alone, to see how long it takes, unless its leaves tell. If it is quick, the rest is run
        in one go. If not, each is run alone, by as many threads as fit on the processors, and what it gives goes out when
        it has been run. If only one thread fits, they are run in one go all the same, and what each gives goes out in the
        midst of it.
        """
        take_backs: list[Callable[[], None]] = []  # of work that no other thread may have begun
        try:
            if pace is Pace.UNKNOWN and len(ready) > 1 and _takes_long(ready[-1][1]):
                pace = Pace.SLOW
                take_backs += self._share(schedule, ready, deliver, share)
            while batch := self._taken(ready, pace):
                begun = time.perf_counter()
                self._run_batch(schedule, batch, ready, deliver, at_once=pace is Pace.SLOW)
                if pace is Pace.UNKNOWN and ready:
                    pace = Pace.QUICK if time.perf_counter() - begun < LONG else Pace.SLOW
                    if pace is Pace.SLOW:
                        take_backs += self._share(schedule, ready, deliver, share)
        finally:
            for take_back in take_backs:
                take_back()

    def _share(
        self, schedule: Whole | Divided, ready: Ready, deliver: Deliver, share: Share | None
    ) -> list[Callable[[], None]]:
        """Have as many other threads as fit take from the list, too. What is returned takes that back: a thread that has not
        come when the list is empty is not waited for. Functions of the program may have all slots, and wait for the end of
        the pass."""
        if share is None:
            return []
        work = partial(self._run, schedule, ready, deliver, None, Pace.SLOW)
        return [share(work) for _ in range(min(len(ready), threads_that_fit()) - 1)]

    def _taken(self, ready: Ready, pace: Pace) -> Ready:
        """Take from the list what is to be run next. Other threads may do so with the same list."""
        with self._lock:
            if not ready:
                return []
            _, first, _ = taken = ready.pop()
            if not ready:
                return [taken]
            quick, alone = pace is Pace.QUICK, threads_that_fit() == 1
            slow = pace is Pace.SLOW and not streams.watched  # there the order of streams is kept for a whole run

            def joins(segment: Segment | Reach) -> bool:
                return can_be_joined(segment) and (quick or (alone and (slow or not segment.received)))

            if not joins(first):
                return [taken]
            batch: Ready = [taken]
            others: Ready = []
            for each in ready:
                (batch if joins(each[1]) else others).append(each)
            ready[:] = others
            return batch

    def _run_batch(self, schedule: Whole | Divided, batch: Ready, ready: Ready, deliver: Deliver, at_once: bool) -> None:
        """Run segments, add to `ready` what can be run after them, and have the gradients that leave this worker delivered.
        Those of several segments are delivered together, or, `at_once`, as they come."""

        def send(recv: Recv, gradients: Gradients) -> None:
            self._deliver([(recv, gradients)], deliver)

        with self._lock:
            if self.failure is not None or self.context.released:
                self._refuse()
            self._running += 1
        try:
            labels = [label for label, _, _ in batch]
            segment = batch[0][1] if len(batch) == 1 else Joined([each for _, each, _ in batch])
            incoming = [each for _, _, some in batch for each in some]
            batch.clear()  # what it had, too, would not be freed while the segments are run
            gathered, borrowed = self.context.gradients, schedule.borrowed
            leaving, received = segments.run(
                segment, incoming, gathered, self.retain_graph, borrowed, send if at_once else None
            )
        finally:
            self._finish_run()
        with self._lock:
            for label in labels:
                ready += schedule.ran(label, leaving)
        if received:
            self._deliver(received, deliver)

    def _deliver(self, received: segments.Received, deliver: Deliver) -> None:
        outgoing: dict[Peer, GradientBatch] = {}
        for recv, gradients in received:
            outgoing.setdefault(recv.peer, {})[recv.message] = gradients
            self._owes.pop(recv.message, None)
        self.told.update(outgoing)
        for peer, batch in outgoing.items():
            deliver(peer, batch)

    # The end.

    def _refuse(self) -> None:
        """It failed, or its context is gone."""
        if self.failure is not None:
            raise self.failure
        self.context.check()

    def _not_sent(self, message: int) -> RuntimeError:
        return RuntimeError(
            f"Could not find send function for autograd message id {message} in the context {self.context.id}"
        )

    def _finish_run(self) -> None:
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
        tell = self.on_abort
        if first and tell is not None:
            tell(error)
        if idle is not None:
            idle()

    def waits_for(self, peer: Peer) -> bool:
        """True if gradients are to come from there."""
        sends = self.context.sends
        with self._lock:
            owed = list(self._part) if self._schedule is None else self._schedule.owed
        return any(send.peer is peer for send in map(sends.get, owed) if send is not None)

    def learn(self, owed: Owed) -> None:
        """Take note of what workers wait for; later news are better."""
        with self._lock:
            for worker, news in owed.items():
                known = self.owed_everywhere.get(worker)
                if known is None or known[0] <= news[0]:
                    self.owed_everywhere = {**self.owed_everywhere, worker: news}

    @property
    def arrived(self) -> int:
        """The number of sources that have come."""
        return 0 if self._schedule is None else self._schedule.arrived

    @property
    def done(self) -> bool:
        """True if all gradients came and went."""
        return self._schedule is not None and self._schedule.done

    @property
    def owed(self) -> list[str]:
        """The sources that have not come, in words."""
        if self._schedule is None:
            return []
        return [repr(self.context.sends.get(source, source)) for source in self._schedule.owed]

    # For observers, who take no lock: the numbers may be a moment apart.

    def owes(self) -> dict[str, int]:
        """By worker: the messages whose gradients this one still has to send back."""
        return dict(Counter(self._owes.copy().values()))

    def awaits(self) -> dict[str, int]:
        """By worker: the messages whose gradients have not come from there."""
        schedule = self._schedule
        try:
            missing = list(self._part) if schedule is None else schedule.owed
        except RuntimeError:  # it changes at this moment
            return {}
        sends = [self.context.sends.get(message) for message in missing]
        return dict(Counter(send.peer.name for send in sends if send is not None))

    @property
    def phase(self) -> str:
        """Its present step, in a few words."""
        if self.failure is not None:
            return "failed"
        if self._schedule is None:
            return "finding who takes part"
        if self._running:
            return "computing gradients"
        return "done here" if self.done else "waiting for gradients"

    def __repr__(self) -> str:
        return f"<Pass {self.number} of worker {self.root} in context {self.context.id}>"
