"""The conversation of an observer with a worker: it proves the key, then asks. No I/O, no clock, no threads.

The conversation has the form of `remora.protocol.handshake`, with roles and a key of its own:

    observer                                       worker
      │ ── HELLO      group, incarnation, nonce ─────► │
      │ ◄─ CHALLENGE  who I am, nonce ──────────────── │    now the observer knows the worker
      │ ── PROOF ────────────────────────────────────► │    now the worker knows the observer
      │ ◄─ WELCOME ─────────────────────────────────── │

The key is derived from the group's secret, and the secret cannot be computed from it. So a process that has no more than
an observer's key can ask questions, and can never become a member; and since roles are part of every seal, what is said at
one door opens no other.

After that, each side sends texts: a length (four bytes, big-endian), and so many bytes of JSON. The observer sends a
question, the worker one answer to each, in order. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from typing import Any

from remora.errors import ProtocolError
from remora.protocol.conversation import MAX_TEXT, SEAL_SIZE, Body, Conversation, Kind, Why
from remora.protocol.handshake import Identity, introduction, read_identity, read_text

MAX_QUESTION = 64 << 10  # bytes
MAX_ANSWER = 256 << 20
_LENGTH = struct.Struct(">I")
_OBSERVER = b"remora observing, observer:"
_WORKER = b"remora observing, worker:"
_KEY = b"remora observer's key"


def observer_key(secret: bytes) -> bytes:
    """Return the key that observers of a group prove; nothing for a group that was started insecure."""
    return hmac.new(secret, _KEY, hashlib.sha256).digest() if secret else b""


class Observer(Conversation):
    """The end that asks. It may say which group and which start of a worker it means; empty: any."""

    role, peer_role = _OBSERVER, _WORKER
    awaits = Kind.CHALLENGE
    result: Identity | None  # the worker, when it has welcomed us

    def __init__(self, key: bytes, *, group: str = "", incarnation: str = "") -> None:
        super().__init__("observer", key, insecure=not key)
        self._group = group
        self._incarnation = incarnation
        self._worker: Identity | None = None

    def start(self) -> bytes:
        """Return the first message of the conversation."""
        body: Body = {"group": self._group, "incarnation": self._incarnation, "nonce": secrets.token_hex(16)}
        return self._message(Kind.HELLO, body)

    def _on_message(self, body: Body) -> bytes:
        if self._worker is None:
            self._worker = read_identity(body)
            if self._group not in ("", self._worker.group):
                self._fail(Why.GROUP)
            if self._incarnation not in ("", self._worker.incarnation):
                self._fail(Why.RESTARTED)
            self.awaits = Kind.WELCOME
            return self._message(Kind.PROOF, {})
        self.result = self._worker
        self._over = True
        return b""


class Observed(Conversation):
    """The end of the worker."""

    role, peer_role = _WORKER, _OBSERVER
    awaits = Kind.HELLO

    def __init__(self, me: Identity, key: bytes) -> None:
        super().__init__(me.name, key, insecure=not key)
        self._me = me

    @property
    def welcomed(self) -> bool:
        """Return True if the observer has proven the key."""
        return self.result is not None

    def _on_message(self, body: Body) -> bytes:
        if self.greeting:
            self.result, self._over = "welcomed", True
            return self._message(Kind.WELCOME, {})
        self.greeting = bytes(self._transcript[-SEAL_SIZE:])
        if read_text(body, "group", least=0) not in ("", self._me.group):
            self._fail(Why.GROUP)
        if read_text(body, "incarnation", least=0) not in ("", self._me.incarnation):
            self._fail(Why.RESTARTED)
        self.awaits = Kind.PROOF
        return self._message(Kind.CHALLENGE, introduction(self._me))


# What is said after the handshake.


def frame(value: object) -> bytes:
    """Return a text as it is sent."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_unknown).encode()
    return _LENGTH.pack(len(text)) + text


def _unknown(value: object) -> str:
    raise TypeError(f"a {type(value).__qualname__} cannot be told to an observer")


class Reader:
    """Takes bytes as they come, and returns the texts that are whole. ProtocolError if one is too long, or is no JSON."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._buffer += data

    def next(self) -> Any:
        """Return the next text that is whole, as `(value,)`; None if there is none."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise ProtocolError(f"a text of {length} bytes was announced; {self._limit} are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return (json.loads(text),)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"what came is no JSON: {str(error)[:MAX_TEXT]}") from None
