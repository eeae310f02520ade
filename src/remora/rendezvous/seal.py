"""Seals what the workers of a group write into the store, to which any process that reaches it can write as well.

A sealed value names the meeting place and the store key it was written for, and carries an HMAC-SHA256 over all three. The
key of the HMAC is derived from the group's secret. Hence a value that a stranger made up is not believed, and neither is one
that a stranger copied here from another store, or from the place of another rank, name, generation or group. What a stranger
can do is to put an old value of the same store key back, and to remove values: each roster names the incarnations of its
workers, so an old one is of no use (`remora.rendezvous.static_join`). Stores of two hosts with the same port number are one
meeting place here, since workers have different names for the same host: see docs/security.md.

Without a secret, in a group that was started insecure, the key is that of the empty secret, which proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac

from remora.errors import RendezvousError

_MARK = "RMR1"  # the first characters of a sealed value, with the version of its form
_SEAL_SIZE = 64
_SHOWN = 80
_WHAT_TO_DO = (
    "The value was not used. Keep other programs away from the store, or use a new one (another port or file). All workers "
    "need the same version of remora."
)


class RecordSeal:
    """The keys that follow from a group's secret. `kind` says in words where the secret is from, for errors."""

    def __init__(self, secret: bytes = b"", kind: str = "no secret, and insecure") -> None:
        self.kind = kind
        self.fingerprint = _derive(secret, b"fingerprint").hex()[:16]
        """Tells groups with different secrets apart; of no use without the secret."""
        self._key = _derive(secret, b"key of records")

    def close(self, place: str, key: str, value: str) -> str:
        """Return the value as it is stored: always the same text for the same value, since stores compare bytes."""
        sealed = f"{place}\n{key}\n{value}"
        return f"{_MARK}{self._seal(sealed)}{sealed}"

    def open(self, place: str, key: str, stored: str, where: str) -> str:
        """Return the value; RendezvousError if a worker of this group did not write it for this key of this store."""
        head = len(_MARK) + _SEAL_SIZE
        sealed = stored[head:]
        if not hmac.compare_digest(stored[:head].encode(), f"{_MARK}{self._seal(sealed)}".encode()):
            raise RendezvousError(
                f"The value of {key!r} in the store at {where} has no seal made with this group's secret: "
                f"{stored[:_SHOWN]!r}. {_WHAT_TO_DO}"
            )
        its_place, its_key, value = sealed.split("\n", 2)
        if (its_place, its_key) != (place, key):
            raise RendezvousError(
                f"The value of {key!r} in the store at {where} ({place}) was written for {its_key!r} in another one "
                f"({its_place}), or for another worker, and was copied here. {_WHAT_TO_DO} If a port is forwarded, forward "
                "the same number."
            )
        return value

    def _seal(self, sealed: str) -> str:
        return hmac.new(self._key, sealed.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.new(secret, b"remora rendezvous: " + purpose, hashlib.sha256).digest()
