"""Both pollers: an event goes to one thread, once, until its source is armed again."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from remora.transport.poller import END, READ, WRITE, EpollPoller, Poller, SelectPoller


class Source:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def ready(self, events: int) -> None:
        raise AssertionError("the poller only reports")


@pytest.fixture(params=[EpollPoller, SelectPoller])
def poller(request: pytest.FixtureRequest) -> Iterator[Poller]:
    found: Poller = request.param()
    yield found
    found.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def wait_for_event(poller: Poller) -> list[tuple[object, int]]:
    """Wait until something fires; being woken for nothing is allowed."""
    for _ in range(100):
        fired = poller.wait()
        if fired:
            return list(fired)
    raise AssertionError("nothing fired")


def nothing_is_ready(poller: Poller) -> bool:
    poller.wake()
    return poller.wait() == []


def test_a_source_fires_once_until_it_is_armed_again(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    source = Source(pair[0])
    poller.add(source)
    pair[1].send(b"x")
    assert nothing_is_ready(poller)  # known, not armed
    poller.arm(source)
    assert wait_for_event(poller) == [(source, READ)]
    assert nothing_is_ready(poller)
    poller.arm(source, READ)
    assert wait_for_event(poller) == [(source, READ)]


def test_room_to_write_is_told_apart(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    source = Source(pair[0])
    poller.add(source)
    poller.arm(source, READ | WRITE)
    assert wait_for_event(poller) == [(source, WRITE)]
    pair[1].send(b"x")
    poller.arm(source, READ | WRITE)
    assert wait_for_event(poller) == [(source, READ | WRITE)]


def test_a_source_that_is_armed_to_last_fires_whenever_more_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    poller = EpollPoller()
    source = Source(pair[0])
    poller.add(source)
    poller.arm_to_last(source)
    for _ in range(3):
        pair[1].send(b"x")
        assert wait_for_event(poller) == [(source, READ)]
        assert nothing_is_ready(poller)  # told once, read or not
        pair[0].recv(10)
    pair[1].send(b"x")
    pair[1].close()
    assert wait_for_event(poller) == [(source, READ | END)]
    poller.arm_to_last(source)  # … and what was there before is told to whoever arms it again
    assert wait_for_event(poller) == [(source, READ | END)]
    poller.close()


def test_disarming_takes_it_back(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    source = Source(pair[0])
    poller.add(source)
    poller.arm(source)
    poller.arm(source, 0)
    pair[1].send(b"x")
    assert nothing_is_ready(poller)


def test_waiting_takes_no_descriptor(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    """A process that has no descriptors left still hears what its sources say."""
    source = Source(pair[0])
    poller.add(source)
    poller.arm(source)
    pair[1].send(b"x")
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(pair[0].fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        assert wait_for_event(poller) == [(source, READ)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_removed_source_never_fires_and_may_be_armed_in_vain(
    poller: Poller, pair: tuple[socket.socket, socket.socket]
) -> None:
    source = Source(pair[0])
    poller.add(source)
    poller.arm(source)
    poller.remove(source, source.fileno())
    pair[1].send(b"x")
    poller.arm(source)
    assert nothing_is_ready(poller)


def test_wake_lets_one_thread_return_even_if_it_comes_later(poller: Poller) -> None:
    poller.wake()
    assert poller.wait() == []
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (poller.wait(), woken.set()))
    thread.start()
    poller.wake()
    assert woken.wait(5)
    thread.join(5)


def test_an_event_reaches_exactly_one_of_many_threads(poller: Poller, pair: tuple[socket.socket, socket.socket]) -> None:
    source = Source(pair[0])
    poller.add(source)
    got: list[object] = []
    arrived = threading.Event()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for fired in poller.wait():
                got.append(fired)
                arrived.set()

    threads = [threading.Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for round_number in range(1, 50):
        arrived.clear()
        poller.arm(source)
        if round_number == 1:
            pair[1].send(b"x")
        assert arrived.wait(5)
        assert len(got) == round_number
    stop.set()
    for thread in threads:
        while thread.is_alive():
            poller.wake()
            thread.join(0.01)
    assert len(got) == 49


def test_a_poller_that_cannot_be_made_keeps_no_descriptor() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 64, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        os.close(held.pop())  # enough for one of the two that it needs
        with pytest.raises(OSError, match="Too many open files"):
            EpollPoller()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() == before
