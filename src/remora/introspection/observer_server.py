"""Answers observers, on a thread of its own that no call ever uses: a worker answers though every thread of its pool, its
event loop and the program itself are stuck.

The thread takes no lock that any other thread takes, and runs nothing of the program. What an observer can cost is bounded:
how many are connected, how long one may be silent before it has proven the key or take no answer, and how large a question
is. Strangers have a bounded table, which is fair to slow ones and to other sources (`pending_connections`), and a tenth of a
processor: when they have had that for a moment, they wait in the kernel. While no observer is there, the thread sleeps.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from remora.agent.peers.pending_connections import BEGUN, GREETED, SILENT, PendingTable
from remora.errors import RendezvousError
from remora.introspection.visitors import NEVER, Answer, Visitor
from remora.protocol.handshake import Identity
from remora.protocol.observing import Observed
from remora.transport import addresses, sockets

log = logging.getLogger("remora")

MOST = 16  # observers that have proven the key; one more takes the place of the one that has been silent for longest
STRANGERS = 256  # connections that have not
ACCEPTS = 16  # connections at each look at a socket
WINDOW, SHARE = 0.1, 0.1  # of each so many seconds, strangers get this part of a processor
MOST_FAILURES = 3  # that are logged: an observer may provoke the same one again and again
PATIENCE = 2.0  # seconds that `stop` waits for the thread


class ObserverServer:
    """The sockets at which observers come in, and the thread that serves them."""

    def __init__(
        self,
        name: str,
        key: bytes,
        answer: Answer,
        *,
        of_this_user: bool,
        remove_expired: Callable[[], float] = lambda: NEVER,
    ) -> None:
        self._name = name
        self.key = key
        self._answer = answer
        self._remove_expired = remove_expired  # what answers left behind; it says when something is due
        self._expires = NEVER
        self._of_this_user = of_this_user  # the secret is this user's: other users are not let in
        self._me = Identity(name, 0, "", "")  # known when the worker has joined
        self._listening: list[socket.socket] = []
        self._visitors: dict[int, Visitor] = {}  # by descriptor; only the thread changes it
        self._selector: selectors.BaseSelector | None = None
        self._end_pipes: list[tuple[int, int]] = []  # a pipe that ends the thread; who takes it out closes its second end
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._strangers: PendingTable[Visitor] = PendingTable(STRANGERS)  # visitors that have not proven the key
        self._window = 0.0  # when it began,
        self._spent = 0.0  # … and how much of the processor strangers have had in it
        self._look_at = NEVER  # when the first visitor has to be seen to though nothing comes; or sooner
        self._failures = 0
        self._resting = False  # they have had enough: the listening sockets are not watched
        self._lacks = False  # this process has no descriptors, or memory, for a connection; the log says so

    # Life.

    def listen(self, transports: Iterable[str], bind_host: str, port: int | str | None, token: str) -> list[str]:
        """Open the sockets, and return their addresses, best first. What cannot be opened is left out."""
        found: list[str] = []
        for kind in transports:
            try:
                if kind == "unix":
                    sock, address = sockets.listen_unix(f"observer-{token}")
                elif kind == "tcp":
                    sock, bound = sockets.listen_tcp(bind_host, addresses.parse_ports(port))
                    address = replace(bound, host=addresses.advertised_host(bind_host))
                else:
                    continue  # a process looks at itself without a socket
            except (OSError, AttributeError, RendezvousError) as error:
                log.info("%s cannot be observed by %s: %s", self._name, kind, error)
                continue
            sock.setblocking(False)
            self._listening.append(sock)
            found.append(str(address))
        return found

    def start(self, me: Identity) -> None:
        """Begin to answer; the worker has joined its group."""
        if not self._listening:
            return
        self._me = me
        self._selector = selectors.DefaultSelector()
        end_pipe = os.pipe()
        self._selector.register(end_pipe[0], selectors.EVENT_READ)
        self._watch_listening()
        self._thread = threading.Thread(
            target=self._serve, args=(self._selector, end_pipe[0]), name=f"remora-{self._name}-observer", daemon=True
        )
        self._end_pipes.append(end_pipe)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close everything. Safe to call twice, and on any thread."""
        self._stopped = True
        try:
            _, end_pipe = self._end_pipes.pop()  # (one operation: of several threads one gets it)
        except IndexError:
            if self._thread is None:
                self._close_listening()
            return
        with suppress(BrokenPipeError):  # the thread may have seen that it is to end
            os.write(end_pipe, b"x")
        os.close(end_pipe)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)

    def abandon(self) -> None:
        """In a forked child, which has none of the threads: close our copies of the parent's descriptors."""
        self._close_listening()
        for visitor in list(self._visitors.values()):
            visitor.sock.close()
        self._visitors.clear()
        if self._selector is not None:
            self._selector.close()
        for end_pipe in self._end_pipes:
            for end in end_pipe:
                os.close(end)
        self._end_pipes.clear()

    def _close_listening(self) -> None:
        for listening in self._listening:
            listening.close()
        self._listening.clear()

    # The thread.

    def _serve(self, selector: selectors.BaseSelector, end_pipe: int) -> None:
        try:
            while not self._stopped:
                for key, _ in selector.select(self._sleep()):
                    if key.fd == end_pipe:
                        return
                    with self._at_the_cost_of(key.data):
                        self._see(key)
                self._see_to_time()
        except BaseException:
            log.exception("%s cannot be observed any more", self._name)
        finally:
            for visitor in list(self._visitors.values()):
                self._dismiss(visitor)
            self._close_listening()
            selector.close()
            os.close(end_pipe)

    @contextmanager
    def _at_the_cost_of(self, visitor: Visitor | None) -> Iterator[None]:
        """An error inside costs one visitor its connection: the others are to be answered."""
        try:
            yield
        except Exception:
            self._failures += 1
            if self._failures <= MOST_FAILURES:
                log.exception("%s failed to answer an observer", self._name)
            if visitor is not None:
                self._dismiss(visitor)

    def _see(self, key: selectors.SelectorKey) -> None:
        visitor, started = key.data, time.thread_time()
        if visitor is None:
            self._let_in(key.fileobj)  # type: ignore[arg-type]  # (a listening socket)
        elif visitor.sock.fileno() == key.fd:  # else it was closed a moment ago, to make room
            was_welcomed = visitor.welcomed
            if not visitor.ready():
                self._dismiss(visitor)
            else:
                if not was_welcomed:
                    self._advance(visitor)
                self._watch(visitor)
            if was_welcomed:
                return
        self._spent += time.thread_time() - started

    def _let_in(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):  # not all that are there: others have something to say as well
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._lacks:
                    log.info("%s cannot take connections of observers for now (they wait): %s", self._name, error)
                self._lacks = True
                self._rest()
                return
            self._lacks = False
            self._take_in(sock, address[0] if isinstance(address, tuple) else "")

    def _take_in(self, sock: socket.socket, host: str) -> None:
        process = sockets.peer_process(sock)
        if self._of_this_user and process is not None and process[0] not in (os.getuid(), os.geteuid()):
            sock.close()
            return
        sock.setblocking(False)
        visitor = Visitor(sock, host if process is None else process, Observed(self._me, self.key), self._answer)
        self._visitors[sock.fileno()] = visitor
        self._make_room(self._strangers.add(visitor))
        self._watch(visitor)

    def _advance(self, visitor: Visitor) -> None:
        """A stranger has said something."""
        if visitor.welcomed:
            self._strangers.remove(visitor)
            welcomed = [each for each in self._visitors.values() if each.welcomed]
            if len(welcomed) > MOST:
                self._dismiss(min(welcomed, key=lambda each: each.heard_at))
        elif visitor.greeting and visitor.stage != GREETED:
            is_new = self._strangers.is_new(visitor.greeting)  # one that came before may be a replay, and proves nothing
            self._make_room(self._strangers.advance(visitor, GREETED if is_new else BEGUN))
        elif visitor.stage == SILENT:
            self._make_room(self._strangers.advance(visitor, BEGUN))

    def _make_room(self, visitor: Visitor | None) -> None:
        if visitor is not None:
            self._dismiss(visitor)

    def _watch(self, visitor: Visitor) -> None:
        """Look for what can be done next for a visitor, and when."""
        self._look_at = min(self._look_at, visitor.deadline, visitor.due)
        selector = self._selector
        assert selector is not None
        events = 0 if visitor.waits else selectors.EVENT_WRITE if visitor.writes else selectors.EVENT_READ
        known = selector.get_map().get(visitor.sock.fileno())
        if known is not None and not events:
            selector.unregister(visitor.sock)
        elif known is None and events:
            selector.register(visitor.sock, events, visitor)
        elif known is not None and known.events != events:
            selector.modify(visitor.sock, events, visitor)

    def _dismiss(self, visitor: Visitor) -> None:
        if self._visitors.pop(visitor.sock.fileno(), None) is None:
            return
        self._strangers.remove(visitor)
        if self._selector is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(visitor.sock)
        visitor.sock.close()

    # Time.

    def _sleep(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = min(self._look_at, self._expires)
        if self._resting:
            due = min(due, self._window + WINDOW)
        return None if due == NEVER else max(due - time.monotonic(), 0.0)

    def _see_to_time(self) -> None:
        now = time.monotonic()
        if now - self._window >= WINDOW:
            self._window, self._spent = now, 0.0
            if self._resting:
                self._watch_listening()
        elif self._spent > SHARE * WINDOW:
            self._rest()
        self._expires = self._remove_expired()
        if now < self._look_at:
            return
        self._look_at = NEVER
        for visitor in list(self._visitors.values()):
            with self._at_the_cost_of(visitor):
                if now >= visitor.deadline or (now >= visitor.due and not visitor.finish()):
                    self._dismiss(visitor)
                else:
                    self._watch(visitor)

    def _watch_listening(self) -> None:
        assert self._selector is not None
        self._resting = False
        for listening in self._listening:
            self._selector.register(listening, selectors.EVENT_READ)

    def _rest(self) -> None:
        """Strangers have had enough of the processor, or this process lacks descriptors: callers wait in the kernel for a
        moment."""
        assert self._selector is not None
        if not self._resting:
            self._resting, self._window = True, time.monotonic()
            for listening in self._listening:
                self._selector.unregister(listening)
