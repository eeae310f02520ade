"""One connection of an observer to this worker: it proves the key, and then asks one question after the other.

Bytes only: `remora.introspection.observer_server` says when it may read or write, and for how long. Nothing it sends is
unpickled, and it has no more than one question and one answer here at a time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from remora.agent.peers.pending_connections import SILENT
from remora.errors import AuthenticationError, ProtocolError
from remora.protocol.observing import MAX_QUESTION, Observed, Reader, frame

CHUNK = 1 << 14
PROOF_TIME = 5.0  # seconds in which a stranger has to prove the key
TAKE_TIME = 10.0  # seconds in which an observer has to take its answer
NEVER = float("inf")


class Later(NamedTuple):
    """An answer that takes time: after so many seconds, `then` makes it. The observer's thread serves others meanwhile."""

    seconds: float
    then: Callable[[], Any]


Answer = Callable[[str, dict[str, Any]], Any]  # what to say to a question with these arguments; a `Later` perhaps


class Visitor:
    """One connection."""

    def __init__(self, sock: socket.socket, source: Hashable, machine: Observed, answer: Answer) -> None:
        self.sock = sock
        self.source = source  # an address, or a process of this host
        self.stage = SILENT  # the table of strangers alone changes it
        self.deadline = time.monotonic() + PROOF_TIME  # by when it has to do what is expected of it
        self.heard_at = time.monotonic()
        self.later: Later | None = None  # what it waits for, and
        self.due = NEVER  # … when that is made
        self._machine = machine
        self._answer = answer
        self._reader = Reader(MAX_QUESTION)
        self._question: tuple[Any] | None = None  # what it asked and was not answered yet
        self._unsent = memoryview(b"")
        self._gone = False  # it is to be closed when what was said to it is sent

    @property
    def greeting(self) -> bytes:
        """The seal of its greeting, once that was proven; it may be one that was heard and is said again."""
        return self._machine.greeting

    @property
    def welcomed(self) -> bool:
        """True if it has proven the key."""
        return self._machine.welcomed

    @property
    def writes(self) -> bool:
        """True if it has something to take, or its next question is here already; nothing is read from it meanwhile."""
        return len(self._unsent) > 0 or self._question is not None

    @property
    def waits(self) -> bool:
        """True if its answer is being made; nothing is read from it meanwhile."""
        return self.later is not None

    def ready(self) -> bool:
        """Read, write or answer one question. Return False if the connection is to be closed."""
        return self._lives_through(self._take_turn)

    def finish(self) -> bool:
        """A question that took time is to be answered now. Return False if the connection is to be closed."""
        later, self.later, self.due = self.later, None, NEVER
        return later is None or self._lives_through(lambda: self._try(later.then))

    def _lives_through(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except (BlockingIOError, InterruptedError):
            return True
        except (OSError, ProtocolError, AuthenticationError):
            return False

    def _take_turn(self) -> bool:
        if self._unsent:
            return self._write()
        if self._question is not None:
            return self._go_on()
        data = self.sock.recv(CHUNK)
        return bool(data) and self._hear(data)

    def _hear(self, data: bytes) -> bool:
        self.heard_at = time.monotonic()
        if self._machine.welcomed:
            self._reader.feed(data)
            self._question = self._reader.next()
            return self._question is None or self._go_on()
        try:
            answer = self._machine.receive(data)
        except (ProtocolError, AuthenticationError):
            self._gone = True
            return bool(self._machine.refusal) and self._say(self._machine.refusal)
        if self._machine.welcomed:
            self.deadline = NEVER
            self._reader.feed(self._machine.leftover)
        return self._say(answer) if answer else True

    def _go_on(self) -> bool:
        """Answer the question that is here."""
        assert self._question is not None
        (asked,), self._question = self._question, None
        if not (isinstance(asked, dict) and isinstance(asked.get("question"), str)):
            return False
        arguments = asked.get("arguments", {})
        return self._try(lambda: self._answer(asked["question"], arguments if isinstance(arguments, dict) else {}))

    def _try(self, make: Callable[[], Any]) -> bool:
        try:
            answer = make()
            if isinstance(answer, Later):
                self.later, self.due = answer, time.monotonic() + answer.seconds
                return True
            said = frame({"answer": answer})
        except Exception as error:
            said = frame({"error": f"{type(error).__name__}: {error}"})
        return self._say(said)

    def _say(self, data: bytes) -> bool:
        self._unsent = memoryview(data)
        if self.welcomed:  # (others have what is left of their time)
            self.deadline = time.monotonic() + TAKE_TIME
        return self._write()

    def _write(self) -> bool:
        self._unsent = self._unsent[self.sock.send(self._unsent) :]
        if self._unsent:
            return True
        if self.welcomed:
            self.deadline = NEVER
            self._question = self._reader.next()  # it may be here; others have their turn before it is answered
        return not self._gone
