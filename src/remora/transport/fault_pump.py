"""The thread behind links that misbehave: it moves the bytes of many pipes, and has a clock. No frames, no faults.

It starts with the first pipe and ends with the last one.
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

from remora.clock import SYSTEM, Clock
from remora.transport.clock_selector import ClockedSelector
from remora.transport.fault_link import CHUNK, NEVER, Judge, Pipe

log = logging.getLogger("remora")


class Pump:
    """The thread that moves the bytes of all pipes, and a clock for whoever needs one."""

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
        """Put a pipe before a connected socket; the socket to use in its place. `use` is given the pipe, soon."""
        outer, inner = socket.socketpair()
        for sock in (inner, wire):
            sock.setblocking(False)

        def add() -> None:
            pipe = Pipe(self, inner, wire, judge, leftover)
            self.pipes.append(pipe)
            use(pipe)

        self.do(add)
        return outer

    def do(self, command: Callable[[], None]) -> None:
        """Have the pump's thread run `command`, soon. Starts it if need be."""
        with self._lock:
            self._commands.append(command)
            if self._thread is None:
                self._wake = socket.socketpair()
                for end in self._wake:
                    end.setblocking(False)
                self._thread = threading.Thread(target=self._run, name=f"remora-faults-{self._name}", daemon=True)
                self._thread.start()
            elif self._wake is not None and threading.current_thread() is not self._thread:
                _poke(self._wake[1])

    def at(self, when: float, command: Callable[[], None]) -> None:
        """Run `command` at a time. For the pump's thread."""
        heapq.heappush(self._timed, (when, next(self._order), command))

    def forget_times(self) -> None:
        """Nothing that was asked for `at` a time is wanted any more. For the pump's thread."""
        self._timed.clear()

    def forget(self, pipe: Pipe) -> None:
        """A pipe is done for. For the pump's thread."""
        if pipe in self.pipes:
            self.pipes.remove(pipe)
            for sock in pipe.events if self._selector is not None else ():
                self._selector.unregister(sock)  # type: ignore[union-attr]
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
        """Until when there is nothing to do unless something happens. What is due now waits for room, not for time."""
        times = [due for pipe in self.pipes if (due := pipe.due()) > now]
        due = min(times + [when for when, _, _ in self._timed[:1]], default=NEVER)
        return None if due == NEVER else max(due - self.clock.now(), 0.0)

    @property
    def idle(self) -> bool:
        """Whether all that is here waits for time to pass, or for good. For tests: a look from another thread."""
        selector = self._selector
        with self._lock:
            return not self._commands and (self._thread is None or (selector is not None and selector.idle))

    def _rouse(self) -> None:
        with self._lock:
            if self._wake is not None:
                _poke(self._wake[1])

    def _finished(self) -> bool:
        """End if there is nothing left to do; whoever comes next starts another thread."""
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
            except Exception:  # the other links are not to suffer from it
                log.exception("a link under a fault plan failed")
                pipe.close()


def _poke(sock: socket.socket) -> None:
    try:
        sock.send(b"!")
    except BlockingIOError:
        pass  # it will wake up anyway


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
