"""A link writes without waiting, keeps what the kernel does not take, and notices the end of its peer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from remora.transport.stream import LinkClosed, StreamLink
from remora.wire.frames import HEADER


def frame(call: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), 0x102, 0, 0, call, call, 0, 0.0) + body


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
    a.write([HEADER.pack(6, 0x102, 0, 0, 2, 2, 0, 0.0), body])
    body[:] = b"after!"
    got = b.read()
    while got[-1].call != 2:
        a.flush()
        got += b.read()
    assert got[-1].body == b"before"


def test_with_patience_a_large_message_leaves_from_its_own_memory(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    body = b"z" * (16 << 20)
    got: list[bytes] = []

    def read() -> None:
        while not got:
            got.extend(bytes(each.body) for each in b.read_waiting(5.0))

    reader = threading.Thread(target=read)
    reader.start()
    assert a.write([frame(1, body)], patience=5.0, until=float("inf"))
    reader.join(10)
    assert a.outbox_bytes == 0
    assert got == [body]


def test_reading_waits_no_longer_than_told(links: tuple[StreamLink, StreamLink]) -> None:
    assert links[0].read_waiting(0.0) == []
    assert links[0].read_waiting(0.01) == []


def test_the_end_of_the_peer_is_an_error(links: tuple[StreamLink, StreamLink]) -> None:
    a, b = links
    a.write([frame(1)])
    a.finish()
    assert [each.call for each in b.read()] == [1]
    with pytest.raises(LinkClosed):
        b.read()
    with pytest.raises(LinkClosed):
        b.read_waiting(None)


def test_severing_wakes_a_reader(links: tuple[StreamLink, StreamLink]) -> None:
    a, _ = links
    ended = threading.Event()

    def read() -> None:
        try:
            while True:
                a.read_waiting(None)
        except OSError:
            ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    a.sever()
    assert ended.wait(5)
    thread.join(5)
