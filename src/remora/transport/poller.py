"""Tells threads which sources are readable or writable; each event goes to one thread only.

Any number of threads may be in `wait` at once. An armed source fires once, and the thread that handled the event arms it
again, unless it was armed to last. On Linux the kernel wakes the thread that came last, whose caches are warm, and threads
can be kept from the poller until they are needed (`gate`). Elsewhere one thread at a time waits in `select`.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from remora.options import FAST_PATHS
from remora.transport.gate import Gate, make_gate


class Source(Protocol):
    """An object that can be watched. `ready` runs on the thread that got the event and must not block."""

    def fileno(self) -> int:
        """Return the descriptor to watch."""

    def ready(self, events: int) -> None:
        """Handle an event: something came in (READ), there is room to write (WRITE), or the other end is gone (END)."""


Event = tuple[Source, int]  # the source, and its events
Seen = list[tuple[int, int]]  # descriptors, and their events

READ = 1
WRITE = 2
END = 4


class _Wake:
    """A descriptor that becomes readable on request."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if hasattr(os, "eventfd"):
            self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self._descriptor = self._pair[0].fileno()

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        try:
            if self._pair is None:
                os.eventfd_write(self._descriptor, 1)
            else:
                self._pair[1].send(b"!")
        except OSError:
            pass  # full: it is readable already

    def clear(self) -> None:
        try:
            if self._pair is None:
                os.eventfd_read(self._descriptor)
            else:
                self._pair[0].recv(4096)
        except OSError:
            pass

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1  # its number may soon be that of a stranger's file
        if self._pair is None:
            os.close(descriptor)
        else:
            for end in self._pair:
                end.close()


class Poller(ABC):
    """The contract of both pollers, and their common parts."""

    lasts = False  # True if `arm_to_last` works here
    gate: Gate | None = None  # holds threads back from the poller, where the system has one
    # Return what fired, without waiting; then `fired` must be called with it. For pollers with a gate.
    glance: Callable[[], Seen]

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._wake = _Wake()

    @abstractmethod
    def add(self, source: Source) -> None:
        """Add a source, not armed yet."""

    @abstractmethod
    def arm(self, source: Source, events: int = READ) -> None:
        """Fire once when `source` is ready for any of `events`. Replaces what was armed before; 0 disarms."""

    def arm_to_last(self, source: Source) -> None:
        """Fire when there is something to read, and again whenever more has come, but not for END. Bytes that were there
        before and have not been read do not fire again. Two threads may get events of one source at the same time."""
        raise NotImplementedError

    @abstractmethod
    def remove(self, source: Source, descriptor: int) -> None:
        """Remove a source. Called before its descriptor is closed."""

    @abstractmethod
    def wait(self) -> list[Event]:
        """Block until something fires or a thread calls `wake`; return the sources and their events."""

    @abstractmethod
    def fired(self, seen: Seen) -> list[Event]:
        """Return what `wait` would have returned."""

    def wake(self) -> None:
        """Let one thread return from `wait`, now or when it next comes."""
        self._wake.set()

    def close(self) -> None:
        """Release everything, or this process's copy of it after a fork. No thread may be in `wait`."""
        self._sources.clear()
        self._wake.close()


def make_poller() -> Poller:
    """The best poller of this platform (`REMORA_POLLER=select` asks for the portable one)."""
    return EpollPoller() if hasattr(select, "epoll") and FAST_PATHS.epoll else SelectPoller()


if hasattr(select, "epoll"):
    _ONESHOT_READ = select.EPOLLIN | select.EPOLLONESHOT
    _EVENTS = {
        0: select.EPOLLONESHOT,
        READ: _ONESHOT_READ,
        WRITE: select.EPOLLOUT | select.EPOLLONESHOT,
        READ | WRITE: select.EPOLLIN | select.EPOLLOUT | select.EPOLLONESHOT,
    }
    _LASTING = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
    _IN = int(select.EPOLLIN)


def _meaning(mask: int) -> int:
    events = WRITE if mask & select.EPOLLOUT else 0
    if mask & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
        events |= READ  # which tells what happened, if it did
    return events if mask & ~(select.EPOLLIN | select.EPOLLOUT) == 0 else events | END


