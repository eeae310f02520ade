"""A link stays armed while it is read to its end; whatever gets in the way, nothing that came is left lying there."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from remora import rpc
from remora.agent.calls.call import Call
from remora.agent.channel import channel as channel_module
from remora.agent.channel.channel import Channel
from remora.errors import CallTimeout
from remora.faults.worker_faults import WorkerFaults
from remora.options import FAST_PATHS
from remora.protocol.session import Session
from remora.transport import link as stream
from remora.transport.poller import END, READ, WRITE, EpollPoller
from remora.wire.frames import Frame, encode
from tests.agent.alone import wait_until, worker_alone

portable = not FAST_PATHS.epoll or not hasattr(select, "epoll")
pytestmark = pytest.mark.skipif(portable, reason="needs epoll")
SOON = 0.4  # seconds: less than a tick, which would look in any case


def double(x: int) -> int:
    return 2 * x


def incoming(me: str) -> Channel:
    """Where requests of the worker to itself arrive."""
    rpc.rpc_sync(me, double, args=(1,))
    found = rpc._get_current_rpc_agent().agent.peers.find(me).incoming
    assert found is not None
    return found


def answered(me: str) -> bool:
    return rpc.rpc_sync(me, double, args=(21,), timeout=SOON) == 42


@pytest.mark.skipif(not FAST_PATHS.lasting_arm, reason="turned off")
def test_requests_in_a_row_need_no_arming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.agent.agent.TICK", 3600.0)  # a tick arms all links
    with worker_alone() as me:
        channel = incoming(me)
        armed: list[object] = []
        original = EpollPoller._modify

        def modify(poller: EpollPoller, source: object, mask: int) -> None:
            if source is channel.inbox.registration:
                armed.append(mask)
            original(poller, source, mask)  # type: ignore[arg-type]

        monkeypatch.setattr(EpollPoller, "_modify", modify)
        for _ in range(50):
            assert rpc.rpc_sync(me, double, args=(21,)) == 42
        # One that is told while another is about to leave has the link armed again, which happens on a full machine.
        assert len(armed) < 10


def test_what_came_while_somebody_else_was_reading_is_read_afterwards(me: str) -> None:
    channel = incoming(me)
    assert channel.inbox.registration is not None
    with channel.reading:
        future = rpc.rpc_async(me, double, (21,))
        # it was told, and could not read
        wait_until(lambda: channel.inbox.registration is not None and not channel.inbox.registration.armed)
    channel.reconsider_reading()
    assert future.wait(SOON) == 42


def test_somebody_who_looks_at_the_very_moment_when_another_one_has_read(me: str) -> None:
    """Whoever arms the registration may find a thread reading that is about to leave, and must not undo what that
    one relies on."""
    channel = incoming(me)
    stop = threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            channel.reconsider_reading()

    threads = [threading.Thread(target=meddle) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            assert rpc.rpc_sync(me, double, args=(21,), timeout=20.0) == 42
    finally:
        stop.set()
        for thread in threads:
            thread.join(20.0)
    assert answered(me)


def test_more_than_is_read_at_a_time(me: str) -> None:
    channel = incoming(me)
    with channel.reading:  # so that they pile up
        futures = [rpc.rpc_async(me, len, (bytes(100_000),)) for _ in range(100)]
        wait_until(lambda: channel.inbox.registration is not None and not channel.inbox.registration.armed)
    channel.reconsider_reading()
    assert [future.wait(20.0) for future in futures] == [100_000] * 100


# One step at a time, with a poller that only takes note.


class Notes:
    """In the place of a poller, and of whoever else a channel talks to."""

    lasts = True
    incoming = None

    def __init__(self) -> None:
        self.armed: list[object] = []
        self.requests: list[Frame] = []

    def add(self, source: object) -> None: ...
    def remove(self, source: object, descriptor: int) -> None: ...

    def arm(self, source: object, events: int) -> None:
        self.armed.append(events)

    def arm_to_last(self, source: object) -> None:
        self.armed.append("to last")

    def requests_on(self, channel: object) -> Any:
        return self.requests.append

    def arrive(self, *args: object) -> None: ...
    control_message = lost = connect = arrive

    faults = WorkerFaults()
    submit_system = call_soon = submit_final = arrive


@pytest.fixture
def pair() -> Iterator[tuple[Any, Notes, socket.socket]]:
    """A channel that is read when the test says so; what was noted; and the other end."""
    notes: Any = Notes()
    ours, theirs = socket.socketpair()
    channel = Channel("peer", "session", False, notes, notes, notes)
    channel.attach(stream.StreamLink(ours, "peer"), 0)
    assert notes.armed == ["to last"]
    notes.armed.clear()
    yield channel, notes, theirs
    ours.close()
    theirs.close()


def test_a_tick_while_a_link_is_being_attached_does_not_leave_it_deaf(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick asks every channel to watch its link. It did so when it could see the link and the poller did not know it.
    The poller ignored that, the channel took the link for armed, and nothing was read from it until it was cut for its
    silence, 30 seconds later."""
    channel, notes, _ = pair
    before = channel.link

    def add(source: object) -> None:
        channel.watch(again=True)  # the tick, at the worst moment
        notes.armed.clear()  # what the poller does not know cannot be armed

    monkeypatch.setattr(notes, "add", add)
    ours, theirs = socket.socketpair()
    with ours, theirs, before.sock:
        channel.attach(stream.StreamLink(ours, "peer"), 0)
        assert notes.armed[-1:] == ["to last"]


