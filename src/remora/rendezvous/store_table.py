"""A c10d store as a table: the few operations that groups need, with our errors. It knows no group.

Everything lies below the prefix `remora`, so that the store can be shared with process groups. A store that failed once
is not touched again: after a full disk a FileStore never returns from the next operation. If a store does not answer, since
its host is frozen or cut off, the table does not wait long, and does not ask again before the store has answered. A store
whose process has ended is not asked at all: torch would write C++ stack traces to the terminal.

Values are sealed (`remora.rendezvous.seal`), so what is read here was written by a worker with the group's secret. Counts
and the few values that are named hints are not: they can keep a group from forming, and nothing else follows from them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.rendezvous.seal import RecordSeal
from remora.transport.deadlines import BoundedCalls
from remora.transport.store_probe import StoreProbe

T = TypeVar("T")

_probes: WeakKeyDictionary[Store, StoreProbe] = WeakKeyDictionary()

PREFIX = "remora"
KIND = "kind"
ANSWER_TIMEOUT = 15.0  # seconds; a host that looks up names in vain is held up for 5 s, or twice that
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_WHO_HOSTS_IT = "If another worker hosts it (rank 0 does for tcp:// and env://)"
_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class StoreTable:
    """Keys and values that all workers of a group see. Values are texts; an empty one stands for none."""

    def __init__(self, store: Store, seal: RecordSeal | None = None, answer_timeout: float = ANSWER_TIMEOUT) -> None:
        self.where = describe(store)
        self.seal = seal or RecordSeal()
        self._place = _place(store)
        self._kept = store  # PrefixStore keeps only the native part, which is not enough of a store written in Python
        self._store = PrefixStore(PREFIX, store)
        self._extended = bool(store.has_extended_api())  # type: ignore[attr-defined]
        self._bounded = BoundedCalls(answer_timeout)
        self._broken = ""
        self._probe = _probes.pop(store, None)  # shows when the store's process ends, where that is another one

    def __repr__(self) -> str:
        return f"<StoreTable at {self.where}{self._broken and ', broken'}>"

    def swap(self, key: str, new: str, old: str = "") -> str:
        """Replace the value `old` (or none, if that is empty) by `new`. Return the value that the key has now."""
        before, after = self._close(key, old), self._close(key, new)
        return self._open(key, self._ask(lambda: self._store.compare_set(key, before, after)))

    def put(self, key: str, value: str) -> None:
        """Write a value, whatever the key had before."""
        sealed = self._close(key, value)
        self._ask(lambda: self._store.set(key, sealed))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; return the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def has(self, keys: Sequence[str]) -> bool:
        """Return True if all of the keys have been written."""
        return self._ask(lambda: self._store.check(list(keys)))

    def take(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys that are known to be written; in one operation where the store can."""
        return [self._open(key, value) for key, value in zip(keys, self._get(keys), strict=True)]

    def take_proven(self, keys: Sequence[str]) -> list[str | None]:
        """Do the same, with None in the place of a value that no worker of the group wrote there."""
        return [self._open_if_proven(key, value) for key, value in zip(keys, self._get(keys), strict=True)]

    def put_hint(self, key: str, value: str) -> None:
        """Write a value without a seal, for workers with another secret to read."""
        self._ask(lambda: self._store.set(key, value))

    def swap_hint(self, key: str, new: str) -> str:
        """Write a value without a seal, if the key has none. Return its value now; any process may have written it."""
        return _text(self._ask(lambda: self._store.compare_set(key, "", new)))

    def hint(self, key: str) -> str:
        """Return a value without a seal, if there is one. Any process may have written it."""
        return _text(self._get([key])[0]) if self.has([key]) else ""

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self._extended and len(keys) > 1:
            return self._ask(lambda: self._store.multi_get(list(keys)))
        return self._ask(lambda: [self._store.get(key) for key in keys])

    def _close(self, key: str, value: str) -> str:
        return self.seal.close(self._place, key, value) if value else ""

    def _open(self, key: str, stored: bytes) -> str:
        return self.seal.open(self._place, key, _text(stored), self.where) if stored else ""

    def _open_if_proven(self, key: str, stored: bytes) -> str | None:
        try:
            return self._open(key, stored)
        except RendezvousError:
            return None

    def has_foreign(self, key: str) -> bool:
        """Return True if a key has been written that is not Remora's."""
        return self._ask(lambda: self._kept.check([key]))

    def wait(self, key: str, deadline: float, look: Callable[[], None] = lambda: None) -> bool:
        """Wait until the key is written; return False if it is not at the deadline. Calls `look` now and then meanwhile.

        The store's own wait does not react to Ctrl-C, and prints to standard error when it ends in vain.
        """
        pause = _FIRST_PAUSE
        while not self.has([key]):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
            look()
        return True

    def close(self) -> None:
        """Close the second connection to the store: the table is needed no more, or rarely."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def agree_on_kind(self, kind: str) -> None:
        """Raise if the first worker at this store was of another kind: static and dynamic members cannot share a store."""
        if self.swap_hint(KIND, kind) != kind:
            raise RendezvousError(f"{_MIXED} This worker's group is {kind}, the others at {self.where} are not.")

    def _ask(self, operation: Callable[[], T]) -> T:
        """Return the answer of the store, with our errors. Its own operations would wait for a frozen host for ever."""
        if self._probe is not None and self._probe.ended:
            self._broken = f"{self._store_of_the_group()} is gone: its process ended. {_WHO_HOSTS_IT}, that worker did."
            self.close()
        if self._broken:
            raise RendezvousError(self._broken)
        try:
            return self._bounded.ask(operation)
        except TimeoutError:
            reason = f"did not answer within {self._bounded.seconds:g} s"
            raise RendezvousError(
                f"{self._store_of_the_group()} {reason}. {_WHO_HOSTS_IT}, that worker may be frozen or cut off."
            ) from None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            self._broken = f"{self._store_of_the_group()} failed: {reason}. {_WHO_HOSTS_IT}, that worker may have ended."
            raise RendezvousError(self._broken) from None  # torch's text goes on with a C++ stack trace

    def _store_of_the_group(self) -> str:
        return f"The store at {self.where}, where the workers of the group meet,"


def watch_process(store: Store, probe: StoreProbe | None) -> None:
    """Give the table of a store a probe that shows when the store's process ends. Without one, torch's own client finds
    out."""
    if probe is not None:
        _probes[store] = probe


def innermost(store: Store) -> Store:
    """Return the store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _place(store: Store) -> str:
    """Return a name of the store that all its workers agree on, whatever names they have for its host. It exposes values
    that were copied from another store."""
    store = innermost(store)
    if isinstance(store, TCPStore):
        return f"tcp port {store.port}"
    if isinstance(store, FileStore):
        return f"file {os.path.basename(store.path)!r}"  # type: ignore[attr-defined]
    return "a store"  # of a kind that may be wrapped differently by each worker


def describe(store: Store) -> str:
    """Return the place of a store for error texts: its address, its file, or its type."""
    store = innermost(store)
    if isinstance(store, TCPStore):
        return f"tcp://{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return f"file://{store.path}"  # type: ignore[attr-defined]
    return type(store).__name__
