"""A c10d store as a notice board: the few operations that groups need, with our errors. It knows no group.

Everything lies below the prefix `remora`, so that the store can be shared with process groups. A store that failed once
is not touched again: after a full disk a FileStore never returns from the next operation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from remora.errors import RendezvousError

PREFIX = "remora"
KIND = "kind"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class Board:
    """Keys and values that all workers of a group see. Values are texts; an empty one stands for none."""

    def __init__(self, store: Store) -> None:
        self.where = describe(store)
        self._kept = store  # PrefixStore keeps only the native part, which is not enough of a store written in Python
        self._store = PrefixStore(PREFIX, store)
        self._extended = bool(store.has_extended_api())  # type: ignore[attr-defined]
        self._broken = ""

    def __repr__(self) -> str:
        return f"<Board at {self.where}{self._broken and ', broken'}>"

    def swap(self, key: str, new: str, old: str = "") -> str:
        """Put `new` where `old` (or nothing, if that is empty) stands. Returns what stands there now."""
        with self._watched():
            return self._store.compare_set(key, old, new).decode()

    def put(self, key: str, value: str) -> None:
        """Write a value, whatever stands there."""
        with self._watched():
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; returns the sum."""
        with self._watched():
            return self._store.add(key, amount)

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have been written."""
        with self._watched():
            return self._store.check(list(keys))

    def take(self, keys: Sequence[str]) -> list[str]:
        """The values of keys that are known to be there; in one go where the store can."""
        with self._watched():
            if self._extended and len(keys) > 1:
                return [value.decode() for value in self._store.multi_get(list(keys))]
            return [self._store.get(key).decode() for key in keys]

    def wait(self, key: str, deadline: float) -> bool:
        """Wait until the key is written; False if it is not at the deadline.

        The store's own wait would do, but it hears no Ctrl-C, and one that ends in vain says so on standard error.
        """
        pause = _FIRST_PAUSE
        while not self.has([key]):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def agree_on_kind(self, kind: str) -> None:
        """Static and dynamic members cannot share a store: the first one decides."""
        if self.swap(KIND, kind) != kind:
            raise RendezvousError(f"{_MIXED} This worker's group is {kind}, the others at {self.where} are not.")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._broken:
            raise RendezvousError(self._broken)
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            self._broken = (
                f"The store at {self.where}, where the workers of the group meet, failed: {reason}. If another worker "
                "hosts it (rank 0 does for tcp:// and env://), that worker may have ended."
            )
            raise RendezvousError(self._broken) from error


def describe(store: Store) -> str:
    """Where a store is, for people: its address, its file, or what it is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"tcp://{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return f"file://{store.path}"  # type: ignore[attr-defined]
    return type(store).__name__
