"""A worker that is slow is not silent: one that takes a minute to send or to read a single message, or that has paused
reading, is neither suspected nor given up. Time is virtual, and the wire carries as much as the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel import flow_control
from remora.faults.worker_faults import WorkerFaults
from remora.options import Settings
from remora.rpc.membership import MembershipEvent
from remora.testing import virtual_clock
from remora.testing.world import World
from remora.transport.link import ENOUGH, StreamLink, waiter
from remora.wire.frames import encode
from tests.agent.alone import wait_until

A_SECOND = 1 << 17  # bytes that the wire carries: more than the kernel keeps, less than a reader is woken for (`ENOUGH`)
NUMBERS = 5 << 18  # of four bytes each: they take longer than `silence_limit`
gate = threading.Event()


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


def wait_at_gate(number: int) -> int:
    assert gate.wait(20.0)
    return number


class Wire:
    """What is between two workers, in the place of the connection they made: it carries what the test has it carry."""

    def __init__(self, make_pair: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
        self._make_pair = make_pair
        self.kernel = (1 << 15, 1 << 16)  # bytes that wait at each end, about
        self.links: list[StreamLink] = []  # of each of the two
        self._ends: list[socket.socket] = []  # where those lead
        self._replaced: list[StreamLink] = []

    def splice(self, link: StreamLink) -> StreamLink:
        """The link to use in the place of a new one."""
        near, far = self._make_pair()
        spliced = StreamLink(near, link.where, clock=link.clock)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.kernel[0])
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.kernel[1])
        self._replaced.append(link)
        self.links.append(spliced)
        self._ends.append(far)
        return spliced

    @property
    def complete(self) -> bool:
        """Whether both workers are connected to it."""
        return len(self._ends) == 2

    def carry(self, nbytes: int) -> None:
        """So much in each direction, if there is so much to be said."""
        for link, source, sink in zip(self.links, self._ends, self._ends[::-1], strict=True):
            left = nbytes
            while left and _has_bytes(source, 1.0 if link.outbox_bytes else 0.0):
                data = source.recv(min(left, 1 << 16))
                sink.sendall(data)
                left -= len(data)

    def close(self) -> None:
        for each in (*self._ends, *self._replaced):
            each.close()


def _has_bytes(source: socket.socket, seconds: float) -> bool:
    """Whether there is something to read, within so many (real) seconds."""
    return waiter(source.fileno(), False)(seconds)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


@pytest.fixture(params=[socket.socketpair, tcp_pair], ids=["unix", "tcp"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    wire = Wire(request.param)
    monkeypatch.setattr(WorkerFaults, "interpose", lambda _, peer, link, leftover: wire.splice(link))
    yield wire
    wire.close()


@pytest.fixture
def world(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Two workers that have one connection, and know what time it is only by the test."""
    # However slow the machine: a second passes when both have read, and said, all that they could in the second before.
    monkeypatch.setattr(virtual_clock, "SETTLE_LIMIT", 60.0)
    with World(2, clock="virtual", watch=0, shared_memory=0) as world:
        yield world
        for rank in range(2):
            world.kill(rank)  # nobody carries their goodbyes


def listen(world: World, *ranks: int) -> list[MembershipEvent]:
    """What these workers hear of each other from now on."""
    heard: list[MembershipEvent] = []
    for rank in ranks:
        world.run(rank, rpc.on_membership, heard.append)
    return heard


def numbers(n: int) -> torch.Tensor:
    return torch.ones(n)


def how_many(tensor: torch.Tensor) -> int:
    return tensor.numel()


there_or_back = pytest.mark.parametrize(
    ("function", "argument", "seen"),
    [(how_many, torch.ones(NUMBERS), int), (numbers, NUMBERS, how_many)],
    ids=["request", "reply"],
)


