"""A pipe between a link and the wire that injects faults: a judge decides the fate of each frame.

The link is unchanged: its socket leads to the pipe instead of the peer. The pipe cuts the stream into frames (their type
is in clear, so nothing is unpickled) and passes them on: at once, late, twice, damaged, in another order, or not at all.
A late frame holds up the frames behind it, as on any stream; only a swap breaks the order. Arriving bytes pass unchanged,
and the judge is told of each arriving frame.

The pipe knows no plans and no workers. The thread that runs it is in `remora.transport.fault_pump`.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from remora.clock import NEVER, Clock
from remora.wire.frames import GUARD, HEADER, HEADER_SIZE

CHUNK = 1 << 16
ROOM = 1 << 22  # bytes that may wait in one direction of a pipe before no more is read
SWAP_LIMIT = 0.02  # seconds that a frame waits for another one to change places with
GARBAGE = b"\xff" * HEADER_SIZE  # no valid length (`remora.wire.frames`): the reader notices


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of one frame: how often it arrives, how late, whole or not, before or behind the next."""

    copies: int = 1
    delay: float = 0.0
    damaged: bool = False
    swapped: bool = False


PASS = Fate()


class Judge(Protocol):
    """Decides about the frames of one pipe. The pump's thread calls it; it must not block."""

    def leaving(self, kind: int, number: int) -> Fate: ...
    def left(self, kind: int, number: int) -> None: ...
    def arrived(self, kind: int, number: int) -> None: ...


def damaged(frame: bytes) -> bytes:
    """The bytes that arrive in the place of a frame that is damaged on the way."""
    return GARBAGE + frame[HEADER_SIZE:]


class Splitter:
    """Cuts a stream into frames, kept as bytes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._need = HEADER_SIZE

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Add bytes; return (type, number, frame) of each frame that they complete."""
        self._data += data
        frames: list[tuple[int, int, bytes]] = []
        while len(self._data) >= self._need:
            _, guarded, kind, _, buffers, _, number, _, _ = HEADER.unpack_from(self._data)
            size = HEADER_SIZE + guarded // GUARD
            if buffers and len(self._data) >= size:
                size += sum(struct.unpack_from(f"<{buffers}Q", self._data, size - 8 * buffers))
            if len(self._data) < size:
                self._need = size
                break
            frames.append((kind, number, bytes(self._data[:size])))
            del self._data[:size]
            self._need = HEADER_SIZE
        return frames


class _Flow:
    """One direction of a pipe: bytes that were read at the source and wait to be written to the target."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting: deque[tuple[float, memoryview]] = deque()  # (not before, bytes)
        self.size = 0
        self.ended = False  # the source has reached its end
        self.over = False  # and the target was told of it

    def put(self, data: bytes, due: float) -> None:
        if self.waiting:
            due = max(due, self.waiting[-1][0])  # a stream keeps its order
        self.waiting.append((due, memoryview(data)))
        self.size += len(data)

    def write(self, now: float) -> None:
        """Write the bytes that are due, as far as the kernel takes them."""
        while self.waiting and self.waiting[0][0] <= now:
            due, data = self.waiting[0]
            try:
                n = self.target.send(data, getattr(socket, "MSG_NOSIGNAL", 0))
            except (BlockingIOError, InterruptedError):
                return
            self.size -= n
            if n < len(data):
                self.waiting[0] = (due, data[n:])
                return
            self.waiting.popleft()
        if self.ended and not self.waiting and not self.over:
            self.over = True
            self.target.shutdown(socket.SHUT_WR)


class Pipe:
    """One link under a fault plan. Everything here happens on the pump's thread."""

    def __init__(
        self,
        inner: socket.socket,
        wire: socket.socket,
        judge: Judge,
        leftover: bytes,
        clock: Clock,
        schedule: Callable[[float, Callable[[], None]], None],
        on_close: Callable[[Pipe], None],
    ) -> None:
        """`schedule(time, command)` runs a command on the pump's thread; `on_close` is called before the sockets close."""
        self._clock = clock
        self._schedule = schedule
        self._on_close = on_close
        self.judge = judge
        self.held = False  # nothing moves, in either direction
        self.closed = False
        self.flows = _Flow(inner, wire), _Flow(wire, inner)
        self._splitters = Splitter(), Splitter()
        self._swapped: tuple[float, bytes] | None = None  # (not before, frame): waits for the next one to go first
        self._arrived(leftover)
        self.events: dict[socket.socket, int] = {}  # as the selector has them

    def read(self, leaving: bool) -> None:
        """Read from one side."""
        flow = self.flows[0 if leaving else 1]
        try:
            data = flow.source.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            flow.ended = True
            self._release_swapped()
        elif leaving:
            for kind, number, frame in self._splitters[0].feed(data):
                if not self.closed:  # by the one before
                    self._pass_on(kind, number, frame)
        else:
            flow.put(data, 0.0)
            self._arrived(data)

    def _arrived(self, data: bytes) -> None:
        for kind, number, _ in self._splitters[1].feed(data):
            self.judge.arrived(kind, number)

    def _pass_on(self, kind: int, number: int, frame: bytes) -> None:
        fate = self.judge.leaving(kind, number)
        if fate.damaged:
            frame = damaged(frame)
        due = self._clock.now() + fate.delay if fate.delay else 0.0
        if fate.swapped and fate.copies and self._swapped is None:
            self._swapped = due, frame * fate.copies
            self._schedule(self._clock.now() + SWAP_LIMIT, self._release_swapped)
        elif fate.copies:
            self.flows[0].put(frame * fate.copies, due)
            self._release_swapped()
        self.judge.left(kind, number)

    def _release_swapped(self) -> None:
        if self._swapped is not None:
            due, frame = self._swapped
            self.flows[0].put(frame, due)
            self._swapped = None

    def move(self, now: float) -> bool:
        """Write the bytes that are due. False when both directions have ended."""
        for flow in () if self.held else self.flows:
            try:
                flow.write(now)
            except OSError:
                flow.waiting.clear()  # the target is gone
                flow.size = 0
                flow.ended = flow.over = True
        return not all(flow.over for flow in self.flows)

    def due(self) -> float:
        """The time at which the next waiting bytes may be written."""
        return min((flow.waiting[0][0] for flow in self.flows if flow.waiting and not self.held), default=NEVER)

    def wanted(self, now: float) -> dict[socket.socket, int]:
        """The events to select for: room for bytes that are due, and input where the pipe has room for it."""
        found: dict[socket.socket, int] = {}
        for flow in () if self.held else self.flows:
            if not flow.ended and flow.size < ROOM:
                found[flow.source] = found.get(flow.source, 0) | selectors.EVENT_READ
            if flow.waiting and flow.waiting[0][0] <= now:
                found[flow.target] = found.get(flow.target, 0) | selectors.EVENT_WRITE
        return found

    def sever(self) -> None:
        """Break the connection for both ends. Bytes that are due are written first; the rest is lost."""
        self.move(self._clock.now())
        self.close()

    def close(self) -> None:
        """Close both sockets."""
        self.closed = True
        self._on_close(self)
        for flow in self.flows:
            flow.source.close()
