"""A pipe passes frames on as a judge says, and everything else as if it were not there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.transport.fault_link import GARBAGE, PASS, Fate, Pipe, Splitter
from remora.transport.fault_pump import Pump
from remora.wire.frames import HEADER_SIZE, encode


def frame(number: int, body: bytes = b"", buffers: tuple[bytes, ...] = ()) -> bytes:
    sizes = b"".join(len(each).to_bytes(8, "little") for each in buffers)
    body += sizes
    return encode(0x102, 0, len(buffers), 7, number, 0, 0.0, len(body), body + b"".join(buffers))


frames = st.lists(
    st.builds(frame, st.integers(1, 99), st.binary(max_size=50), st.lists(st.binary(max_size=20), max_size=3).map(tuple)),
    max_size=5,
)


@given(frames, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_stream_is_cut_into_its_frames_however_it_comes(sent: list[bytes], pieces: list[int]) -> None:
    stream, splitter, found = b"".join(sent), Splitter(), []
    at = i = 0
    while at < len(stream):
        n = pieces[i % len(pieces)]
        found += [data for _, _, data in splitter.feed(stream[at : at + n])]
        at, i = at + n, i + 1
    assert found == sent


class Script:
    """A judge that has decided beforehand."""

    def __init__(self) -> None:
        self.fates: dict[int, Fate] = {}
        self.gone: list[int] = []
        self.came: list[int] = []

    def leaving(self, kind: int, number: int) -> Fate:
        return self.fates.get(number, PASS)

    def left(self, kind: int, number: int) -> None:
        self.gone.append(number)

    def arrived(self, kind: int, number: int) -> None:
        self.came.append(number)


class Line:
    """A link under supervision, and its peer."""

    def __init__(self, leftover: bytes = b"") -> None:
        self.judge = Script()
        self.pump = Pump("test")
        self.peer, wire = socket.socketpair()
        self.pipes: list[Pipe] = []
        there = threading.Event()

        def use(pipe: Pipe) -> None:
            self.pipes.append(pipe)
            there.set()

        self.link = self.pump.insert(wire, self.judge, leftover, use)
        assert there.wait(5)
        for sock in (self.link, self.peer):
            sock.settimeout(5)

    @property
    def pipe(self) -> Pipe:
        return self.pipes[0]

    def send(self, *frames: bytes) -> None:
        self.link.sendall(b"".join(frames))

    def receive(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self.peer.recv(n - len(data))
            assert more, f"the link ended after {len(data)} bytes"
            data += more
        return data

    def do(self, command: object) -> None:
        """Have the pump's thread do something, and wait until it has."""
        done = threading.Event()
        self.pump.do(lambda: (command(), done.set()))  # type: ignore[operator]
        assert done.wait(5)

    def close(self) -> None:
        self.link.close()
        self.peer.close()
        self.pump.do(lambda: [pipe.close() for pipe in list(self.pump.pipes)])


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


A, B, C = frame(1, b"one"), frame(2, b"two", (b"tensor",)), frame(3, b"three")


def test_what_nobody_judges_passes_both_ways(line: Line) -> None:
    line.send(A, B)
    assert line.receive(len(A + B)) == A + B
    line.peer.sendall(C)
    assert line.link.recv(1000) == C
    line.do(lambda: None)
    assert line.judge.gone == [1, 2]
    assert line.judge.came == [3]


def test_a_frame_can_be_lost_doubled_and_damaged(line: Line) -> None:
    line.judge.fates = {1: Fate(copies=0), 2: Fate(copies=2), 3: Fate(damaged=True)}
    line.send(A, B, C)
    expected = B + B + GARBAGE + C[HEADER_SIZE:]
    assert line.receive(len(expected)) == expected


def test_two_frames_change_places(line: Line) -> None:
    line.judge.fates = {1: Fate(swapped=True)}
    line.send(A, B, C)
    assert line.receive(len(A + B + C)) == B + A + C


def test_a_frame_that_finds_nobody_to_change_places_with_goes_alone(line: Line) -> None:
    line.judge.fates = {1: Fate(swapped=True)}
    line.send(A)
    assert line.receive(len(A)) == A


def test_a_late_frame_holds_up_those_behind_it(line: Line) -> None:
    line.judge.fates = {2: Fate(delay=0.1)}
    started = time.monotonic()
    line.send(A, B, C)
    assert line.receive(len(A)) == A
    assert line.receive(len(B + C)) == B + C
    assert time.monotonic() - started >= 0.1


def test_a_held_pipe_is_silent_and_loses_nothing(line: Line) -> None:
    line.do(lambda: setattr(line.pipe, "held", True))
    line.send(A)
    line.peer.sendall(B)
    line.peer.settimeout(0.05)
    with pytest.raises(TimeoutError):
        line.peer.recv(1)
    line.peer.settimeout(5)
    line.do(lambda: setattr(line.pipe, "held", False))
    assert line.receive(len(A)) == A
    assert line.link.recv(1000) == B


def test_a_severed_pipe_ends_for_both_behind_what_was_said(line: Line) -> None:
    line.send(A)
    assert line.receive(len(A)) == A
    line.do(line.pipe.sever)
    assert line.peer.recv(10) == b""
    assert line.link.recv(10) == b""


def test_the_end_of_one_side_is_the_end_of_the_other(line: Line) -> None:
    line.send(A)
    line.link.shutdown(socket.SHUT_WR)
    assert line.receive(len(A)) == A
    assert line.peer.recv(10) == b""
    line.peer.sendall(B)  # the other direction still works
    assert line.link.recv(1000) == B
    line.peer.close()
    assert line.link.recv(10) == b""


def test_what_was_read_before_is_counted_and_not_passed_on_again() -> None:
    line = Line(leftover=A + B[:10])
    try:
        line.peer.sendall(B[10:])
        assert line.link.recv(1000) == B[10:]
        line.do(lambda: None)
        assert line.judge.came == [1, 2]
    finally:
        line.close()


def test_more_than_fits_into_a_pipe_arrives_whole(line: Line) -> None:
    large = frame(1, bytes(1000), (bytes(range(256)) * 40_000,))
    sender = threading.Thread(target=line.send, args=(large, A))
    sender.start()
    assert line.receive(len(large) + len(A)) == large + A
    sender.join()


def test_the_thread_ends_with_the_last_pipe_and_comes_back() -> None:
    for _ in range(3):
        line = Line()
        thread = line.pump._thread
        assert thread is not None
        line.close()
        thread.join(5)
        assert not thread.is_alive()


def test_what_is_asked_for_at_a_time_is_done_then(line: Line) -> None:
    done: list[float] = []
    started = time.monotonic()
    line.do(lambda: line.pump.at(time.monotonic() + 0.05, lambda: done.append(time.monotonic())))
    end = time.monotonic() + 5
    while not done:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert done[0] - started >= 0.05
