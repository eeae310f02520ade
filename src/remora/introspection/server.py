"""Answers observers, on a thread of its own that no call ever uses: a worker answers though every thread of its pool, its
event loop and the program itself are stuck.

The thread takes no lock that any other thread takes, and runs nothing of the program. What an observer can cost is bounded:
how many are connected, how long one may be silent before it has proven the key or take no answer, how large a question is,
and how often strangers may come. While no observer is there, the thread sleeps.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from remora.errors import RendezvousError
from remora.introspection.visitors import NEVER, Answer, Visitor
from remora.protocol.handshake import Identity
from remora.protocol.observing import Observed
from remora.transport import addresses, sockets

log = logging.getLogger("remora")

MOST = 16  # observers that have proven the key; one more takes the place of the one that has been silent for longest
STRANGERS = 16  # connections that have not
BURST = 32  # connections that may come at once
RATE = 50.0  # … and so many a second for long
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
        self._doors: list[socket.socket] = []
        self._visitors: dict[int, Visitor] = {}  # by descriptor; only the thread changes it
        self._selector: selectors.BaseSelector | None = None
        self._bell: list[tuple[int, int]] = []  # a pipe that ends the thread; who takes it out closes its second end
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._tokens = float(BURST)  # connections that may come now
        self._counted_at = 0.0
        self._resting = False  # no token is left: the doors are not looked at

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
            self._doors.append(sock)
            found.append(str(address))
        return found

    def start(self, me: Identity) -> None:
        """Begin to answer; the worker has joined its group."""
        if not self._doors:
            return
        self._me = me
        self._selector = selectors.DefaultSelector()
        bell = os.pipe()
        self._selector.register(bell[0], selectors.EVENT_READ)
        self._look_at_doors()
        self._thread = threading.Thread(
            target=self._serve, args=(self._selector, bell[0]), name=f"remora-{self._name}-observer", daemon=True
        )
        self._bell.append(bell)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close everything. Safe to call twice, and on any thread."""
        self._stopped = True
        try:
            _, bell = self._bell.pop()  # (one operation: of several threads one gets it)
        except IndexError:
            if self._thread is None:
                self._close_doors()
            return
        with suppress(BrokenPipeError):  # the thread may have seen that it is to end
            os.write(bell, b"x")
        os.close(bell)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)

    def abandon(self) -> None:
        """In a forked child, which has none of the threads: close our copies of the parent's descriptors."""
        self._close_doors()
        for visitor in list(self._visitors.values()):
            visitor.sock.close()
        self._visitors.clear()
        if self._selector is not None:
            self._selector.close()
        for bell in self._bell:
            for end in bell:
                os.close(end)
        self._bell.clear()

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        self._doors.clear()

    # The thread.

    def _serve(self, selector: selectors.BaseSelector, bell: int) -> None:
        try:
            while not self._stopped:
                for key, _ in selector.select(self._sleep()):
                    if key.fd == bell:
                        return
                    try:
                        self._see(key)
                    except Exception:  # of one visitor: the others are to be answered
                        log.exception("%s failed to answer an observer", self._name)
                        if key.data is not None:
                            self._dismiss(key.data)
                self._see_to_time()
        except BaseException:
            log.exception("%s cannot be observed any more", self._name)
        finally:
            for visitor in list(self._visitors.values()):
                self._dismiss(visitor)
            self._close_doors()
            selector.close()
            os.close(bell)

    def _see(self, key: selectors.SelectorKey) -> None:
        visitor = key.data
        if visitor is None:
            self._let_in(key.fileobj)  # type: ignore[arg-type]  # (a door)
        elif visitor.sock.fileno() == key.fd:  # else it was closed a moment ago, to make room
            was_welcomed = visitor.welcomed
            if not visitor.ready():
                self._dismiss(visitor)
                return
            if visitor.welcomed and not was_welcomed:
                self._make_room(True, MOST)
            self._watch(visitor)

    def _let_in(self, door: socket.socket) -> None:
        try:
            sock, _ = door.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.info("%s cannot take the connection of an observer: %s", self._name, error)
            self._tokens = 0.0
            self._rest()
            return
        process = sockets.peer_process(sock)
        if self._of_this_user and process is not None and process[0] not in (os.getuid(), os.geteuid()):
            sock.close()
        else:
            sock.setblocking(False)
            visitor = Visitor(sock, Observed(self._me, self.key), self._answer)
            self._visitors[sock.fileno()] = visitor
            self._make_room(False, STRANGERS)
            self._watch(visitor)
        self._tokens -= 1
        if self._tokens < 1:
            self._rest()

    def _make_room(self, welcomed: bool, most: int) -> None:
        """Of too many of a kind, the one goes that was silent for longest."""
        alike = [each for each in self._visitors.values() if each.welcomed is welcomed]
        if len(alike) > most:
            self._dismiss(min(alike, key=lambda visitor: visitor.heard_at))

    def _watch(self, visitor: Visitor) -> None:
        """Look for what can be done next for a visitor."""
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
        if self._selector is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(visitor.sock)
        visitor.sock.close()

    # Time.

    def _sleep(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = min((min(each.deadline, each.due) for each in self._visitors.values()), default=NEVER)
        due = min(due, self._expires)
        if self._resting:
            due = min(due, self._counted_at + BURST / RATE)
        return None if due == NEVER else max(due - time.monotonic(), 0.0)

    def _see_to_time(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._counted_at) * RATE, float(BURST))
        self._counted_at = now
        if self._resting and self._tokens >= BURST / 2:
            self._look_at_doors()
        for visitor in list(self._visitors.values()):
            if now >= visitor.deadline or (now >= visitor.due and not visitor.finish()):
                self._dismiss(visitor)
            elif visitor.due == NEVER:
                self._watch(visitor)

        self._expires = self._remove_expired()

    def _look_at_doors(self) -> None:
        assert self._selector is not None
        self._resting = False
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)

    def _rest(self) -> None:
        """Strangers come too often, or this process lacks descriptors: callers wait in the kernel for a moment."""
        assert self._selector is not None
        if not self._resting:
            self._resting = True
            for door in self._doors:
                self._selector.unregister(door)