@there_or_back
def test_one_message_may_take_longer_than_a_worker_may_be_silent(
    world: World, wire: Wire, function: Any, argument: Any, seen: Callable[[Any], int]
) -> None:
    """Its sender hears nothing until it has gone, and its reader nothing whole until it is there."""
    heard = listen(world, 0, 1)
    future = world.run(0, partial(rpc.rpc_async, timeout=0), "worker1", function, (argument,))
    wait_until(lambda: wire.complete)
    while not future.done():
        wire.carry(A_SECOND)
        world.clock.advance(1.0)
        assert heard == []
        assert world.clock.now() < 100.0
    assert seen(future.wait()) == NUMBERS
    assert world.clock.now() > Settings().silence_limit


@there_or_back
def test_so_may_the_part_of_it_that_the_kernel_has_taken(
    world: World, wire: Wire, function: Any, argument: Any, seen: Callable[[Any], int]
) -> None:
    """Its sender sees nothing leave any more, and what it asks is behind all that. Whoever reads it says that it does."""
    wire.kernel = (1 << 20, 1 << 20)
    test_one_message_may_take_longer_than_a_worker_may_be_silent(world, wire, function, argument, seen)


@pytest.mark.skipif(not ENOUGH, reason="whoever reads is woken for each packet here")
@pytest.mark.parametrize("wire", [tcp_pair], ids=["tcp"], indirect=True)
def test_one_that_becomes_slow_in_the_midst_of_a_message_is_heard(world: World, wire: Wire) -> None:
    """Much came at a time, so whoever reads is not woken for little any more; but little is all that comes now."""
    heard = listen(world, 1)
    future = world.run(0, partial(rpc.rpc_async, timeout=0), "worker1", how_many, (torch.ones(NUMBERS),))
    wait_until(lambda: wire.complete)
    wait_until(lambda: wire.carry(A_SECOND) or any(link._gathering for link in wire.links))
    for _ in range(10):
        wire.carry(100)
        world.clock.advance(1.0)
        assert heard == []
    assert any(link._gathering for link in wire.links)
    assert future.cancel()


def test_a_worker_that_has_paused_reading_is_there_and_so_is_the_one_it_does_not_listen_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not hear pings, and does not answer them; nor does it hear that its caller lives."""
    monkeypatch.setattr(flow_control, "UNANSWERED_LIMIT", 4)
    with World(2, clock="virtual", watch=0) as world:
        heard = listen(world, 0, 1)
        call = partial(world.run, 0, partial(rpc.rpc_async, timeout=0), "worker1", wait_at_gate)
        futures = [call((number,)) for number in range(5)]
        world.wait_until(lambda: world[1].agent.dispatch.counts() == 5)
        incoming = world[1].agent.peers.find("worker0").incoming
        assert incoming is not None
        assert incoming.paused
        world.clock.advance(1.0)  # threads that the poller had told before that have looked
        futures += [call((number,)) for number in range(5, 10)]  # which nobody reads
        world.clock.advance(60.0)
        assert incoming.paused
        assert world[1].agent.dispatch.counts() == 5
        assert heard == []
        gate.set()
        assert [future.wait(20.0) for future in futures] == list(range(10))


# What a link takes for a sign of life.


@pytest.fixture
def link() -> Iterator[tuple[StreamLink, socket.socket]]:
    """One whose other end was last heard a long time ago."""
    near, far = socket.socketpair()
    link = StreamLink(near, "there")
    link.last_heard = 0.0
    yield link, far
    link.close()
    far.close()


@pytest.mark.parametrize("read", [StreamLink.read, StreamLink.read_some])
def test_a_part_of_a_message_is_a_sign_of_life(link: tuple[StreamLink, socket.socket], read: Any) -> None:
    near, far = link
    far.sendall(encode(0x102, 0, 0, 1, 1, 0, 0.0, 1 << 20, bytes(1 << 20))[:10_000])  # of a million bytes
    assert read(near) == []
    assert near.last_heard > 0.0


def test_that_a_part_of_a_message_leaves_is_one_too(link: tuple[StreamLink, socket.socket]) -> None:
    near, far = link
    assert not near.write([b"." * (1 << 23), b"."])
    assert near.last_heard > 0.0
    near.last_heard = 0.0
    assert not near.flush()
    assert near.last_heard == 0.0, "nothing left"
    far.recv(1 << 19)
    assert not near.flush()
    assert near.last_heard > 0.0
