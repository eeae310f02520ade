"""Links that misbehave on purpose: a pipe between a link and the wire, where a judge decides the fate of each frame.

Above it nothing is changed: the link reads and writes a socket as ever, which leads to a pump in place of the peer. The
pump cuts the stream into frames (their type is in clear, so nothing is unpickled) and passes them on: at once, late,
twice, damaged, in another order, or not at all. Order is kept but where the judge wants it broken: a frame that is late
holds up those behind it, as on any stream. What arrives is passed on as it comes, and counted.

No plans and no workers here; the thread is `remora.transport.fault_pump`.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from remora.wire.frames import GUARD, HEADER, HEADER_SIZE

if TYPE_CHECKING:
    from remora.transport.fault_pump import Pump

NEVER = float("inf")
CHUNK = 1 << 16
ROOM = 1 << 22  # bytes that may wait in one direction of a pipe before no more is read
SWAP_PATIENCE = 0.02  # how long a frame waits for another one to change places with
GARBAGE = b"\xff" * HEADER_SIZE  # its length is none (`remora.wire.frames`): whoever reads it knows


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one frame: how often it arrives, how late, whole or not, before or behind the next."""

    copies: int = 1
    delay: float = 0.0
    damaged: bool = False
    swapped: bool = False


PASS = Fate()


class Judge(Protocol):
    """Decides about the frames of one pipe. Called on the pump's thread; must not block."""

    def leaving(self, kind: int, number: int) -> Fate: ...
    def left(self, kind: int, number: int) -> None: ...
    def arrived(self, kind: int, number: int) -> None: ...


def damaged(frame: bytes) -> bytes:
    """What arrives in the place of a frame that is damaged on the way."""
    return GARBAGE + frame[HEADER_SIZE:]


class Splitter:
    """Cuts a stream into frames, kept as bytes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._need = HEADER_SIZE

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Take note of bytes; (type, number, frame) of each frame that they complete."""
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
    """One direction of a pipe: what was read here and is to be written there, some of it later."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting: deque[tuple[float, memoryview]] = deque()  # (not before, bytes)
        self.size = 0
        self.ended = False  # the source has said all
        self.over = False  # and the target has heard it

    def put(self, data: bytes, due: float) -> None:
        if self.waiting:
            due = max(due, self.waiting[-1][0])  # a stream keeps its order
        self.waiting.append((due, memoryview(data)))
        self.size += len(data)

    def write(self, now: float) -> None:
        """Write what is due, as far as the kernel takes it."""
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

    def give_up(self) -> None:
        """Nobody hears it any more."""
        self.waiting.clear()
        self.size = 0
        self.ended = self.over = True


class Pipe:
    """One link under supervision. Everything here happens on the pump's thread."""

    def __init__(self, pump: Pump, inner: socket.socket, wire: socket.socket, judge: Judge, leftover: bytes) -> None:
        self.pump = pump
        self.judge = judge
        self.held = False  # nothing moves, in either direction
        self.closed = False
        self.flows = _Flow(inner, wire), _Flow(wire, inner)
        self._splitters = Splitter(), Splitter()
        self._swapped: tuple[float, bytes] | None = None  # (not before, frame): waits for the next one to go first
        self._arrived(leftover)
        self.events: dict[socket.socket, int] = {}  # what the selector watches for

    def read(self, leaving: bool) -> None:
        """Take what one side says."""
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
        due = self.pump.clock.now() + fate.delay if fate.delay else 0.0
        if fate.swapped and fate.copies and self._swapped is None:
            self._swapped = due, frame * fate.copies
            self.pump.at(self.pump.clock.now() + SWAP_PATIENCE, self._release_swapped)
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
        """Write what can be written. False when the pipe is done for."""
        for flow in () if self.held else self.flows:
            try:
                flow.write(now)
            except OSError:
                flow.give_up()
        return not all(flow.over for flow in self.flows)

    def due(self) -> float:
        """When something that waits here can go on."""
        return min((flow.waiting[0][0] for flow in self.flows if flow.waiting and not self.held), default=NEVER)

    def wanted(self, now: float) -> dict[socket.socket, int]:
        """What to watch for: room to write what is due, and something to read where there is room for it."""
        found: dict[socket.socket, int] = {}
        for flow in () if self.held else self.flows:
            if not flow.ended and flow.size < ROOM:
                found[flow.source] = found.get(flow.source, 0) | selectors.EVENT_READ
            if flow.waiting and flow.waiting[0][0] <= now:
                found[flow.target] = found.get(flow.target, 0) | selectors.EVENT_WRITE
        return found

    def sever(self) -> None:
        """Break the connection for both ends; what was due has been written, the rest is lost."""
        self.move(self.pump.clock.now())
        self.close()

    def close(self) -> None:
        self.closed = True
        self.pump.forget(self)
        for flow in self.flows:
            flow.source.close()
