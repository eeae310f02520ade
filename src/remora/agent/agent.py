"""A worker's engine: it owns the threads and connects the parts below. Knows no RRefs and no autograd."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable

from remora.agent.caller import Caller
from remora.agent.calls.blocking import wait_until
from remora.agent.calls.call_errors import name_of
from remora.agent.calls.unseen_failures import unseen_failures
from remora.agent.channel.delayed_flush import DelayedFlush
from remora.agent.hooks import Hooks
from remora.agent.memory.routing import DeviceRouting
from remora.agent.peers.admission import Admission
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.listener import Listener
from remora.agent.peers.manager import Peer, PeerManager
from remora.agent.peers.unanswered import Unanswered
from remora.agent.retries import Retries
from remora.agent.runtime.current import thread_state
from remora.agent.runtime.event_loop import Coroutines
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.timers import Timers
from remora.agent.serving.dispatch import Dispatch
from remora.agent.serving.execution import Execution
from remora.faults.injector import Injector, Stage
from remora.faults.worker_faults import REMADE, WorkerFaults
from remora.long_wait import LongWait, listed
from remora.options import RECORDER_EVENTS, Settings
from remora.protocol.member_rules import REGULAR_TICK
from remora.recorder import Recorder
from remora.transport.poller import make_poller
from remora.vocabulary.ids import WorkerInfo
from remora.wire.frames import FAILED

log = logging.getLogger("remora")

TICK = REGULAR_TICK
FOLD_AGAIN = 0.2  # seconds


def describe_wait(peer: Peer) -> str:
    """A worker that is waited for, and what it does for us: "w1, which runs train since 40 s"."""
    calls = list(peer.outgoing.pending.values())
    if not calls:
        return f"{peer.name} (suspected: {peer.suspicion})" if peer.suspicion else peer.name
    oldest, more = calls[0], len(calls) - 1
    return f"{peer.name}, which runs {name_of(oldest.target)} since {oldest.age:.0f} s{f' and {more} more' if more else ''}"


class Agent:
    """Makes calls and serves them."""

    def __init__(
        self,
        me: WorkerInfo,
        threads: int,
        timeout: float,
        settings: Settings,
        handshake_client: HandshakeClient,
        device_routing: DeviceRouting,
        faults: WorkerFaults,
        hooks: Hooks,
    ) -> None:
        self.me = me
        self.clock = settings.clock
        self.poller = make_poller()
        self.pool = WorkerPool(me.name, threads, self.poller, self.clock, worker=hooks.worker)
        self.timers = Timers(me.name, self.clock)
        self.delayed_flush = DelayedFlush(self.timers)
        self.recorder = recorder = Recorder(RECORDER_EVENTS, FAILED)
        now, find_context = self.clock.now, hooks.find_context
        remembers = recorder if recorder.size else None
        self.dispatch = Dispatch(me, self.pool, self.delayed_flush, now, find_context, remembers)
        self.coroutines = Coroutines(me.name, self.clock, hooks.worker)
        self.execution = Execution(self.dispatch, self.coroutines)
        self.peers = PeerManager(
            self.poller, self.timers, self.dispatch, recorder, settings, handshake_client, device_routing, faults, hooks
        )
        self.admission = Admission(self.peers, hooks.is_listed)
        self.listener = Listener(self.admission, self.poller, handshake_client, settings, self.timers, recorder)
        self.own_time = handshake_client.own_time
        self._faults = faults
        self.caller = caller = Caller(me, timeout, self.pool, self.timers, self.delayed_flush, faults)
        self.retries = Retries(caller, self.pool, self.timers, faults)
        self._unanswered = Unanswered(self.clock, self.pool.submit_system)
        self.ticks: list[Callable[[], None]] = []  # what else is to be looked at now and then
        self.gil_profiling = False
        if settings.faults:
            self.follow_plan(settings.faults)

    @property
    def running(self) -> bool:
        """Return True if it has begun to serve and has not ended."""
        return self.caller.running

    @property
    def faults(self) -> Injector | None:
        """The part of this worker in the fault plan that it follows."""
        return self._faults.injector

    def follow_plan(self, plan: str) -> None:
        """Follow a fault plan. For a worker that is alone in its process."""
        self.inject(Stage(self.me.name, plan, clock=self.clock).join(self.me.name))

    def inject(self, injector: Injector) -> None:
        """Follow a fault plan. Links that are there already are made anew, so that they pass the plan, too."""
        self._faults.follow(injector)
        for peer in self.peers.all():
            for channel in peer.channels():
                channel.cut(ConnectionError(REMADE))

    def start(self) -> None:
        """Begin to serve."""
        self.caller.running = True
        unseen_failures.reporters += 1
        self.timers.start()
        self.pool.start()
        self.listener.open()
        self._tick()

    # Time passes.

    def _tick(self) -> None:
        if not self.running:
            return
        now = self.clock.now()
        self._fold()
        self.own_time.tick(now)
        self.timers.at(now + TICK, self._tick)
        self.peers.tick(now)
        for peer in self.peers.all():
            peer.outgoing.look_after_reader()
        self.pool.look_again()
        for look in self.ticks:
            look()
        self.listener.tick(now)
        self.dispatch.tell_progress(now, now + 2 * TICK)
        self._unanswered.look(self.peers.all())
        if unseen_failures.due:
            self.pool.submit_system(unseen_failures.report)  # not here: the text of an error is the program's code
        if self.execution.raised.due:
            self.pool.submit_system(self.execution.raised.report)  # (what stands in the place of stderr may be, too)
        for channel, call in list(self.peers.due(now + 2 * TICK)):
            self.caller.expire_at(channel, call)

    def _fold(self) -> None:
        """Have the recorder sort in what has come: more often while much comes, so that nothing is lost."""
        if self.recorder.fold() > self.recorder.size // 4 and self.running:
            self.timers.soon(FOLD_AGAIN, self._fold)

    def counters(self) -> dict[str, int | float]:
        """Return what the agent is doing, under PyTorch's names, and the memory it keeps, under ours."""
        _, watching, active = self.pool.counts()
        found: dict[str, int | float] = {
            "agent.thread_pool_size": self.pool.limit,
            "agent.num_idle_threads": min(watching, self.pool.limit),
            "agent.client_active_calls": self.peers.active_calls(),
            "agent.server_active_calls": self.dispatch.counts(),
            "agent.server_active_async_calls": max(self.dispatch.counts() - active - len(self.pool.user_tasks), 0),
        }
        found.update(self.peers.shared_memory.counters(peer.shared_memory for peer in self.peers.all()))
        if self.gil_profiling:
            found["agent.gil_average_wait_time_us"] = self.measure_gil_wait()
        return found

    def measure_gil_wait(self) -> float:
        """Return the microseconds that a thread waits for the interpreter lock now, beyond what it asked to sleep."""
        samples = 5
        start = time.perf_counter()
        for _ in range(samples):
            time.sleep(0)
        return (time.perf_counter() - start) / samples * 1e6

    # The end.

    def drain(self, seconds: float) -> bool:
        """Wait until every request that was received has been answered; for so many real seconds, whatever the clock
        says. Whether it has been."""
        return wait_until(lambda: not self.dispatch.counts(), time.monotonic() + seconds)

    def idle(self, deadline: float, purpose: str) -> bool:
        """Wait until no call of ours is under way and none is being served. False at the deadline. `purpose` is the word for
        it in reports of a long wait."""
        self.peers.watch_all()
        report = LongWait(lambda: (what := self._under_way()) and f"{purpose} waits for {what}", self.clock)
        return wait_until(
            lambda: not self.peers.active_calls() and not self.dispatch.counts(), deadline, self.clock, report=report
        )

    def _under_way(self) -> str:
        """Return our calls, and what runs here for others, in words."""
        asked = [describe_wait(peer) for peer in self.peers.all() if peer.outgoing.pending]
        serving = list(self.dispatch.serving.copy().values())
        callers = Counter(request.caller.name for request in serving)
        served = []
        for name, n in callers.items():
            functions = {name_of(each.function): None for each in serving if each.caller.name == name and each.function}
            which = f" ({listed(list(functions), 3)})" if functions else ""
            served.append(f"{n} call{'s' if n > 1 else ''} of {name} served here{which}")
        return listed(asked + served)

    def discard(self) -> None:
        """Undo the constructor: the worker never started."""
        self._faults.close()
        self.listener.close()
        self.poller.close()

    def abandon(self) -> None:
        """Close, in a forked child, our copies of the parent's descriptors, and touch nothing else of its."""
        self.caller.running = False
        self.caller.forked = True
        unseen_failures.reporters = 0
        self.pool.abandon()
        for sock in (*self.listener.descriptors(), *self.peers.descriptors()):
            sock.close()
        self.poller.close()
        self.peers.shared_memory.lender.close()

    def _end(self) -> None:
        self.caller.running = False
        unseen_failures.reporters -= 1
        unseen_failures.report()
        self.execution.raised.report(at_once=True)

    def _close(self, timeout: float) -> int:
        """Close everything, in this order. Return how many functions still run after so many seconds."""
        self.listener.close()
        self.peers.stop(self.caller.stopped)
        self._faults.close()
        self.coroutines.stop()
        self.timers.stop()
        # one that ends its own worker is not left behind
        stuck = self.pool.stop(timeout) - (thread_state.pool is self.pool)
        self.peers.shared_memory.lender.close()
        return stuck

    def kill(self) -> None:
        """End as if the process had been killed, in tests. The peers see their connections close, and hear nothing."""
        if not self.running:
            return
        self._end()
        self._close(0.5)

    def stop(self, timeout: float = 2.0, graceful: bool = False) -> None:
        """Stop serving. Calls under way fail; functions still running are left to end by themselves. Answers that are
        on their way arrive: if it is graceful, as long as the threads that wait take to read them."""
        if not self.running:
            return
        self._end()
        self.peers.farewells.say(graceful)
        stuck = self._close(timeout)  # not before: a peer that has lost our farewell dials, and is told that we leave
        log.info("%s left the group", self.me.name)
        if stuck:  # expected after Ctrl-C: the program was told not to wait for them
            level = logging.INFO if isinstance(sys.exc_info()[1], KeyboardInterrupt) else logging.WARNING
            log.log(level, "%s stopped while %d of its functions are still running", self.me, stuck)