def test_a_link_that_breaks_while_it_is_being_attached_is_a_broken_link(pair: tuple[Any, Notes, socket.socket]) -> None:
    """The error was taken for a lack of this worker, and the calls on the channel failed. The session goes on with the next
    link instead."""
    channel, _, _ = pair
    before = channel.link
    channel._retire(channel.inbox.registration)
    channel.send(0x102, 1, b"")
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, before.sock:
        channel.attach(stream.StreamLink(ours, "peer"), 0)
        assert channel.link is None or channel.link.failed
    assert [number for number, _, _ in channel.session.kept] == [1]


def ready(channel: Any, events: int) -> None:
    """As the poller says it, on a thread of the pool."""
    thread = threading.Thread(target=channel.pool_reads.ready, args=(channel.inbox.registration, events))
    thread.start()
    thread.join()


def request(number: int, body: bytes = b"") -> bytes:
    return encode(0x102, 0, 0, number, number, 0, 0.0, len(body), body)


def test_a_request_that_is_read_leaves_it_armed(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, theirs = pair
    theirs.send(request(1))
    ready(channel, READ)
    assert len(notes.requests) == 1
    assert notes.armed == []


def test_the_last_event_of_a_link_is_asked_for_again(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, theirs = pair
    theirs.send(request(1))
    ready(channel, READ | END)
    assert len(notes.requests) == 1
    assert notes.armed == ["to last"]


def test_what_was_armed_for_writing_fires_once(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, _ = pair
    channel.inbox.registration.armed = READ | WRITE
    ready(channel, WRITE)
    assert notes.armed == ["to last"]


def test_a_link_that_is_not_read_to_its_end_is_asked_for_again(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_TURN", 0)  # others have theirs first
    channel, notes, theirs = pair
    theirs.send(request(1))
    ready(channel, READ)
    assert (notes.requests, notes.armed) == ([], ["to last"])
    monkeypatch.undo()
    ready(channel, READ)
    assert len(notes.requests) == 1
    assert notes.armed == ["to last"]


def test_what_comes_while_another_thread_sorts_is_asked_for_again(pair: tuple[Any, Notes, socket.socket]) -> None:
    """That thread may have read already, or reads nothing: it goes on with what was left to it, or closes an old link."""
    channel, notes, theirs = pair
    theirs.send(request(1))
    with channel.sorting:
        ready(channel, READ)
    assert (notes.requests, notes.armed) == ([], ["to last"])
    ready(channel, READ)
    assert len(notes.requests) == 1


def test_a_thread_that_leaves_the_old_link_has_the_new_one_watched(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new link is not armed while a thread has the role of the reader, though that one read the old link."""
    channel, notes, _ = pair
    now = [0.0]
    peer: Any = SimpleNamespace(name="peer", incoming=None, now=lambda: now[0], suspicion="", note=None)
    call, other = Call(peer, "impatient"), Call(peer, "patient")
    channel.pending.update({call.id: call, other.id: other})
    ours, theirs = socket.socketpair()

    def reconnect(*args: object) -> None:
        channel.attach(stream.StreamLink(ours, "peer"), 0)
        now[0] = 2.0

    monkeypatch.setattr(stream.StreamLink, "await_bytes", reconnect)
    call.deadline = 1.0
    with pytest.raises(CallTimeout), ours, theirs:
        channel.waiter_reads.await_reply(call)
    assert notes.armed == ["to last"]


# Messages that cannot be dealt with.


def test_a_message_that_makes_no_sense_does_not_come_up_again_and_again(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, notes, theirs = pair
    again: list[object] = []
    notes.submit_final = again.append  # type: ignore[method-assign, assignment]
    received: list[int] = []

    def requested(frame: Frame) -> None:
        received.append(frame.number)
        if frame.number == 1:
            raise ValueError("on purpose")

    channel.inbox._requested = requested
    theirs.send(request(1) + request(2))
    ready(channel, READ)
    assert (received, again, channel.session.received) == ([1, 2], [], 2)


def test_the_main_thread_does_not_leave_things_to_a_pool_that_has_gone_home(pair: tuple[Any, Notes, socket.socket]) -> None:
    """Whoever stops the pool does what is left, on the main thread: it would leave it to itself, for ever."""
    channel, notes, _ = pair
    left: list[object] = []
    notes.submit_final = left.append  # type: ignore[method-assign, assignment]
    channel.inbox.frames.append(Frame(0x102, 0, 1, 1, 0, 0.0, b"", 0))
    channel.inbox.go_on()
    assert left == [channel.inbox.go_on]
    channel.close()
    left.clear()
    channel.inbox.go_on()
    assert (left, len(channel.inbox.frames)) == ([], 0)


def test_a_channel_that_is_closed_in_the_midst_of_writing(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, or by a signal handler on top of the one that writes: the writer gets no error of its own."""
    channel, _, _ = pair
    keep = Session.keep

    def close_meanwhile(session: Session[Any], *args: Any) -> None:
        keep(session, *args)
        channel.outbox.clear()

    monkeypatch.setattr(Session, "keep", close_meanwhile)
    channel.enqueue(0x102, 1, b"")
    channel.flush()
    assert not channel.outbox.batched


def test_a_link_is_not_closed_while_a_thread_may_be_about_to_wait_at_it(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait at whatever file gets the number next, and not see that there is a new link."""
    monkeypatch.setattr(channel_module, "LETTING_GO", 20.0)
    channel, notes, _ = pair
    left: list[Any] = []
    notes.submit_final = left.append  # type: ignore[method-assign, assignment]
    sock = channel.link.sock
    assert channel.reading.take()
    channel._retire(channel.inbox.registration)
    [close] = left
    closer = threading.Thread(target=close)
    closer.start()
    wait_until(lambda: bool(channel.reading.waiters.asleep) or sock.fileno() < 0)
    assert sock.fileno() >= 0
    channel.reading.free[0] = True
    closer.join(20.0)
    assert sock.fileno() < 0


class Lock:
    """Is taken, as far as the first look can tell."""

    def __init__(self, channel: Any) -> None:
        self.free: dict[int, bool] = {}  # another thread has it
        self.channel = channel
        self.armed_at_the_look: list[int] = []

    def take(self) -> bool:
        return False

    def holder(self) -> int | None:
        return -1 if self.locked() else None

    def locked(self) -> bool:
        self.armed_at_the_look.append(self.channel.inbox.registration.armed)
        return len(self.armed_at_the_look) == 1


def test_who_could_not_read_has_it_asked_for_again_though_the_other_one_has_left(
    pair: tuple[Any, Notes, socket.socket],
) -> None:
    channel, notes, _ = pair
    channel.inbox.reading = Lock(channel)
    ready(channel, READ)
    assert notes.armed == ["to last"]


def test_who_looks_whether_somebody_reads_has_said_before_that_it_does(pair: tuple[Any, Notes, socket.socket]) -> None:
    """A reader that leaves between the look and what comes of it sees that, and arms it afterwards."""
    channel, notes, _ = pair
    channel.inbox.reading = lock = Lock(channel)
    channel.reconsider_reading()
    assert lock.armed_at_the_look == [-1]
    assert notes.armed == [0]


def test_the_end_that_comes_with_the_last_words() -> None:
    """Both are there when the event is: the words are read, and the end is told by the next event."""
    ours, theirs = socket.socketpair()
    link = stream.StreamLink(ours, "somebody")
    theirs.send(b"x")
    theirs.close()
    poller = EpollPoller()
    try:
        registration = type("Registration", (), {"fileno": lambda self: ours.fileno()})()
        poller.add(registration)
        poller.arm_to_last(registration)
        [(_, events)] = poller.wait()
        assert events != READ  # so whoever is told asks again
        assert link.read() == []
        assert not link.unread  # as far as one read can tell
        with pytest.raises(stream.LinkClosed):
            link.read()
    finally:
        poller.close()
        link.close()
