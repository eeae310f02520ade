"""The sealed messages of a handshake: framing, sealing, refusing. What they mean is in `remora.protocol.handshake`.

A message is a header (magic, version, kind, whether its sender has a secret, length, a CRC-16 of all that), a JSON object,
and a seal: HMAC-SHA256 keyed with the group's secret, over the sender's role and every byte exchanged so far, this message's
included. The seal is checked over raw bytes, in constant time, before the JSON is looked at. Only a REFUSAL is read
without a valid seal, since the commonest reason to refuse is that the secrets differ. What an unproven one says is a hint
for people (`proven`). An end that refuses a message without a valid seal answers without one: a stranger gets nothing
that was made with the group's key.

No I/O, no clock, no threads.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from binascii import crc_hqx
from enum import Enum, IntEnum
from typing import ClassVar, Never

from remora.errors import AuthenticationError, ProtocolError, RemoraError

VERSION = 2
MAGIC = b"RMRA"
MAX_BODY = 4096
MAX_TEXT = 200
SEAL_SIZE = 32
HEADER = struct.Struct(">4sBB?HH")
_CHECK = struct.Struct(">H")
_LENGTH = struct.Struct(">HH")
_VERSION_AT, _KIND_AT, _SECURED_AT, LENGTH_AT, CHECK_AT = 4, 5, 6, 7, 9

Body = dict[str, object]


class Kind(IntEnum):
    """The kind of a message of the handshake."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


class Why(Enum):
    """The reason why a handshake failed: the name travels in a REFUSAL, the text is what people read."""

    GARBAGE = "the peer does not speak Remora's protocol"
    VERSION = "the ends speak different versions of the protocol; install the same version of remora everywhere"
    OVERSIZE = f"the peer announced a message of more than {MAX_BODY} bytes"
    DAMAGED = "the header of a message arrived damaged; the connection is not reliable"
    CLOSED = "the peer closed the connection before the handshake was over"
    MALFORMED = "the peer sent a message that makes no sense at this point"
    SECRET = (
        "the ends do not have the same secret; give every worker of the group the same one "
        "(REMORA_SECRET, REMORA_SECRET_FILE or the options)"
    )
    INSECURE = (
        "one end has a secret, the other was started insecure and has none; give every worker the same secret, "
        "or start all of them insecure"
    )
    GROUP = "the peer belongs to another group"
    WORKER = "another worker answers at this address"
    RESTARTED = "that worker has been restarted, and the one known before is gone"
    ADMISSION = "the session is not admitted"
    LEAVING = "this worker is shutting down"


_UNPROVEN = {Why.GARBAGE, Why.VERSION, Why.OVERSIZE, Why.DAMAGED, Why.CLOSED}  # refused before its seal was checked
_NO_SEAL = bytes(SEAL_SIZE)


class Malformed(Exception):
    """The body of a sealed message lacks something, or has it wrong."""


