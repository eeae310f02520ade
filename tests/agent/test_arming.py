"""A link stays armed while it is read to its end; whatever gets in the way, nothing that came is left lying there."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from remora import rpc
from remora.agent.channel import Channel
from remora.transport import stream
from remora.transport.poller import END, READ, WRITE, EpollPoller
from remora.wire.frames import HEADER, Frame
from tests.agent.alone import wait_until

portable = os.environ.get("REMORA_POLLER") == "select" or not hasattr(select, "epoll")
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


def test_requests_in_a_row_need_no_arming(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = incoming(me)
    armed: list[object] = []
    original = EpollPoller._modify

    def modify(poller: EpollPoller, source: object, mask: int) -> None:
        if source is channel._port:
            armed.append(mask)
        original(poller, source, mask)  # type: ignore[arg-type]

    monkeypatch.setattr(EpollPoller, "_modify", modify)
    for _ in range(50):
        assert answered(me)
    assert armed == []


def test_what_came_while_somebody_else_was_reading_is_read_afterwards(me: str) -> None:
    channel = incoming(me)
    assert channel._port is not None
    with channel._reading:
        future = rpc.rpc_async(me, double, (21,))
        wait_until(lambda: channel._port is not None and not channel._port.armed)  # it was told, and could not read
    channel.reconsider_reading()
    assert future.wait(SOON) == 42


def test_somebody_who_looks_at_the_very_moment_when_another_one_has_read(me: str) -> None:
    """Whoever arms the port may find a thread reading that is about to leave, and must not undo what that one relies on."""
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
    with channel._reading:  # so that they pile up
        futures = [rpc.rpc_async(me, len, (bytes(100_000),)) for _ in range(100)]
        wait_until(lambda: channel._port is not None and not channel._port.armed)
    channel.reconsider_reading()
    assert [future.wait(20.0) for future in futures] == [100_000] * 100


# One step at a time, with a poller that only takes note.


class Notes:
    """In the place of a poller, and of whoever else a channel talks to."""

    lasts = True

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
    word = lost = connect = arrive
    serve = serve_quickly = arrive


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


def request(number: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), 0x102, 0, 0, number, number, 0, 0.0) + body


def test_a_request_that_is_read_leaves_it_armed(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, theirs = pair
    theirs.send(request(1))
    channel.ready(channel._port, READ)
    assert len(notes.requests) == 1
    assert notes.armed == []


def test_the_last_event_of_a_link_is_asked_for_again(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, theirs = pair
    theirs.send(request(1))
    channel.ready(channel._port, READ | END)
    assert len(notes.requests) == 1
    assert notes.armed == ["to last"]


def test_what_was_armed_for_writing_fires_once(pair: tuple[Any, Notes, socket.socket]) -> None:
    channel, notes, _ = pair
    channel._port.armed = READ | WRITE
    channel.ready(channel._port, WRITE)
    assert notes.armed == ["to last"]


def test_a_link_that_is_not_read_to_its_end_is_asked_for_again(
    pair: tuple[Any, Notes, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_TURN", 0)  # others have theirs first
    channel, notes, theirs = pair
    theirs.send(request(1))
    channel.ready(channel._port, READ)
    assert (notes.requests, notes.armed) == ([], ["to last"])
    monkeypatch.undo()
    channel.ready(channel._port, READ)
    assert len(notes.requests) == 1
    assert notes.armed == ["to last"]


class Lock:
    """Is locked, as far as the first look can tell."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.armed_at_the_look: list[int] = []

    def acquire(self, blocking: bool = True) -> bool:
        return False

    def locked(self) -> bool:
        self.armed_at_the_look.append(self.channel._port.armed)
        return len(self.armed_at_the_look) == 1


def test_who_could_not_read_has_it_asked_for_again_though_the_other_one_has_left(
    pair: tuple[Any, Notes, socket.socket],
) -> None:
    channel, notes, _ = pair
    channel._reading = Lock(channel)
    channel.ready(channel._port, READ)
    assert notes.armed == ["to last"]


def test_who_looks_whether_somebody_reads_has_said_before_that_it_does(pair: tuple[Any, Notes, socket.socket]) -> None:
    """A reader that leaves between the look and what comes of it sees that, and arms it afterwards."""
    channel, notes, _ = pair
    channel._reading = lock = Lock(channel)
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
        port = type("Port", (), {"fileno": lambda self: ours.fileno()})()
        poller.add(port)
        poller.arm_to_last(port)
        [(_, events)] = poller.wait()
        assert events != READ  # so whoever is told asks again
        assert link.read() == []
        assert not link.unread  # as far as one read can tell
        with pytest.raises(stream.LinkClosed):
            link.read()
    finally:
        poller.close()
        link.close()
