"""One connection of an observer to this worker: it proves the key, and then asks one question after the other.

Bytes only: `remora.introspection.observer_server` says when it may read or write, and for how long. Nothing it sends is
unpickled, and it has no more than one question and one answer here at a time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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

    def __init__(self, sock: socket.socket, machine: Observed, answer: Answer) -> None:
        self.sock = sock
        self.deadline = time.monotonic() + PROOF_TIME  # by when it has to do what is expected of it
        self.heard_at = time.monotonic()
        self.later: Later | None = None  # what it waits for, and
        self.due = NEVER  # … when that is made
        self._machine = machine
        self._answer = answer
        self._reader = Reader(MAX_QUESTION)
        self._unsent = memoryview(b"")
        self._gone = False  # it is to be closed when what was said to it is sent

    @property
    def welcomed(self) -> bool:
        """True if it has proven the key."""
        return self._machine.welcomed

    @property
    def writes(self) -> bool:
        """True if it has something to take; nothing is read from it meanwhile."""
        return len(self._unsent) > 0

    @property
    def waits(self) -> bool:
        """True if its answer is being made; nothing is read from it meanwhile."""
        return self.later is not None

    def ready(self) -> bool:
        """Read or write what can be. Return False if the connection is to be closed."""
        try:
            if self.writes:
                return self._write()
            data = self.sock.recv(CHUNK)
            return bool(data) and self._hear(data)
        except (BlockingIOError, InterruptedError):
            return True
        except (OSError, ProtocolError, AuthenticationError):
            return False

    def _hear(self, data: bytes) -> bool:
        self.heard_at = time.monotonic()
        if self._machine.welcomed:
            self._reader.feed(data)
            return self._go_on()
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
        """Answer the next question, if it is whole."""
        question = self._reader.next()
        if question is None:
            return True
        asked = question[0]
        if not (isinstance(asked, dict) and isinstance(asked.get("question"), str)):
            return False
        arguments = asked.get("arguments", {})
        return self._try(lambda: self._answer(asked["question"], arguments if isinstance(arguments, dict) else {}))

    def finish(self) -> bool:
        """A question that took time is to be answered now."""
        later, self.later, self.due = self.later, None, NEVER
        return later is None or self._try(later.then)

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
        self.deadline = time.monotonic() + (TAKE_TIME if self.welcomed else PROOF_TIME)
        return self._write()

    def _write(self) -> bool:
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        if self._unsent:
            return True
        if self.welcomed:
            self.deadline = NEVER
        return not self._gone and (not self.welcomed or self._go_on())  # its next question may be here already
