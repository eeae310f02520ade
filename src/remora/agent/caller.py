"""Makes calls: gives each its deadline, enters it in the channel's list of pending calls, and sends it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from remora.agent.calls.call import Call, next_call_id, note_end, remember_end
from remora.agent.calls.future import Future
from remora.agent.calls.unseen_failures import Origin
from remora.agent.channel.channel import Channel
from remora.agent.channel.delayed_flush import DelayedFlush
from remora.agent.channel.waiter_owned import WaiterOwned
from remora.agent.peers.peer import Peer
from remora.agent.runtime.current import blocking_region, reacquire_slot, release_slot
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.timers import Timers
from remora.errors import FORKED, CallError, CallNotSent, NotInitialized, SerializationError
from remora.faults.worker_faults import WorkerFaults
from remora.protocol.member_rules import REGULAR_TICK
from remora.vocabulary.ids import WorkerInfo
from remora.wire.frames import FAILED
from remora.wire.packed import Packed

SOON = 2 * REGULAR_TICK  # seconds: a deadline within them may pass before the tick comes
NOT_BEGUN = 1 << 64  # more messages than there ever are: sending has not begun


def _at_once(work: Callable[[], None]) -> None:
    work()


def _refused(call: Call) -> CallNotSent:
    return CallNotSent(f"RPCErr:2:Send attempt failed intentionally for the {call.what}")


class Caller:
    """Makes the calls of one worker."""

    def __init__(
        self,
        me: WorkerInfo,
        timeout: float,
        pool: WorkerPool,
        timers: Timers,
        delayed_flush: DelayedFlush,
        faults: WorkerFaults,
    ) -> None:
        self._me = me
        self.timeout = timeout  # of calls that do not say how long they may take
        self._pool = pool
        self._timers = timers
        self._delayed_flush = delayed_flush
        self._waiter_owned = WaiterOwned(timers)
        self.running = False
        self.forked = False  # this is a copy, in a child of the process that it runs in
        self._faults = faults

    def call(self, peer: Peer, kind: int, packed: Packed, flags: int, timeout: float, target: object) -> Any:
        """Call and wait for the value."""
        call = Call(peer, target)
        call.undo = undo = packed.undo
        call.context = packed.context
        channel = peer.outgoing
        outbox = channel.outbox
        sent = NOT_BEGUN
        if undo is not None:
            undo.armed = False  # from here on `_give_up` sees to it: nothing is called before the `try`
        try:
            left = call.limit(timeout, self.timeout)
            if not self.running or peer.state != "alive":
                self._check(peer, call)
            if self._faults.injector is not None and self._faults.refuse(peer.name, kind, packed.body):
                raise _refused(call)
            pool = release_slot()
            try:
                if outbox.is_full():
                    outbox.wait_for_room(call)
                    left = call.left()
                channel.pool_reads.unwatch()
                channel.pending[call.id] = call
                sent = channel.session.sent
                if packed.buffers:
                    self._send_large(channel, call, kind, packed, flags, left)
                else:
                    outbox.send(kind, call.id, packed.body, flags, left)
                if peer.state != "alive" or outbox.closed:
                    self._recheck(peer, call)
                channel.waiter_reads.await_reply(call)
            finally:
                if pool is not None:
                    reacquire_slot(pool)
        except (CallNotSent, NotInitialized):
            call.rollback()
            raise
        except BaseException:  # Ctrl-C: no thread waits for the answer any more
            self._give_up(peer, call, sent)
            note_end(call, waited=True)
            raise
        recorder, reply = peer.recorder, call.reply
        if recorder is not None:  # (`note_end`: of a flood most are not remembered, and cost no more than this)
            link, number = outbox.link, recorder.number_made
            ended = peer.now() if link is None else link.last_heard  # (it was heard a moment ago)
            if (
                not number() & recorder.sampling
                or ended - call.began > recorder.longest_made
                or reply is None
                or reply.flags & FAILED
            ):
                remember_end(recorder, call, ended, get_ident())
        # If the call succeeded, device memory that was lent in place has been fetched; else it perhaps never will be.
        if packed.lent and reply is not None and not reply.flags & FAILED and peer.shared_memory is not None:
            peer.shared_memory.device_exchange.fence(packed.lent)
        return call.value()

    def _give_up(self, peer: Peer, call: Call, sent: int) -> None:
        """Give up a call that may have been sent: something else went wrong while it was made. (`sent`: how many
        messages were, before; or NOT_BEGUN.) If it was, and is our own business, its outcome is taken note of."""
        if not peer.outgoing.outbox.has_sent(call.id, sent):
            peer.outgoing.forget(call)
            if not call.settled:
                call.rollback()
        elif call.on_settled is None:
            peer.outgoing.forget(call)

    def _send_large(self, channel: Channel, call: Call, kind: int, packed: Packed, flags: int, left: float) -> None:
        try:
            channel.send_packed(kind, call, packed, flags, left, call.deadline)
        except (CallNotSent, SerializationError) as error:
            if channel.forget(call) or not call.asynchronous:
                if isinstance(error, CallNotSent):
                    raise
                raise CallNotSent(f"{call.what}: {error}. It did not run.") from error
            call.rollback()  # its deadline has ended it meanwhile

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
        future: Future[Any] = Future(call, origin)
        call.future = future
        call.reply_channel = peer.outgoing
        call.asynchronous = True
        try:
            self.start_call(peer, call, kind, packed, flags, timeout)
        except CallError as error:  # as with any other failure of the call: who waits for it gets it
            peer.outgoing.forget(call)
            call.future = None
            call.rollback()
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
        urgent, it may wait up to 2 ms to share a write, and the reply is taken note of when a thread looks at the link next
        (at the next tick at the latest). `asked`: the fault plan, if there is one, has had its say."""
        call.undo = undo = packed.undo
        call.context = packed.context
        channel = peer.outgoing
        outbox = channel.outbox
        sent = NOT_BEGUN
        if undo is not None:
            undo.armed = False  # from here on `_give_up` sees to it: nothing is called before the `try`
        try:
            if not self.running or peer.state != "alive":
                self._check(peer, call)
            left = call.limit(timeout, self.timeout)
            if self._faults.injector is not None and not asked and self._faults.refuse(peer.name, kind, packed.body):
                call.fail(_refused(call))
                call.settle(_at_once)
                return
            if not control and outbox.is_full():
                with blocking_region():
                    outbox.wait_for_room(call)
                left = call.left()
            hurry = 0.0 < left < SOON
            urgent = urgent or hurry
            channel.pending[call.id] = call  # first: its deadline may have passed
            if hurry:
                self.expire_at(channel, call)
            if not urgent:
                channel.low_priority.add(call.id)
            elif hurry or call.future is None:
                call.notified = True
                channel.pool_reads.expect(call)
            elif not channel.reader.waiter_owned:
                self._waiter_owned.expect(channel)
            sent = channel.session.sent
            if packed.buffers:
                self._send_large(channel, call, kind, packed, flags, left)
            elif urgent and len(channel.pending) == 1:  # a program that makes one call at a time waits for it
                outbox.send(kind, call.id, packed.body, flags, left)
            elif urgent:
                outbox.send_batched(kind, call.id, packed.body, flags, left)
                if call.notified and channel.reader.waiter_owned:
                    outbox.flush()  # no thread may come to do it
            elif outbox.send_low_priority(kind, call.id, packed.body, flags, left):
                self._delayed_flush.expect(channel)
            if peer.state != "alive" or outbox.closed:
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
            if channel.outbox.send_low_priority(kind, next_call_id(), packed.body):
                self._delayed_flush.expect(channel)

    def _check(self, peer: Peer, call: Call) -> None:
        if not self.running:
            raise self.stopped(call)
        if peer.state != "alive":
            raise peer.gone_error(call.what)

    def stopped(self, call: Call) -> NotInitialized:
        """The error for a call on a worker that has ended."""
        why = f". {FORKED.format(name=self._me.name)}" if self.forked else ""
        return NotInitialized(f"{call.what}: RPC is no longer running on this node ({self._me}){why}")

    def _recheck(self, peer: Peer, call: Call) -> None:
        """The peer went away while the call was being put on the list: failing the list may have missed it."""
        if peer.outgoing.forget(call):
            call.fail(peer.gone_error(call.what) if self.running else self.stopped(call))
            call.settle(self._pool.submit_system if self.running else _at_once)

    def expire_at(self, channel: Channel, call: Call) -> None:
        """Have the call fail when its deadline has passed."""

        def expire() -> None:
            if channel.forget(call):
                call.fail(call.timed_out())
                call.settle(self._pool.submit_system)

        self._timers.at(call.deadline, expire)
