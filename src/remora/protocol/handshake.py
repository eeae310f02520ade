"""Proves to each end of a new link who the other one is, before anything is unpickled. No I/O, no clock, no threads.

    caller                                         listener
      │ ── HELLO      who, where, session, nonce ────► │
      │ ◄─ CHALLENGE  who I am, nonce ──────────────── │    now the caller knows the listener
      │ ── PROOF ────────────────────────────────────► │    now the listener knows the caller: `admit` is asked
      │ ◄─ WELCOME    frames received so far ───────── │    both go on from where the session stood

Either end may answer REFUSAL instead, and says why; then both close the link. Each message ends in a seal keyed with
the group's secret, over the sender's role and all that was said so far (see `remora.protocol.conversation`). Hence
- nothing about a peer is believed, or even parsed, before it has shown that it knows the secret;
- a changed byte anywhere breaks the next seal: never do both ends accept a conversation that was tampered with;
- a replayed conversation fails, for each end puts a fresh nonce into it;
- a reflected one fails, for the role is part of the seal.

A group started insecure and without a secret seals with the empty key. That proves nothing, and keeps one path through
this file; an end with a secret refuses an end without.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from remora.protocol.conversation import MAX_TEXT, SEAL_SIZE, Body, Conversation, Kind, Malformed, Why
from remora.vocabulary.ids import MAX_WORKER_ID, check_worker_name

__all__ = ["Accepted", "Authorize", "Hello", "Home", "Identity", "Initiator", "Refused", "Responder", "Why"]

_MAX_COUNT = 2**63
_MAX_ADDRESSES = 8
_CALLER = b"remora handshake, caller:"
_LISTENER = b"remora handshake, listener:"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a worker. `incarnation` is drawn anew by each start of a worker, `group` by each forming of a
    group."""

    name: str
    id: int
    incarnation: str
    group: str


@dataclass(frozen=True, slots=True)
class Home:
    """The addresses of a worker: its host, and the addresses to dial, best first. Nothing if it does not say."""

    host: str = ""
    addresses: tuple[str, ...] = ()


_NOWHERE = Home()


@dataclass(frozen=True, slots=True)
class Hello:
    """The request of a caller. `received` is how many frames of the session it has had from the listener; `home` is
    where the listener can call it back."""

    peer: Identity
    session: str
    received: int
    home: Home = _NOWHERE


class Accepted(Hello):
    """The handshake succeeded. `received` is how many frames of the session the *peer* has had from this end."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A proven caller may not come in. Its end of the handshake acts on `why`; `detail` is for people."""

    why: Why
    detail: str = ""


Authorize = Callable[[Hello], int | Refused]
"""Asked about a proven caller: how many frames of its session have been received, or why it may not come in."""


class Initiator(Conversation):
    """The end that dialled. `expected` is whom it means to reach, where it knows that."""

    role, peer_role = _CALLER, _LISTENER
    awaits = Kind.CHALLENGE
    result: Accepted | None

    def __init__(
        self,
        me: Identity,
        session: str,
        received: int,
        secret: bytes,
        *,
        insecure: bool = False,
        expected: Identity | None = None,
        home: Home = _NOWHERE,
        nonce: bytes | None = None,
    ) -> None:
        super().__init__(me.name, secret, insecure)
        self._me = me
        self._home = home
        self._session = session
        self._received = received
        self._expected = expected
        self._nonce = nonce
        self._peer: Identity | None = None

    def start(self) -> bytes:
        """Return the first message of the conversation."""
        expected = self._expected.incarnation if self._expected else None
        home: Body = {"host": self._home.host, "addresses": list(self._home.addresses)}
        request: Body = {"session": self._session, "received": self._received, "expected": expected, "home": home}
        return self._message(Kind.HELLO, introduction(self._me, self._nonce) | request)

    def _on_message(self, body: Body) -> bytes:
        if self._peer is None:
            self._peer = read_identity(body)
            self._check(self._peer)
            self.awaits = Kind.WELCOME
            return self._message(Kind.PROOF, {})
        self.result = Accepted(self._peer, self._session, _count(body))
        self._over = True
        return b""

    def _check(self, peer: Identity) -> None:
        wanted = self._expected or peer
        if peer.group != self._me.group:
            self._fail(Why.GROUP)
        if (peer.name, peer.id) != (wanted.name, wanted.id):
            self._fail(Why.WORKER, f"it is {peer.name}, id {peer.id}, and not {wanted.name}, id {wanted.id}")
        if peer.incarnation != wanted.incarnation:
            self._fail(Why.RESTARTED)