class EpollPoller(Poller):
    """The poller of Linux: many threads wait on one epoll descriptor."""

    lasts = FAST_PATHS.lasting_arm

    def __init__(self) -> None:
        self._epoll = select.epoll()  # first: it closes itself if there is no descriptor left for the rest
        super().__init__()
        self._changing = threading.RLock()  # guards: what a descriptor's number means, during a change
        self._wake_fd = self._wake.fileno()
        self._epoll.register(self._wake_fd, _ONESHOT_READ)
        self.gate = make_gate(self._epoll)
        self.glance = partial(self._epoll.poll, 0, 64)

    def add(self, source: Source) -> None:
        descriptor = source.fileno()
        with self._changing:
            self._sources[descriptor] = source
            self._epoll.register(descriptor, _EVENTS[0])

    def arm(self, source: Source, events: int = READ) -> None:
        self._modify(source, _EVENTS[events])

    def arm_to_last(self, source: Source) -> None:
        self._modify(source, _LASTING)

    def _modify(self, source: Source, mask: int) -> None:
        descriptor = source.fileno()
        with self._changing:
            if self._sources.get(descriptor) is source:  # else it was removed meanwhile
                try:
                    self._epoll.modify(descriptor, mask)
                except (OSError, ValueError):  # the poller was closed
                    pass

    def remove(self, source: Source, descriptor: int) -> None:
        with self._changing:
            if self._sources.get(descriptor) is source:
                del self._sources[descriptor]
                try:
                    self._epoll.unregister(descriptor)
                except (OSError, ValueError):
                    pass

    def wait(self) -> list[Event]:
        try:
            seen = self._epoll.poll(-1, 64)
        except ValueError:  # closed
            return []
        return self.fired(seen)

    def fired(self, seen: Seen) -> list[Event]:
        fired: list[Event] = []
        for descriptor, mask in seen:
            if descriptor == self._wake_fd:
                self._wake.clear()
                self._epoll.modify(descriptor, _ONESHOT_READ)
                continue
            source = self._sources.get(descriptor)
            if source is not None:
                fired.append((source, READ if mask == _IN else _meaning(mask)))
        return fired

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()
        self._epoll.close()
        super().close()


# Not the default selector: that has a descriptor of its own, which cannot be had when this process has too many.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


class SelectPoller(Poller):
    """The portable poller: one thread at a time waits in `selectors`, the others wait for their turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()  # guards: the wait in select; one thread at a time
        self._changes = threading.RLock()  # guards: _armed
        self._armed: dict[int, tuple[Source, int]] = {}

    def add(self, source: Source) -> None:
        self._sources[source.fileno()] = source

    def arm(self, source: Source, events: int = READ) -> None:
        descriptor = source.fileno()
        if self._sources.get(descriptor) is not source:
            return
        with self._changes:
            if events:
                self._armed[descriptor] = (source, events)
            else:
                self._armed.pop(descriptor, None)
        if events:
            self._wake.set()  # the waiting thread must look at the new set

    def remove(self, source: Source, descriptor: int) -> None:
        if self._sources.get(descriptor) is source:
            del self._sources[descriptor]
            with self._changes:
                self._armed.pop(descriptor, None)
            self._wake.set()

    def wait(self) -> list[Event]:
        with self._turn:
            with self._changes:
                armed = dict(self._armed)
            with _Selector() as selector:
                selector.register(self._wake.fileno(), selectors.EVENT_READ)
                for descriptor, (_, events) in armed.items():
                    try:
                        selector.register(descriptor, events)  # READ and WRITE have the values of selectors' events
                    except (OSError, ValueError):
                        pass  # closed meanwhile
                ready = selector.select()
            return self.fired([(key.fd, mask) for key, mask in ready])

    def fired(self, seen: Seen) -> list[Event]:
        fired: list[Event] = []
        for descriptor, mask in seen:
            if descriptor == self._wake.fileno():
                self._wake.clear()
                continue
            with self._changes:
                entry = self._armed.pop(descriptor, None)
            if entry is not None:
                fired.append((entry[0], mask))
        return fired

    def close(self) -> None:
        self._armed.clear()
        super().close()
