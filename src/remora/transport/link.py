"""A connected stream socket that carries frames: it writes and reads bytes. No sessions, no meaning.

Writing never waits unless the caller asks for it: what the kernel does not take is kept in an outbox, and the poller
reports when there is room. One thread at a time reads: a thread that waits for its own reply, or the thread that the poller
woke.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from remora.clock import SYSTEM, Clock
from remora.options import FAST_PATHS
from remora.transport.spin import Spin
from remora.wire.frames import Damaged, Frame, FrameReader
from remora.wire.raw_memory import copied, lasts

# Without MSG_DONTWAIT (Windows) every read and write asks `select` first.
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)
_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_SEND_FLAGS = _DONTWAIT | _NOSIGNAL
_MAX_PARTS = 64
_PEER: int | None = getattr(socket, "SO_PEERCRED", None)
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_AT_A_TIME = 1 << 20  # bytes to write; while the kernel takes more, it does not hear what the other end has taken
# Bytes of a large message that should have come over TCP before the kernel wakes the reader. Otherwise it wakes the reader
# for each packet, which takes as long as copying the packet. 0: off.
ENOUGH = 1 << 18 if FAST_PATHS.gather and sys.platform == "linux" else 0
_TURN = 1 << 22  # bytes to read before others have a turn
BLOCK_LIMIT = 1.0  # a thread that waits for bytes returns after this many seconds, to look at the clock

Part = bytes | bytearray | memoryview


class LinkClosed(OSError):
    """The other end closed the connection."""


def is_of_socket(error: BaseException) -> bool:
    """Return True if an error comes from a connection. An OSError that a signal handler raises, like TimeoutError, has no
    number."""
    return isinstance(error, LinkClosed) or (isinstance(error, OSError) and error.errno is not None)


class StreamLink:
    """One connection. Its two halves are guarded by their users: one writer at a time, one reader at a time."""

    __slots__ = (
        "_await_bytes", "_fd", "_gathering", "_gathers", "_outbox", "_reader", "_receive", "_spin", "bytes_read", "clock",
        "failed", "last_heard", "now", "outbox_bytes", "sock", "unread", "where",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, where: str, unreachable_after: float = 4.0, clock: Clock = SYSTEM
    ) -> None:
        sock.settimeout(None)
        tune(sock, unreachable_after)
        self.sock = sock
        self.where = where
        self.clock = clock
        self.now = clock.now
        self._fd = sock.fileno()
        self._reader = FrameReader()
        self._spin = Spin(self._fd)
        self._await_bytes = waiter(self._fd, False)  # for the reader
        self._receive = sock.recv_into if _DONTWAIT else partial(_receive_if_ready, sock)  # … and never waits
        # Written by the reader: `_gathering`, `unread`, `last_heard`, `bytes_read`. Written by the writer: `_outbox`,
        # `outbox_bytes`, `failed`. Any thread may look at one of them at a time.
        self._gathers = ENOUGH > 0 and sock.family in (socket.AF_INET, socket.AF_INET6)
        self._gathering = False  # the kernel wakes the reader when enough has come
        self.unread = False  # there may be more to read than was read
        self._outbox: deque[memoryview] = deque()
        self.outbox_bytes = 0
        self.failed = False  # writing failed: nothing more is written to it
        self.last_heard = self.now()
        self.bytes_read = 0

    def fileno(self) -> int:
        return self._fd

    # Reading.

    @property
    def midway(self) -> bool:
        """True if a part of a large message has come, and the rest has not. For any thread."""
        return self._reader.missing > 0

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes that were read before the link was made (behind the handshake), and return their frames."""
        frames: list[Frame] = []
        while data:
            room = self._reader.room
            n = min(len(room), len(data))
            room[:n] = data[:n]
            frames += self._reader.received(n)
            data = data[n:]
        return frames

    def read(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting. Raises OSError when the connection is gone."""
        reader, receive, clock = self._reader, self._receive, self.now
        frames: list[Frame] = []
        n = 0
        budget = _TURN
        self.unread = True
        while budget > 0:
            room = reader.room
            try:
                n = receive(room, 0, _DONTWAIT)
            except BlockingIOError:
                self.unread = False
                break
            except InterruptedError:
                break
            except OSError:
                if frames:
                    break  # what came before the end counts; the end is seen the next time
                raise
            if n == 0:
                if frames:
                    break
                raise LinkClosed(f"connection to {self.where} was closed by the other end")
            try:
                frames += reader.received(n)
            except Damaged as damage:
                damage.frames[:0] = frames
                raise
            budget -= n
            self.bytes_read += n
            if n < len(room):
                self.unread = False
                break
        self.last_heard = clock()
        if self._gathering or (self._gathers and reader.missing):
            self._gather(n)
        return frames

    def await_bytes(self, seconds: float, again: bool = False) -> bool:
        """Wait for bytes, for `seconds` or about a second, whichever is shorter. Return False if none came. `again`: a frame
        below of this thread does so, too."""
        if self.clock is not SYSTEM:
            return self.clock.block(self._await_for_a_while, self.now() + seconds)
        if again:
            return waiter(self._fd, False)(min(max(seconds, 0.0), BLOCK_LIMIT))
        # Not a blocking `recv`: that is woken, too, when the peer has taken what was sent to it (Unix sockets).
        if seconds < BLOCK_LIMIT:
            return self._await_bytes(max(seconds, 0.0))
        return self._spin.watch() or self._await_bytes(BLOCK_LIMIT)

    def read_some(self) -> list[Frame]:
        """Read once, without waiting; return the frames that are complete now. For a thread that waits for little."""
        reader, receive, clock = self._reader, self._receive, self.now
        try:
            n = receive(reader.room, 0, _DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return []
        if n == 0:
            raise LinkClosed(f"connection to {self.where} was closed by the other end")
        self.last_heard = clock()
        self.bytes_read += n
        frames = reader.received(n)
        if self._gathering or (self._gathers and reader.missing):
            self._gather(n)
        return frames

    def _gather(self, n: int) -> None:
        """Decide if the kernel wakes the reader for every packet: n bytes were there the last time. (It does as long as
        little comes at a time.)"""
        wanted = self._reader.missing >= 2 * ENOUGH and (self._gathering or n >= ENOUGH // 8)
        if wanted is not self._gathering:
            self._gathering = wanted
            self._wake_for(ENOUGH if wanted else 1)

    def notify(self) -> None:
        """Make the kernel wake the reader for the little that has come: the sender may have become slow. Any thread calls
        this now and then."""
        if self._gathering:
            self._wake_for(1)  # (`_gathering` is the reader's)

    def _wake_for(self, nbytes: int) -> None:
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        except OSError:  # closed
            pass

    def _await_for_a_while(self, seconds: float | None) -> bool:
        # (A method: the clock of a test knows a wait again by its object.)
        return self._await_bytes(BLOCK_LIMIT if seconds is None else seconds)

    # Writing.

    def write(self, parts: Sequence[Part], stall_limit: float = 0.0, until: float = 0.0) -> bool:
        """Write all parts, or put what the kernel does not take into the outbox, copied if it can change. Return True if the
        kernel took all.

        With `stall_limit`, wait up to that long *without progress*, and no longer than `until`, before copying: large
        tensors then leave from their own memory even if the peer is a little slower than we are. """
        if self._outbox:
            return self._store(_views(parts))
        if len(parts) == 1:
            data = parts[0]
            try:
                n = self.sock.send(data, _SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                n = 0
            if n == len(data):
                return True
            rest = [memoryview(data)[n:]]
        else:
            rest = _views(parts)
        return self._push(rest, stall_limit, until)

    def _push(self, rest: list[memoryview], stall_limit: float, until: float) -> bool:
        while rest:
            try:
                n = self._send_some(rest)
            except (BlockingIOError, InterruptedError):
                seconds = min(stall_limit, until - self.now())
                if seconds <= 0 or not waiter(self._fd, True)(seconds):
                    return self._store(rest)
                continue
            rest = _without(rest, n)
            self.last_heard = self.now()  # room in the kernel is a sign of life: the peer reads
        return True

    def _send_some(self, parts: list[memoryview]) -> int:
        if not _DONTWAIT:
            if not select.select([], [self._fd], [], 0)[1]:
                raise BlockingIOError
            return self.sock.send(parts[0][: 1 << 16])
        if len(parts[0]) > _AT_A_TIME:
            return self.sock.send(parts[0][:_AT_A_TIME], _SEND_FLAGS)
        return self.sock.sendmsg(parts[:_MAX_PARTS], (), _SEND_FLAGS)

    def _store(self, rest: list[memoryview]) -> bool:
        for part in rest:
            if len(part):
                self._outbox.append(part if lasts(part) else copied(part))
                self.outbox_bytes += len(part)
        return False

    def flush(self) -> bool:
        """Write from the outbox what the kernel takes now. Return True if it is empty."""
        while self._outbox:
            batch = [self._outbox[i] for i in range(min(len(self._outbox), _MAX_PARTS))]
            try:
                n = self._send_some(batch)
            except (BlockingIOError, InterruptedError):
                return False
            self.outbox_bytes -= n
            self.last_heard = self.now()
            while n:
                head = self._outbox[0]
                if n < len(head):
                    self._outbox[0] = head[n:]
                    break
                n -= len(head)
                self._outbox.popleft()
        return True

    # The end.

    def sever(self) -> None:
        """Make both ends notice that the connection is over. Safe from any thread; the descriptor stays valid."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the descriptor, and free the memory of incomplete messages. Only when no thread uses the link any more.

        (The poller's entry for a link and the error that ended it are reference cycles: the memory should not wait for
        the collector.)"""
        self.sock.close()
        self._reader.drop()
        self._outbox.clear()
        self.outbox_bytes = 0


def _keep_alive(unreachable_after: float) -> tuple[int, int]:
    """Return the idle seconds before the kernel probes a host, and the number of probes a second apart that may remain
    unanswered: three quarters of `unreachable_after`. The last quarter is for a new connection."""
    return max(round(unreachable_after / 4), 1), max(round(unreachable_after / 2), 1)


def keep_alive_limit(unreachable_after: float) -> float:
    """Return the seconds of silence after which keep-alive ends a link."""
    return float(sum(_keep_alive(unreachable_after)))


def tune(sock: socket.socket, unreachable_after: float) -> None:
    """Set the options of every link: no delay, keep-alive, bounded blocking, room for a burst."""
    option = sock.setsockopt
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # For an idle link. `remora.agent.peers.failure_detector` watches a link that waits for acknowledgements
        # (no TCP_USER_TIMEOUT: `remora.transport.tcp_info` says why).
        idle, probes = _keep_alive(unreachable_after)
        for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", probes)):
            if hasattr(socket, name):
                option(socket.IPPROTO_TCP, getattr(socket, name), value)
    else:
        option(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)


def process_at(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket, as the kernel tells it: the process that connected, or listened.
    0 if the kernel does not tell, as with TCP; -1 if the process is in a namespace that cannot be seen from here."""
    if _PEER is None or sock.family != getattr(socket, "AF_UNIX", None):
        return 0
    try:
        return _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, _PEER, _CREDENTIALS.size))[0] or -1
    except OSError:  # closed
        return 0


def waiter(fd: int, writable: bool) -> Callable[[float], bool]:
    """Return a function that waits for so many seconds until a descriptor is ready, and returns False if it is not. Not for
    two threads at the same time."""
    if not hasattr(select, "poll"):
        return lambda seconds: any(select.select([] if writable else [fd], [fd] if writable else [], [], seconds))
    poll = select.poll()
    poll.register(fd, select.POLLOUT if writable else select.POLLIN)
    wait = poll.poll
    return lambda seconds: bool(wait(seconds * 1000 + 0.999))  # whole milliseconds: round up, never return early


def _receive_if_ready(sock: socket.socket, room: memoryview, nbytes: int, flags: int) -> int:
    if not select.select([sock], [], [], 0)[0]:
        raise BlockingIOError
    return sock.recv_into(room, nbytes, flags)


def _views(parts: Sequence[Part]) -> list[memoryview]:
    return [memoryview(part) for part in parts if len(part)]


def _without(parts: list[memoryview], n: int) -> list[memoryview]:
    """Return what remains of `parts` behind the first n bytes."""
    for i, part in enumerate(parts):
        if n < len(part):
            return [part[n:], *parts[i + 1 :]]
        n -= len(part)
    return []
