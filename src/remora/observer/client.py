"""The connection of an observer to one worker: proves the key, asks, and reads the answers. It belongs to one thread."""

from __future__ import annotations

import time
from typing import Any

from remora.errors import AuthenticationError, ObserverError, ProtocolError
from remora.observer.model import Query, UnknownVersion, WorkerSnapshot
from remora.observer.snapshot_json import from_json, to_json
from remora.protocol.conversation import printable
from remora.protocol.handshake import Identity
from remora.protocol.observing import MAX_ANSWER, Observer, Reader, frame
from remora.transport import sockets
from remora.transport.addresses import Address

CHUNK = 1 << 16
ROUND_TRIPS = 5  # of which the shortest says how the clocks differ


class Unanswered(ObserverError):
    """The worker took the connection, or the question, and did not answer in time."""


class ObserverLink:
    """One authenticated connection to one worker.

    `key` is the observers' key of the group (`remora.protocol.observing.observer_key`), `group` and `incarnation` say what
    the worker must be of; empty: any. Raises ObserverError, or AuthenticationError if the key is another one.
    """

    def __init__(
        self, address: str, key: bytes, *, group: str = "", incarnation: str = "", timeout: float, worker: str = ""
    ) -> None:
        self.address = address
        self.worker = worker or address  # for errors; its name, once it has said it
        self._deadline = time.monotonic() + timeout
        self._reader = Reader(MAX_ANSWER)
        try:
            self._sock = sockets.connect(Address.parse(address), timeout)
        except TimeoutError:
            raise Unanswered(self.worker, f"nothing answers at {address} within {timeout:g} s") from None
        except (OSError, ValueError) as error:
            raise ObserverError(self.worker, f"nothing listens at {address} ({error})") from None
        try:
            self.identity = self._shake_hands(Observer(key, group=group, incarnation=incarnation))
        except BaseException:
            self._sock.close()
            raise
        self.worker = self.identity.name

    def __repr__(self) -> str:
        return f"<ObserverLink to {self.worker} at {self.address}>"

    def ask(self, question: str, *, timeout: float = 5.0, **arguments: Any) -> Any:
        """Return the answer to a question. ObserverError if there is none; then the link is closed."""
        self._deadline = time.monotonic() + timeout
        try:
            self._send(frame({"question": question, "arguments": arguments}))
            while (answer := self._reader.next()) is None:
                self._reader.feed(self._receive())
        except (ObserverError, ProtocolError) as error:
            self.close()
            if isinstance(error, ObserverError):
                raise
            raise ObserverError(self.worker, f"what it answered cannot be read: {error}") from None
        return self._meaning(question, answer[0])

    def _meaning(self, question: str, answer: object) -> Any:
        if not isinstance(answer, dict) or not ({"answer", "error"} & answer.keys()):
            self.close()
            raise ObserverError(self.worker, f"its answer to {question!r} has another form than answers have")
        if "error" in answer:
            raise ObserverError(self.worker, printable(str(answer["error"]), 2000))
        return answer["answer"]

    def snapshot(self, query: Query = Query(), timeout: float = 5.0) -> WorkerSnapshot:
        """Return what the worker says of itself now."""
        found = self.ask("snapshot", timeout=timeout, query=to_json(query))
        try:
            return from_json(WorkerSnapshot, found)
        except ValueError as error:
            raise ObserverError(self.worker, f"its snapshot makes no sense: {printable(str(error))}") from None
        except UnknownVersion as error:
            raise ObserverError(self.worker, str(error)) from None

    def clock_offset(self, timeout: float = 5.0) -> tuple[float, float]:
        """Return by how much the wall clock of the worker is ahead of ours, and how far that may be off: half the shortest
        of some round trips."""
        best = (0.0, float("inf"))
        for _ in range(ROUND_TRIPS):
            began = time.time()
            told = self.ask("clock", timeout=timeout)
            ended = time.time()
            if not isinstance(told, (int, float)) or isinstance(told, bool):
                raise ObserverError(self.worker, "what it says of its clock is no time")
            error = (ended - began) / 2
            if error < best[1]:
                best = float(told) - (began + ended) / 2, error
        return best

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._sock.close()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    # Bytes.

    def _shake_hands(self, machine: Observer) -> Identity:
        try:
            self._send(machine.start())
            while machine.result is None:
                answer = machine.receive(self._receive())
                if answer:
                    self._send(answer)
        except AuthenticationError as error:
            self._say_last(machine)
            raise AuthenticationError(f"{self.worker} at {self.address}: {error}") from None
        except ProtocolError as error:
            self._say_last(machine)
            raise ObserverError(self.worker, f"{self.address} is no observer's door of that worker: {error}") from None
        self._reader.feed(machine.leftover)
        return machine.result

    def _say_last(self, machine: Observer) -> None:
        if machine.refusal:
            try:
                self._sock.send(machine.refusal)
            except OSError:
                pass

    def _send(self, data: bytes) -> None:
        self._wait()
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise Unanswered(self.worker, "it does not take the question in time") from None
        except OSError as error:
            raise ObserverError(self.worker, f"the connection broke ({error})") from None

    def _receive(self) -> bytes:
        self._wait()
        try:
            data = self._sock.recv(CHUNK)
        except TimeoutError:
            raise Unanswered(self.worker, "it did not answer in time") from None
        except OSError as error:
            raise ObserverError(self.worker, f"the connection broke ({error})") from None
        if not data:
            raise ObserverError(self.worker, "it closed the connection")
        return data

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Unanswered(self.worker, "it did not answer in time")
        try:
            self._sock.settimeout(left)
        except OSError as error:  # it is closed
            raise ObserverError(self.worker, f"the connection is closed ({error})") from None
