"""A link writes without waiting, keeps what the kernel does not take, and notices the end of its peer."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import math
import socket
import sys
import termios
import threading
import weakref
from collections.abc import Iterator

import pytest

from remora import rpc
from remora.testing.world import World
from remora.transport.link import ENOUGH, LinkClosed, StreamLink, waiter
from remora.wire.frames import Frame, encode
from tests.eventually import eventually


def frame(call: int, body: bytes = b"") -> bytes:
    return encode(0x102, 0, 0, call, call, 0, 0.0, len(body), body)


def read_waiting(link: StreamLink, seconds: float) -> list[Frame]:
    link.await_bytes(seconds)
    return link.read_some()


@pytest.fixture
def links() -> Iterator[tuple[StreamLink, StreamLink]]:
    a, b = (StreamLink(end, "peer") for end in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_what_is_written_is_read(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    assert a.write([frame(1, b"x"), frame(2), frame(3, b"yy")])
    got = b.read()
    assert [(each.call, each.body) for each in got] == [(1, b"x"), (2, b""), (3, b"yy")]
    assert b.read() == []


def test_what_the_kernel_does_not_take_waits_in_the_outbox_and_leaves_in_order(
    links: tuple[StreamLink, StreamLink],
) -> None:
    a, b = links
    bodies = [bytes([i]) * 200_000 for i in range(40)]
    taken = [a.write([frame(i, body)]) for i, body in enumerate(bodies)]
    assert not all(taken)
    assert a.outbox_bytes > 0
    got = []
    while len(got) < len(bodies):
        got += b.read()
        a.flush()
    assert [(each.call, bytes(each.body)) for each in got] == list(enumerate(bodies))
    assert a.flush()
    assert a.outbox_bytes == 0


def test_the_outbox_holds_a_copy(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    while a.write([frame(1, b"." * 100_000)]):
        pass
    body = bytearray(b"before")
    a.write([frame(2, bytes(body))[:-6], body])
    body[:] = b"after!"
    got = b.read()
    while got[-1].call != 2:
        a.flush()
        got += b.read()
    assert got[-1].body == b"before"


def test_within_the_stall_limit_a_large_message_leaves_from_its_own_memory(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    body = b"z" * (16 << 20)
    got: list[bytes] = []

    def read() -> None:
        while not got:
            got.extend(bytes(each.body) for each in read_waiting(b, 5.0))

    reader = threading.Thread(target=read)
    reader.start()
    assert a.write([frame(1, body)], stall_limit=5.0, until=float("inf"))
    reader.join(10)
    assert a.outbox_bytes == 0
    assert got == [body]


def test_reading_waits_no_longer_than_told(links: tuple[StreamLink, StreamLink]) -> None:
    assert read_waiting(links[0], 0.0) == []
    assert read_waiting(links[0], 0.01) == []


def test_the_end_of_the_peer_is_an_error(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    a.write([frame(1)])
    a.sock.shutdown(socket.SHUT_WR)
    assert [each.call for each in b.read()] == [1]
    with pytest.raises(LinkClosed):
        b.read()
    with pytest.raises(LinkClosed):
        read_waiting(b, math.inf)


def test_severing_wakes_a_reader(links: tuple[StreamLink, StreamLink]) -> None:
    a, _ = links
    ended = threading.Event()

    def read() -> None:
        try:
            while True:
                read_waiting(a, math.inf)
        except OSError:
            ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    a.sever()
    assert ended.wait(5)
    thread.join(5)


# In the midst of something large.


SIZE = 16 * ENOUGH


@pytest.fixture
def gathering() -> Iterator[tuple[socket.socket, StreamLink]]:
    """A socket that has begun to send a frame of `SIZE`, of which much came at a time; and the link that reads it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        link = StreamLink(server.accept()[0], "peer")
    head = frame(1, b"." * SIZE)
    begun = threading.Thread(target=sender.sendall, args=(head[: -SIZE // 2],))
    begun.start()
    eventually(lambda: waiting(link) > ENOUGH // 8)
    while link.read() == [] and link._reader.missing > SIZE // 2:
        pass
    begun.join()
    yield sender, link
    sender.close()
    link.close()


def waiting(link: StreamLink) -> int:
    """How many bytes have come and were not read."""
    return int.from_bytes(fcntl.ioctl(link.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def wakes(link: StreamLink) -> bool:
    return waiter(link.fileno(), False)(0.0)


linux_only = pytest.mark.skipif(not ENOUGH, reason="turned off, or this is not Linux")


@linux_only
def test_who_reads_something_large_is_not_woken_for_little(gathering: tuple[socket.socket, StreamLink]) -> None:
    sender, link = gathering
    sender.sendall(bytes(1000))
    eventually(lambda: waiting(link) == 1000)
    assert not wakes(link)
    sender.sendall(bytes(ENOUGH))
    eventually(lambda: wakes(link))


@linux_only
def test_unless_nothing_more_comes(gathering: tuple[socket.socket, StreamLink]) -> None:
    sender, link = gathering
    sender.sendall(bytes(1000))
    eventually(lambda: waiting(link) == 1000)
    link.notify()
    assert wakes(link)
    assert link.read() == []
    assert not wakes(link)


@linux_only
def test_and_for_the_end_of_it_and_what_follows(gathering: tuple[socket.socket, StreamLink]) -> None:
    sender, link = gathering
    rest = threading.Thread(target=sender.sendall, args=(b"." * (SIZE // 2) + frame(2),))
    rest.start()
    got = []
    while len(got) < 2:
        assert waiter(link.fileno(), False)(10.0)
        got += link.read()
    rest.join()
    assert [(each.call, bytes(each.body)) for each in got] == [(1, b"." * SIZE), (2, b"")]
    sender.sendall(frame(3))
    assert waiter(link.fileno(), False)(10.0)
    assert [each.call for each in link.read()] == [3]


@linux_only
def test_when_the_other_end_is_gone_that_is_seen(gathering: tuple[socket.socket, StreamLink]) -> None:
    sender, link = gathering
    sender.close()
    eventually(lambda: wakes(link))
    with pytest.raises(LinkClosed):
        link.read()


@linux_only
def test_workers_see_to_it_that_nothing_waits_for_more_for_long() -> None:
    with World(2, transports=["tcp"], shared_memory=0) as world:
        world.run(0, rpc.rpc_sync, "worker1", abs, (-1,))
        link = world[1].agent.peers.find("worker0").incoming.link
        link._gathering = True
        link._wake_for(ENOUGH)  # as if something large had begun to come
        assert world.run(0, rpc.rpc_sync, "worker1", abs, (-2,)) == 2
        assert not link._gathering


def test_a_link_that_ends_in_the_midst_of_a_message_keeps_nothing_of_it(links: tuple[StreamLink, StreamLink]) -> None:
    """Not even in a reference cycle: the memory is gone before the collector comes."""
    a, b = links
    size = 8 << 20
    a.write([encode(0x102, 0, 1, 1, 1, 0, 0.0, 8, size.to_bytes(8, "little") + bytes(1 << 18))])
    while b.read() or not b.midway:
        pass
    a.write([bytes(1 << 24)])
    assert a.outbox_bytes
    assert b._reader._partial is not None
    assert b._reader._partial.buffers
    arriving = weakref.ref(b._reader._partial.buffers[0])
    leaving = weakref.ref(a._outbox[0].obj) if isinstance(a._outbox[0].obj, ctypes.Array) else None
    cycle: list[object] = [a, b]
    cycle.append(cycle)
    gc.disable()
    try:
        a.close()
        b.close()
        assert (arriving() is None) is True  # (not the storage itself: to print one takes a minute)
        assert leaving is None or leaving() is None
        assert not a.outbox_bytes
    finally:
        gc.enable()