class Responder(Conversation):
    """The end that accepted. Whom it lets in, and from which frame on, is for `authorize` to say."""

    role, peer_role = _LISTENER, _CALLER
    awaits = Kind.HELLO
    result: Accepted | None

    def __init__(
        self, me: Identity, authorize: Authorize, secret: bytes, *, insecure: bool = False, nonce: bytes | None = None
    ) -> None:
        super().__init__(me.name, secret, insecure)
        self._me = me
        self._authorize = authorize
        self._nonce = nonce
        self._hello: Hello | None = None

    def _on_message(self, body: Body) -> bytes:
        if self._hello is None:
            self.greeting = bytes(self._transcript[-SEAL_SIZE:])
            self._hello = self._read_hello(body)
            self.awaits = Kind.PROOF
            return self._message(Kind.CHALLENGE, introduction(self._me, self._nonce))
        return self._welcome(self._hello)

    def _read_hello(self, body: Body) -> Hello:
        hello = Hello(read_identity(body), read_text(body, "session"), _count(body), _home(body))
        if hello.peer.group != self._me.group:
            self._fail(Why.GROUP)
        if body.get("expected") not in (None, self._me.incarnation):
            self._fail(Why.RESTARTED)
        return hello

    def _welcome(self, hello: Hello) -> bytes:
        verdict = self._authorize(hello)
        if isinstance(verdict, Refused):
            self._fail(verdict.why, verdict.detail)
        self.result = Accepted(hello.peer, hello.session, hello.received, hello.home)
        self._over = True
        return self._message(Kind.WELCOME, {"received": verdict})


def introduction(me: Identity, nonce: bytes | None = None) -> Body:
    """Begin with the identity of this end. The nonce makes the conversation one of a kind; only tests choose it."""
    fresh = secrets.token_bytes(16) if nonce is None else nonce
    return {"name": me.name, "id": me.id, "incarnation": me.incarnation, "group": me.group, "nonce": fresh.hex()}


def read_identity(body: Body) -> Identity:
    worker, name = body.get("id"), read_text(body, "name")
    if type(worker) is not int or not 0 <= worker <= MAX_WORKER_ID:
        raise Malformed("no worker has such an id")
    try:
        check_worker_name(name)
    except RuntimeError as error:
        raise Malformed(str(error)) from None
    return Identity(name, worker, read_text(body, "incarnation"), read_text(body, "group"))


def _home(body: Body) -> Home:
    home = body.get("home", {})
    host, addresses = (home.get("host"), home.get("addresses")) if isinstance(home, dict) and home else ("", [])
    if not isinstance(addresses, list) or len(addresses) > _MAX_ADDRESSES:
        raise Malformed("'addresses' is not a short list")
    if not all(isinstance(text, str) and len(text) <= MAX_TEXT and text.isprintable() for text in (host, *addresses)):
        raise Malformed("'home' holds something that is not a short text")
    return Home(str(host), tuple(addresses))


def read_text(body: Body, field: str, least: int = 1) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not least <= len(value) <= MAX_TEXT or not value.isprintable():
        raise Malformed(f"{field!r} is not a short text")
    return value


def _count(body: Body) -> int:
    value = body.get("received")
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise Malformed("'received' is not a count")
    return value
