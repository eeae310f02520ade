"""A reader is held up, interrupted or replaced, a link is new, a worker ends: nothing is left unread, no thread spins."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from remora import rpc
from remora.agent.calls.call import NEVER, Call
from remora.agent.channel.channel import Channel
from remora.agent.channel.outbox import Outbox
from remora.agent.peers.failure_detector import FailureDetector
from remora.errors import NotInitialized, RemoraError
from remora.faults.worker_faults import WorkerFaults
from remora.protocol.session import OWED_BYTES
from remora.testing.world import World
from remora.transport import link
from remora.transport.poller import READ
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire.frames import REFERENCES, encode
from tests.damage.receivers import frames_of
from tests.eventually import eventually

ACK, PONG = int(MessageType.ACK), int(MessageType.PONG)
LOW, OTHER = 1, 2  # calls
gate = threading.Event()


class Notes:
    """In the place of a poller, and of all else that a channel talks to."""

    lasts = True

    def __init__(self) -> None:
        self.armed: list[tuple[Any, object]] = []
        self.asked: list[Any] = []

    def add(self, source: object) -> None: ...
    def remove(self, source: object, descriptor: int) -> None: ...

    def arm(self, source: object, events: int) -> None:
        self.armed.append((source, events))

    def arm_to_last(self, source: object) -> None:
        self.armed.append((source, READ))

    def requests_on(self, channel: object) -> Any:
        return self.arrive

    def call_soon(self, task: Any) -> None:
        self.asked.append(task)

    def arrive(self, *args: object) -> None: ...
    faults = WorkerFaults()
    control_message = lost = connect = submit_system = submit_final = arrive


@pytest.fixture
def pair() -> Iterator[tuple[Any, Notes, socket.socket]]:
    """A channel that is read when the test says so; what was noted; and the other end."""
    notes: Any = Notes()
    ours, theirs = socket.socketpair()
    channel = Channel("peer", "session", True, notes, notes, notes)
    channel.attach(link.StreamLink(ours, "peer"), 0)
    notes.armed.clear()
    yield channel, notes, theirs
    ours.close()
    theirs.close()


def on_another_thread(function: Any, *args: object) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(20.0)


def ready(channel: Any) -> None:
    """As the poller says it, on a thread of the pool."""
    on_another_thread(channel.inbox.registration.ready, READ)


def reply(number: int, call: int, flags: int = 0) -> bytes:
    return encode(0x102 | RESPONSE, flags, 0, call, number, 0, 0.0, 0, b"")


# One step at a time.


def test_a_new_link_is_armed_though_a_thread_decides_about_the_old_one(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, _ = pair
    ours, theirs = socket.socketpair()
    arm = notes.arm

    def arm_slowly(source: object, events: int) -> None:
        notes.arm = arm  # type: ignore[method-assign]
        on_another_thread(channel.attach, link.StreamLink(ours, "peer"), 0)
        arm(source, events)

    notes.arm = arm_slowly  # type: ignore[method-assign]
    with ours, theirs:
        channel.pool_reads.unwatch()
    assert (channel.inbox.registration, READ) in notes.armed
    assert channel.inbox.registration.armed == READ


class Watched(dict[int, Any]):
    """The calls of a channel. Takes note of whether a reader that leaves at this moment sees that another call waits."""

    def __init__(self, channel: Any, calls: dict[int, Any]) -> None:
        super().__init__(calls)
        self.channel = channel
        self.seen: list[bool] = []

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        self.seen.append(len(self) > len(self.channel.low_priority))
        return found


@pytest.mark.parametrize("flags", [None, 0, REFERENCES], ids=["given up", "answered", "answered with references"])
def test_a_call_of_low_priority_that_ends_hides_no_call_that_waits(
    pair: tuple[Any, Notes, socket.socket], flags: int | None
) -> None:
    channel, _, theirs = pair
    call: Any = Call(None, "something", lambda call: None)  # type: ignore[arg-type]
    call.id = LOW
    channel.calls.waiting = channel.inbox._pending = calls = Watched(channel, {LOW: call, OTHER: None})
    channel.low_priority.add(LOW)
    if flags is not None:
        theirs.send(reply(1, LOW, flags))
        ready(channel)
    else:
        channel.take(LOW)
    assert calls.seen == [True]
    assert not channel.low_priority


def test_an_acknowledgement_that_a_struck_thread_did_not_send_is_sent_by_the_tick(
    pair: tuple[Any, Notes, socket.socket],
) -> None:
    """Else a peer whose session is full would wait for it, and send nothing more."""
    channel, _, theirs = pair
    channel.look_after_reader()
    with pytest.raises(BlockingIOError):
        theirs.recv(100, socket.MSG_DONTWAIT)
    channel.session.accept(1, OWED_BYTES)
    channel.look_after_reader()
    [ack] = frames_of(theirs.recv(100, socket.MSG_DONTWAIT))
    assert (ack.kind, ack.ack) == (ACK, 1)


@pytest.fixture
def stalled(pair: tuple[Any, Notes, socket.socket]) -> tuple[Any, Notes, socket.socket]:
    """The same, and a reader that has not moved for two ticks."""
    channel, notes, _ = pair
    channel.pending[OTHER] = None
    assert channel.reading.take()
    channel.look_after_reader()
    channel.look_after_reader()
    assert notes.armed[-1] == (channel.inbox.registration, READ)
    return pair


def test_a_pool_thread_does_not_spin_if_the_reader_stopped_in_the_midst_of_sorting(
    stalled: tuple[Any, Notes, socket.socket],
) -> None:
    channel, notes, theirs = stalled
    theirs.send(reply(1, OTHER))
    assert channel.sorting.take()
    ready(channel)
    assert notes.armed[-1] == (channel.inbox.registration, 0)
    channel.sorting.free[0] = True
    channel.watch(again=True)  # at the next tick
    assert notes.armed[-1] == (channel.inbox.registration, READ)


def test_a_reader_in_whose_stead_the_pool_read_is_woken_once(stalled: tuple[Any, Notes, socket.socket]) -> None:
    """Else its pongs were read in its stead, too, and each asked for the next."""
    channel, notes, theirs = stalled
    theirs.send(encode(PONG, 0, 0, 0, 0, 0, 0.0, 0, b""))
    ready(channel)
    assert notes.asked == []
    theirs.send(reply(1, 7))
    ready(channel)
    assert len(notes.asked) == 1
    assert notes.armed[-1] == (channel.inbox.registration, 0)  # the pong is for the reader
    channel.look_after_reader()
    assert notes.armed[-1] == (channel.inbox.registration, READ)  # it has not moved: the pool reads for good
    theirs.send(reply(2, 8))
    ready(channel)
    assert channel.session.received == 2
    assert len(notes.asked) == 1
    assert channel.inbox.registration.armed == READ


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reader_that_was_woken_and_waits_on_has_moved(
    pair: tuple[Any, Notes, socket.socket], asynchronous: bool
) -> None:
    channel, *_ = pair
    turns: list[object] = []

    def await_bytes(*args: object) -> bool:
        turns.append(channel.reading.holder())
        if len(turns) == 3:
            channel.pending.clear()
        return True

    peer: Any = type("Peer", (), {"now": staticmethod(lambda: 0.0), "incoming": None})
    call = Call(peer, "something")
    channel.pending[call.id] = call
    call.failure = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link.StreamLink, "await_bytes", await_bytes)
        assert channel.reading.take()
        if asynchronous:
            channel.waiter_reads._read_until(channel.inbox.registration, NEVER, lambda: not channel.pending, (call,))
        else:
            channel.waiter_reads._read_reply(call, channel.inbox.registration)
    assert len({id(turn) for turn in turns}) == 3


# With workers.


def wait_at_gate() -> str:
    assert gate.wait(20.0)
    return "passed"


def open_gate() -> str:
    gate.set()
    time.sleep(0.2)  # the reply of the call that waits there comes first
    return "open"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_handler_that_reads_the_reply_of_the_frame_below(
    me: str, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr(link, "BLOCK_LIMIT", 20.0)
    monkeypatch.setattr(FailureDetector, "tick", lambda self, now: None)  # which may ask the peer for a sign of life
    rpc.rpc_sync(me, abs, args=(1,))  # so that there is a link
    gate.clear()
    returned: list[float] = []

    def handle(*_: object) -> None:
        call = rpc.rpc_async(me, open_gate).wait if asynchronous else lambda: rpc.rpc_sync(me, open_gate)
        assert call() == "open"
        returned.append(time.monotonic())

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert rpc.rpc_sync(me, wait_at_gate) == "passed"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - returned[0] < 5.0


def test_a_handler_that_takes_long_causes_no_storm(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rpc.rpc_sync(me, abs, args=(1,))  # so that there is a link
    said: list[int] = []
    send = Outbox.send_unsequenced
    monkeypatch.setattr(Outbox, "send_unsequenced", lambda outbox, kind: (said.append(kind), send(outbox, kind)))
    answers: list[object] = []
    other = threading.Thread(target=lambda: answers.append(rpc.rpc_sync(me, abs, args=(-1,))))

    def handle(*_: object) -> None:
        other.start()
        end = time.monotonic() + 20.0
        while not answers and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        late = rpc.rpc_async(me, time.sleep, (0.4,))
        late.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    other.join(20.0)
    assert answers == [1]
    assert len(said) < 50


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_that_is_made_while_its_worker_ends_fails(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """It is put on the list after the calls there have failed, and before the channel is closed."""
    outcome: list[object] = []
    close, full = Channel.close, Outbox.is_full
    ending = threading.Event()
    gate.clear()
    with World(2) as world:
        world.run(0, rpc.rpc_sync, "worker1", abs, args=(1,))
        agent = world.workers[0].agent
        channel = agent.peers.find("worker1").outgoing

        def call() -> None:
            try:
                if asynchronous:
                    outcome.append(world.run(0, rpc.rpc_async, "worker1", wait_at_gate, timeout=0).wait(8.0))
                else:
                    outcome.append(world.run(0, rpc.rpc_sync, "worker1", wait_at_gate, timeout=8.0))
            except (RemoraError, RuntimeError, TimeoutError) as error:
                outcome.append(error)

        caller = threading.Thread(target=call)
        begun = threading.Event()

        def is_full(self: Outbox) -> bool:  # asked for after it was found that the worker runs
            if threading.current_thread() is caller:
                begun.set()
                assert ending.wait(20.0)
            return full(self)

        def close_late(self: Channel) -> None:
            if self is channel:
                ending.set()
                eventually(lambda: self.reading.locked() or self.reader.notify_ids or self.parked or outcome)  # it waits
            close(self)

        monkeypatch.setattr(Outbox, "is_full", is_full)
        monkeypatch.setattr(Channel, "close", close_late)
        caller.start()
        assert begun.wait(20.0)
        agent.stop()
        caller.join(20.0)
        gate.set()
    assert isinstance(outcome[0], NotInitialized)