class Conversation:
    """One end of a handshake. Subclasses say what each message means; all state is changed by `receive` alone."""

    role: ClassVar[bytes]
    peer_role: ClassVar[bytes]
    awaits: Kind

    def __init__(self, name: str, secret: bytes, insecure: bool) -> None:
        if not secret and not insecure:
            raise AuthenticationError("There is no secret to prove, and the group was not started insecure.")
        self.result: object = None
        """Set when the handshake succeeded: what this end knows then."""
        self.why: Why | None = None
        """Set when the handshake failed, by whichever end refused."""
        self.refusal = b""
        """After an error: what to send to the peer before closing, so that it can say why as well (may be empty)."""
        self.proven = False
        """Return True if the peer's last message was sealed with our secret. A refusal without it is a hint at most."""
        self.leftover = b""
        """After success: the bytes that followed the handshake. They are the first frames of the peer."""
        self.greeting = b""
        """The seal of the HELLO that came. No two honest ones are the same; a stranger who heard one may say it again."""
        self._name = name
        self._over = False
        self._key = secret
        self._buffer = bytearray()
        self._transcript = bytearray()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {self.result or self.why or f'awaits {self.awaits.name}'}>"

    def receive(self, data: bytes) -> bytes:
        """Take what the link delivered (nothing means that it was closed); return what to send back."""
        if self._over:
            raise ProtocolError(f"This handshake is over: {self!r}.")
        if not data:
            self._fail(Why.CLOSED, tell=False)
        self._buffer += data
        reply = b""
        while not self._over and (length := self._whole_message()) is not None:
            reply += self._take(length)
        if self._over:
            self.leftover, self._buffer = bytes(self._buffer), bytearray()
        return reply

    def _whole_message(self) -> int | None:
        """The length of the body once a whole message is there. Strangers are refused as soon as they show."""
        have = len(self._buffer)
        if have >= len(MAGIC) and not self._buffer.startswith(MAGIC):
            self._fail(Why.GARBAGE, _guess(bytes(self._buffer[:16])), tell=False)
        if have > _VERSION_AT and self._buffer[_VERSION_AT] != VERSION:
            self._fail(Why.VERSION, f"the peer {self._buffer[_VERSION_AT]}, this end {VERSION}")
        if have < HEADER.size:
            return None
        length, intact = _length(self._buffer)
        if not intact:  # to wait for as many bytes as it says would be to wait in silence
            self._fail(Why.DAMAGED)
        if length > MAX_BODY:
            self._fail(Why.OVERSIZE, f"{length}")
        if have >= HEADER.size + length + SEAL_SIZE:
            return length
        kind = self._buffer[_KIND_AT]
        if kind not in (self.awaits, Kind.REFUSAL):  # another one in its place: its length is of no use here
            self.proven = False
            self._fail(Why.MALFORMED, f"kind {kind} instead of {self.awaits.name}")
        return None

    def _take(self, length: int) -> bytes:
        kind = self._buffer[_KIND_AT]
        body = self._unseal(length)
        if kind == Kind.REFUSAL:
            self._refused(body)
        if kind != self.awaits:
            self._fail(Why.MALFORMED, f"kind {kind} instead of {self.awaits.name}")
        try:
            return self._on_message(_parse(body))
        except Malformed as error:
            self._fail(Why.MALFORMED, str(error))

    def _unseal(self, length: int) -> bytes:
        """Move one message from the buffer to the transcript; return its body, of which the seal has been checked."""
        end = HEADER.size + length
        message, seal = bytes(self._buffer[:end]), bytes(self._buffer[end : end + SEAL_SIZE])
        del self._buffer[: end + SEAL_SIZE]
        self._transcript += message
        self.proven = hmac.compare_digest(seal, self._seal(self.peer_role))
        self._transcript += seal
        if message[_KIND_AT] != Kind.REFUSAL:
            if message[_SECURED_AT] != bool(self._key):
                self._fail(Why.INSECURE)
            if not self.proven:
                self._fail(Why.SECRET)
        return message[HEADER.size :]

    def _on_message(self, body: Body) -> bytes:
        """Act on the awaited message; return the answer, or raise Malformed."""
        raise NotImplementedError

    def _message(self, kind: Kind, body: Body, sealed: bool = True) -> bytes:
        text = json.dumps(body, separators=(",", ":")).encode()
        message = header(kind, bool(self._key), len(text)) + text
        self._transcript += message
        seal = self._seal(self.role) if sealed else _NO_SEAL
        self._transcript += seal
        return message + seal

    def _seal(self, role: bytes) -> bytes:
        return hmac.new(self._key, role + self._transcript, hashlib.sha256).digest()

    def _fail(self, why: Why, detail: str = "", tell: bool = True) -> Never:
        """This end refuses: leave a message for the peer, then raise. The message has a seal if the refused one had."""
        self._over, self.why = True, why
        self.proven = self.proven and why not in _UNPROVEN
        if tell:
            body: Body = {"why": why.name, "detail": detail[:MAX_TEXT]}
            self.refusal = self._message(Kind.REFUSAL, body, sealed=self.proven)
        raise _error(why)(f"Refused a connection: {_sentence(why, detail)}.")

    def _refused(self, body: bytes) -> Never:
        """The peer refuses. It may be anyone: what it says is cut short and stripped of control characters."""
        try:
            fields = _parse(body)
        except Malformed:
            fields = {}
        name, detail = fields.get("why"), fields.get("detail")
        self._over = True
        self.why = Why.__members__.get(name, Why.MALFORMED) if isinstance(name, str) else Why.MALFORMED
        text = printable(detail) if isinstance(detail, str) else ""
        who = "The peer" if self.proven else "A peer that did not prove itself"
        raise _error(self.why)(f"{who} refused the connection; it says: {_sentence(self.why, text)}.")


def header(kind: Kind, secured: bool, length: int) -> bytes:
    """Return the first bytes of a message."""
    unchecked = HEADER.pack(MAGIC, VERSION, kind, secured, length, 0)[:CHECK_AT]
    return unchecked + _CHECK.pack(_check(unchecked))


def _check(data: bytes | bytearray) -> int:
    """Return a checksum. It finds up to three flipped bits, any damage within 16 neighbouring ones, and all but one in
    65,536 others."""
    return crc_hqx(data[:CHECK_AT], 0)


def _length(data: bytes | bytearray) -> tuple[int, bool]:
    """The length of the body as a header says it, and whether it arrived as it was sent."""
    length, check = _LENGTH.unpack_from(data, LENGTH_AT)
    return length, check == _check(data)


def _error(why: Why) -> type[RemoraError]:
    return AuthenticationError if why in (Why.SECRET, Why.INSECURE) else ProtocolError


def _sentence(why: Why, detail: str) -> str:
    return f"{why.value} ({detail})" if detail else why.value


def _parse(body: bytes) -> Body:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    if not isinstance(parsed, dict):
        raise Malformed("not an object")
    return parsed


def _guess(start: bytes) -> str:
    """Return what a stranger may be speaking, for the person who reads the log."""
    if start[:2] == b"\x16\x03":
        return "it looks like TLS"
    if start[:4] in (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"PRI ", b"HTTP"):
        return "it looks like HTTP"
    return f"its first bytes are {start!r}"


def is_unfinished(data: bytes) -> bool:
    """Return True if bytes are the beginning of a first message that a listener would go on to read. Costs next to
    nothing: a stranger may send many beginnings."""
    if not data.startswith(MAGIC) or len(data) <= _VERSION_AT:
        return MAGIC.startswith(data[: len(MAGIC)]) and len(data) <= _VERSION_AT
    if data[_VERSION_AT] != VERSION or len(data) < HEADER.size:
        return data[_VERSION_AT] == VERSION
    length, intact = _length(data)
    expected = data[_KIND_AT] in (Kind.HELLO, Kind.REFUSAL)
    return expected and intact and length <= MAX_BODY and len(data) < HEADER.size + length + SEAL_SIZE


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of a stranger for a log or a terminal: cut short, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])
