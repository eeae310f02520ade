"""The thread behind links that inject faults: it moves the bytes of many pipes and runs commands at given times.

The thread starts with the first pipe or command and ends when none is left. It knows neither frames nor faults.
"""

from __future__ import annotations

import heapq
import logging
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count

from remora.clock import NEVER, SYSTEM, Clock
from remora.transport.clock_selector import ClockedSelector
from remora.transport.fault_link import CHUNK, Judge, Pipe

log = logging.getLogger("remora")


class Pump:
    """Owns the thread, its pipes and its commands."""

    def __init__(self, name: str, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._name = name
        self._lock = threading.RLock()  # guards: _commands, _thread and _wake
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._selector: ClockedSelector | None = None
        self.pipes: list[Pipe] = []  # of the pump's thread
        _pumps.add(self)

    def insert(self, wire: socket.socket, judge: Judge, leftover: bytes, use: Callable[[Pipe], None]) -> socket.socket:
        """Put a pipe before a connected socket, and return the socket to use in its place. The pump's thread then calls
        `use` with the pipe."""
        outer, inner = socket.socketpair()
        for sock in (inner, wire):
            sock.setblocking(False)

        def add() -> None:
            pipe = Pipe(inner, wire, judge, leftover, self.clock, self.at, self.remove)
            self.pipes.append(pipe)
            use(pipe)

        self.do(add)
        return outer

    def do(self, command: Callable[[], None]) -> None:
        """Have the pump's thread run `command` soon. Starts the thread if there is none."""
        with self._lock:
            self._commands.append(command)
            if self._thread is None:
                self._wake = socket.socketpair()
                for end in self._wake:
                    end.setblocking(False)
                self._thread = threading.Thread(target=self._run, name=f"remora-faults-{self._name}", daemon=True)
                self._thread.start()
            elif threading.current_thread() is not self._thread:
                self._rouse()

    def run(self, command: Callable[[], None]) -> None:
        """Have the pump's thread run `command`, and return when it has. On that thread itself, run it at once."""
        if threading.current_thread() is self._thread:
            command()
            return
        done = threading.Event()

        def run() -> None:
            try:
                command()
            finally:
                done.set()

        self.do(run)
        done.wait()

    def at(self, when: float, command: Callable[[], None]) -> None:
        """Run `command` at a time. Called on the pump's thread."""
        heapq.heappush(self._timed, (when, next(self._order), command))

    def cancel_all(self) -> None:
        """Cancel all commands that were given to `at`. Called on the pump's thread."""
        self._timed.clear()

    def remove(self, pipe: Pipe) -> None:
        """Remove a pipe that closes. Called on the pump's thread."""
        if pipe in self.pipes:
            self.pipes.remove(pipe)
            if self._selector is not None:
                for sock in pipe.events:
                    self._selector.unregister(sock)
            pipe.events = {}

    def _run(self) -> None:
        assert self._wake is not None
        with ClockedSelector(self.clock, self._rouse) as selector:
            self._selector = selector
            selector.register(self._wake[0], selectors.EVENT_READ)
            while True:
                self._do_commands()
                now = self.clock.now()
                for pipe in list(self.pipes):
                    if not pipe.move(now):
                        pipe.close()
                if self._finished():
                    return
                self._watch(selector, now)
                for key, events in selector.select(self._pause(now)):
                    self._handle(key, events)

    def _pause(self, now: float) -> float | None:
        """Seconds until something is due, None for never. Bytes that are due already wait for room, not for time."""
        times = [due for pipe in self.pipes if (due := pipe.due()) > now]
        due = min(times + [when for when, _, _ in self._timed[:1]], default=NEVER)
        return None if due == NEVER else max(due - self.clock.now(), 0.0)

    @property
    def idle(self) -> bool:
        """True if the thread only waits for time to pass, or for ever. Tests ask from another thread."""
        selector = self._selector
        with self._lock:
            return not self._commands and (self._thread is None or (selector is not None and selector.idle))

    def _rouse(self) -> None:
        with self._lock:
            if self._wake is not None:
                try:
                    self._wake[1].send(b"!")
                except BlockingIOError:
                    pass  # it will wake up anyway

    def _finished(self) -> bool:
        """End the thread if it has nothing left to do; the next command starts another one."""
        with self._lock:
            if self.pipes or self._timed or self._commands:
                return False
            assert self._wake is not None
            self._selector = None
            for end in self._wake:
                end.close()
            self._wake = self._thread = None
            return True

    def _do_commands(self) -> None:
        while self._commands or (self._timed and self._timed[0][0] <= self.clock.now()):
            command = self._commands.popleft() if self._commands else heapq.heappop(self._timed)[2]
            try:
                command()
            except Exception:
                log.exception("a fault could not be brought about")

    def _watch(self, selector: selectors.BaseSelector, now: float) -> None:
        for pipe in self.pipes:
            wanted = pipe.wanted(now)
            for sock in pipe.events.keys() - wanted.keys():
                selector.unregister(sock)
            for sock, events in wanted.items():
                if sock not in pipe.events:
                    selector.register(sock, events, pipe)
                elif pipe.events[sock] != events:
                    selector.modify(sock, events, pipe)
            pipe.events = wanted

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        pipe: Pipe | None = key.data
        if pipe is None:
            assert self._wake is not None
            self._wake[0].recv(CHUNK)
        elif events & selectors.EVENT_READ and pipe in self.pipes:
            try:
                pipe.read(leaving=key.fileobj is pipe.flows[0].source)
            except Exception:  # the other links must not suffer from it
                log.exception("a link under a fault plan failed")
                pipe.close()


_pumps: weakref.WeakSet[Pump] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child: the parent's connections are not ours. Close our copies, so that peers notice its end."""
    for pump in list(_pumps):
        for pipe in pump.pipes:
            for flow in pipe.flows:
                flow.source.close()
        for end in pump._wake or ():
            end.close()
        pump.pipes, pump._wake, pump._thread = [], None, None
        pump._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
