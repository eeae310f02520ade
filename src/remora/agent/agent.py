"""A worker's engine: it owns the threads, connects the parts below and makes calls. Knows no RRefs and no autograd."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from remora.agent import fault_hooks
from remora.agent.calls.call import Call, name_of, next_call_id
from remora.agent.calls.future import Future, Origin, forgotten, wait_until
from remora.agent.calls.retries import Retries
from remora.agent.calls.unanswered import Unanswered
from remora.agent.channel.channel import Channel
from remora.agent.channel.delayed_flush import DelayedFlush
from remora.agent.channel.waiter_owned import WaiterOwned
from remora.agent.memory.routing import DeviceRouting
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.listener import Listener
from remora.agent.peers.manager import Peer, PeerManager
from remora.agent.runtime.current import blocking_region, reacquire_slot, release_slot, thread_state
from remora.agent.runtime.event_loop import Coroutines
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.timers import Timers
from remora.agent.serving.dispatch import Dispatch
from remora.agent.serving.execution import Execution
from remora.errors import FORKED, CallError, CallNotSent, NotInitialized
from remora.faults.injector import Injector
from remora.long_wait import LongWait, listed
from remora.options import Settings
from remora.protocol.membership import REGULAR_TICK
from remora.transport.poller import make_poller
from remora.vocabulary.ids import WorkerInfo
from remora.wire.frames import FAILED
from remora.wire.packed import Packed

log = logging.getLogger("remora")

TICK = REGULAR_TICK


def _at_once(work: Callable[[], None]) -> None:
    work()


def describe_wait(peer: Peer) -> str:
    """A worker that is waited for, and what it does for us: "w1, which runs train since 40 s"."""
    calls = list(peer.outgoing.pending.values())
    if not calls:
        return f"{peer.name} (suspected: {peer.doubt})" if peer.doubt else peer.name
    oldest, more = calls[0], len(calls) - 1
    return f"{peer.name}, which runs {name_of(oldest.target)} since {oldest.age:.0f} s{f' and {more} more' if more else ''}"


def _refused(call: Call) -> CallNotSent:
    return CallNotSent(f"RPCErr:2:Send attempt failed intentionally for the {call.what}")


class Agent:
    """Makes calls and serves them."""

    def __init__(
        self,
        me: WorkerInfo,
        threads: int,
        timeout: float,
        settings: Settings,
        introduction: HandshakeClient,
        places: DeviceRouting,
    ) -> None:
        self.me = me
        self.timeout = timeout
        self.clock = settings.clock
        self.poller = make_poller()
        self.pool = WorkerPool(me.name, threads, self.poller, self.clock)
        self.timers = Timers(me.name, self.clock)
        self.company = DelayedFlush(self.timers)
        self.attendance = WaiterOwned(self.timers)
        self.dispatch = Dispatch(me, self.pool, self.company, self.clock.now)
        self.coroutines = Coroutines(me.name, self.clock)
        self.execution = Execution(self.dispatch, self.coroutines)
        self.peers = PeerManager(self.pool, self.poller, self.timers, self.dispatch, settings, introduction, places)
        self.listener = Listener(self.peers, self.poller, introduction, settings, self.timers)
        self.own_time = introduction.own_time
        self.retries = Retries(self)
        self.faults: Injector | None = None  # what shall go wrong, in tests
        self.running = False
        self._unanswered = Unanswered(self.clock, self.pool.submit_system)
        self.ticks: list[Callable[[], None]] = []  # what else is to be looked at now and then
        self.forked = False  # this is a copy, in a child of the process that it runs in
        self.gil_profiling = False
        if settings.faults:
            fault_hooks.begin(self, settings.faults)

    def start(self) -> None:
        """Begin to serve."""
        self.running = True
        forgotten.reporters += 1
        self.timers.start()
        self.pool.start()
        self.listener.open()
        self._tick()

    # Making calls.

    def call(self, peer: Peer, kind: int, packed: Packed, flags: int, timeout: float, target: object) -> Any:
        """Call and wait for the value."""
        call = Call(peer, target)
        call.undo = undo = packed.undo
        call.recording = packed.recording
        sent = peer.outgoing.session.sent
        if undo is not None:
            undo.armed = False  # from here on `_give_up` sees to it: nothing is called before the `try`
        try:
            self._exchange(peer, call, kind, packed, flags, timeout)
        except (CallNotSent, NotInitialized):
            call.take_back()
            raise
        except BaseException:  # Ctrl-C: no thread waits for the answer any more
            self._give_up(peer, call, sent)
            raise
        if packed.lent:
            self._fence(peer, call, packed)
        return call.value()

    def _give_up(self, peer: Peer, call: Call, sent: int) -> None:
        """Something else went wrong while a call was made, which may have been sent. (`sent`: how many messages were,
        before.) If it was, and is our own business, its outcome is taken note of."""
        if not peer.outgoing.has_sent(call.id, sent):
            peer.outgoing.forget(call)
            if not call.settled:
                call.take_back()
        elif call.on_settled is None:
            peer.outgoing.forget(call)

    def _fence(self, peer: Peer, call: Call, packed: Packed) -> None:
        """Device memory was lent in place. If the call succeeded it has been fetched; else perhaps never will be."""
        if call.reply is not None and not call.reply.flags & FAILED and peer.sharing is not None:
            peer.sharing.handover.fence(packed.lent)

    def _exchange(self, peer: Peer, call: Call, kind: int, packed: Packed, flags: int, timeout: float) -> None:
        left = call.limit(timeout, self.timeout)
        channel = peer.outgoing
        if not self.running or peer.state != "alive":
            self._check(peer, call)
        if self.faults is not None and self.faults.refuses(peer.name, kind, packed.body):
            raise _refused(call)
        pool = release_slot()
        try:
            if channel.full:
                channel.wait_for_room(call)
                left = call.left()
            channel.unwatch()
            channel.pending[call.id] = call
            if packed.buffers:
                self._send_large(channel, call, kind, packed, flags, left)
            else:
                channel.send(kind, call.id, packed.body, flags, left)
            if peer.state != "alive" or channel.closed:
                self._recheck(peer, call)
            channel.await_reply(call)
        finally:
            if pool is not None:
                reacquire_slot(pool)

    def _send_large(self, channel: Channel, call: Call, kind: int, packed: Packed, flags: int, left: float) -> None:
        try:
            channel.send_packed(kind, call, packed, flags, left, call.deadline)
        except CallNotSent:
            if channel.forget(call) or not call.asynchronous:
                raise
            call.take_back()  # its deadline has ended it meanwhile

    def call_async(
        self,
        peer: Peer,
        kind: int,
        packed: Packed,
        flags: int,
        timeout: float,
        target: object,
        origin: Origin | None = None,
        translate: Callable[[BaseException], BaseException] | None = None,
    ) -> Future[Any]:
        """Call and return a future of the value. Errors of the call itself are passed through `translate`."""
        call = Call(peer, target)
        call.translate = translate
        future = call.make_future(origin)
        try:
            self.start_call(peer, call, kind, packed, flags, timeout)
        except CallError as error:  # as with any other failure of the call: who waits for it gets it
            peer.outgoing.forget(call)
            call.future = None
            call.take_back()
            future._fail(error if translate is None else translate(error))
        return future

    def start_call(
        self,
        peer: Peer,
        call: Call,
        kind: int,
        packed: Packed,
        flags: int,
        timeout: float,
        control: bool = False,
        urgent: bool = True,
        asked: bool = False,
    ) -> None:
        """Send an asynchronous call. Control messages are ours: they are small, and wait for no thread. If it is not
        urgent, it may wait a moment for company, and the reply is taken note of when a thread looks at the link next
        (at the next tick at the latest). `asked`: the fault plan, if there is one, has had its say."""
        call.undo = undo = packed.undo
        call.recording = packed.recording
        channel = peer.outgoing
        sent = channel.session.sent
        if undo is not None:
            undo.armed = False  # from here on `_give_up` sees to it: nothing is called before the `try`
        try:
            if not self.running or peer.state != "alive":
                self._check(peer, call)
            left = call.limit(timeout, self.timeout)
            if self.faults is not None and not asked and self.faults.refuses(peer.name, kind, packed.body):
                call.fail(_refused(call))
                call.settle(_at_once)
                return
            if channel.full and not control:
                with blocking_region():
                    channel.wait_for_room(call)
                left = call.left()
            hurry = 0.0 < left < 2 * TICK  # the tick could come too late
            urgent = urgent or hurry
            channel.pending[call.id] = call  # first: its deadline may have passed
            if hurry:
                self._expire_at(channel, call)
            if not urgent:
                channel.low_priority.add(call.id)
            elif hurry or call.future is None:
                call.heeded = True
                channel.expect(call)
            elif not channel.waiter_owned:
                self.attendance.expect(channel)
            if packed.buffers:
                self._send_large(channel, call, kind, packed, flags, left)
            elif urgent and len(channel.pending) == 1:  # a program that makes one call at a time waits for it
                channel.send(kind, call.id, packed.body, flags, left)
            elif urgent:
                channel.send_batched(kind, call.id, packed.body, flags, left)
                if call.heeded and channel.waiter_owned:
                    channel.flush()  # no thread may come to do it
            elif channel.send_low_priority(kind, call.id, packed.body, flags, left):
                self.company.expect(channel)
            if peer.state != "alive" or channel.closed:
                self._recheck(peer, call)
        except CallError:
            raise
        except BaseException:  # Ctrl-C: the program will never know of this call
            self._give_up(peer, call, sent)
            raise

    def tell(self, peer: Peer, kind: int, packed: Packed) -> None:
        """Send a control message that has no answer. It is numbered and kept like any other, so it arrives: with the
        next message, or in a moment."""
        if self.running and peer.state == "alive":
            channel = peer.outgoing
            if channel.send_low_priority(kind, next_call_id(), packed.body):
                self.company.expect(channel)

    def _check(self, peer: Peer, call: Call) -> None:
        if not self.running:
            raise self._stopped(call)
        if peer.state != "alive":
            raise self.peers.gone_error(peer, call.what)

    def _stopped(self, call: Call) -> NotInitialized:
        why = f". {FORKED.format(name=self.me.name)}" if self.forked else ""
        return NotInitialized(f"{call.what}: RPC is no longer running on this node ({self.me}){why}")

    def _recheck(self, peer: Peer, call: Call) -> None:
        """The peer went away while the call was being put on the list: whoever failed the list may have missed it."""
        if peer.outgoing.forget(call):
            call.fail(self.peers.gone_error(peer, call.what) if self.running else self._stopped(call))
            call.settle(self.pool.submit_system if self.running else _at_once)

    # Time passes.

    def _tick(self) -> None:
        if not self.running:
            return
        now = self.clock.now()
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
        if forgotten.due:
            self.pool.submit_system(forgotten.report)  # not here: the text of an error is the program's code
        if self.execution.raised.due:
            self.pool.submit_system(self.execution.raised.report)  # (what stands in the place of stderr may be, too)
        for channel, call in list(self.peers.due(now + 2 * TICK)):
            self._expire_at(channel, call)

    def _expire_at(self, channel: Channel, call: Call) -> None:
        def expire() -> None:
            if channel.forget(call):
                call.fail(call.timed_out())
                call.settle(self.pool.submit_system)

        self.timers.at(call.deadline, expire)

    def counters(self) -> dict[str, int | float]:
        """What the agent is doing, under PyTorch's names, and the memory it keeps, under ours."""
        _, watching, active = self.pool.counts()
        found: dict[str, int | float] = {
            "agent.thread_pool_size": self.pool.limit,
            "agent.num_idle_threads": min(watching, self.pool.limit),
            "agent.client_active_calls": self.peers.active_calls(),
            "agent.server_active_calls": self.dispatch.counts(),
            "agent.server_active_async_calls": max(self.dispatch.counts() - active - len(self.pool.backlog), 0),
        }
        found.update(self.peers.bulk.counters(each for peer in self.peers.all() if (each := peer.sharing) is not None))
        if self.gil_profiling:
            found["agent.gil_average_wait_time_us"] = self.measure_gil_wait()
        return found

    def measure_gil_wait(self) -> float:
        """Microseconds a thread waits for the interpreter lock now, beyond what it asked to sleep."""
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
        """Calls of ours, and what runs here for others, in words."""
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
        fault_hooks.end(self)
        self.listener.close()
        self.poller.close()

    def abandon(self) -> None:
        """In a forked child: close our copies of the parent's descriptors, and touch nothing else of its."""
        self.running = False
        self.forked = True
        forgotten.reporters = 0
        self.pool.abandon()
        for sock in (*self.listener.descriptors(), *self.peers.descriptors()):
            sock.close()
        self.poller.abandon()
        self.peers.bulk.lender.abandon()

    def _end(self) -> None:
        self.running = False
        forgotten.reporters -= 1
        forgotten.report()
        self.execution.raised.report(at_once=True)

    def kill(self) -> None:
        """For tests: end as if the process had been killed. The peers see their connections close, and hear nothing."""
        if not self.running:
            return
        self._end()
        self.listener.close()
        self.peers.stop(self._stopped)
        fault_hooks.end(self)
        self.coroutines.stop()
        self.timers.stop()
        self.pool.stop(0.5)
        self.peers.bulk.lender.close()

    def stop(self, patience: float = 2.0, graceful: bool = False) -> None:
        """Stop serving. Calls under way fail; functions still running are left to end by themselves. Answers that are
        on their way arrive: if it is graceful, as long as those who wait for them take them."""
        if not self.running:
            return
        self._end()
        self.peers.say_goodbye(graceful)
        self.listener.close()  # not before: who has lost our last words dials, and is told that we leave
        self.peers.stop(self._stopped)
        fault_hooks.end(self)
        self.coroutines.stop()
        self.timers.stop()
        # one that ends its own worker is not left behind
        stuck = self.pool.stop(patience) - (thread_state.pool is self.pool)
        self.peers.bulk.lender.close()
        log.info("%s left the group", self.me.name)
        if stuck:
            log.warning("%s stopped while %d of its functions are still running", self.me, stuck)
