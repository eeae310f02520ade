"""What the processes of a launcher print, as it is passed on: through real pipes."""

from __future__ import annotations

import fcntl
import os
import queue
import resource
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest

from remora.supervision import prefixed_output
from remora.supervision.prefixed_output import pieces, prefixed


class Reading:
    """A pipe that a thread reads by `pieces`."""

    def __init__(self) -> None:
        ours, self.theirs = os.pipe()
        self._found: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.quiet: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # the empty pieces
        self._thread = threading.Thread(target=self._read, args=(ours,))
        self._thread.start()

    def _read(self, ours: int) -> None:
        with open(ours, "rb", buffering=0) as pipe:
            for piece in pieces(pipe):
                (self._found if piece else self.quiet).put(piece)
        self._found.put(None)

    def print(self, data: bytes) -> None:
        os.write(self.theirs, data)

    def next(self) -> bytes | None:
        """None at the end."""
        return self._found.get(timeout=20.0)

    def end(self) -> list[bytes]:
        """What remains when nothing is printed any more."""
        os.close(self.theirs)
        self.theirs = -1
        return list(iter(self.next, None))

    def close(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
        self._thread.join(20.0)


@pytest.fixture
def reading() -> Iterator[Reading]:
    found = Reading()
    yield found
    found.close()


def test_lines_have_their_ends(reading: Reading) -> None:
    reading.print(b"one\ntwo\r\n\nthree")
    assert reading.end() == [b"one\n", b"two\n", b"\n", b"three\n"]


def test_a_progress_bar_is_seen_while_it_moves(reading: Reading) -> None:
    """Before, nothing of it was passed on until its line feed came: a whole epoch in one line."""
    reading.print(b"\r 10%")
    assert reading.next() == b"\r"
    reading.print(b"\r 20%")
    seen = b""
    while len(seen) < len(b" 10%\r 20%"):  # in one piece or in two: the pause may be over or not
        seen += reading.next() or b"ended"
    assert seen == b" 10%\r 20%"
    reading.print(b"\n")
    assert reading.end() == [b"\n"]


def test_a_carriage_return_at_the_end_waits_for_a_line_feed_and_not_for_long(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading.print(b"10%\r")
    assert reading.next() == b"10%\r"
    monkeypatch.setattr(prefixed_output, "PAUSE", 20.0)
    reading.print(b"done\r")
    time.sleep(0.01)  # (whether they are read together or not makes no difference)
    reading.print(b"\n")
    assert reading.next() == b"done\n"
    assert reading.end() == []


def test_a_prompt_is_passed_on_after_a_moment(reading: Reading) -> None:
    began = time.monotonic()
    reading.print(b"name? ")
    assert reading.next() == b"name? "
    assert time.monotonic() - began >= prefixed_output.PAUSE * 0.9
    reading.print(b"thanks\n")
    assert reading.next() == b"thanks\n"
    assert reading.end() == []


def test_a_last_line_without_end_is_ended_once(reading: Reading) -> None:
    """Another process prints behind it."""
    reading.print(b"a\nname? ")
    assert reading.next() == b"a\n"
    assert reading.next() == b"name? "  # after the pause
    assert reading.end() == [b"\n"]


def test_nothing_printed_is_nothing_passed_on(reading: Reading) -> None:
    assert reading.end() == []


class Target(BytesIO):
    """Remembers what was written in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.written: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write(self, data: Any) -> int:
        self.written.put(bytes(data))
        return super().write(data)


def test_the_name_stands_at_the_start_of_each_line_and_of_each_turn_of_a_bar() -> None:
    out, err = Target(), Target()
    with prefixed("[0] ", out, err) as streams:
        os.write(streams[0], b"1%\r2%\r\nname? ")
        while not out.getvalue().endswith(b"? "):
            out.written.get(timeout=20.0)
        os.write(streams[0], b"x\n")
        os.write(streams[1], b"error")
    assert out.getvalue() == b"[0] 1%\r[0] 2%\n[0] name? x\n"
    assert err.getvalue() == b"[0] error\n"


def test_a_launcher_of_hundreds_has_descriptors_above_1024() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= 1100:
        pytest.skip("so many descriptors are not allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    try:
        ours, theirs = os.pipe()
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1100)
        os.close(ours)
        os.write(theirs, b"no end")
        os.close(theirs)
        with open(high, "rb", buffering=0) as pipe:
            assert list(pieces(pipe)) == [b"no end\n"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_is_quiet_for_some_time_is_noticed(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixed_output, "QUIET", 0.01)
    reading.print(b"ValueError: x\n")
    assert reading.next() == b"ValueError: x\n"
    assert reading.quiet.get(timeout=20.0) == b""
    assert reading.end() == []
