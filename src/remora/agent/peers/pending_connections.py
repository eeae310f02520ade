"""The table of connections that have not proven themselves: bounded, and fair to slow callers and to other sources.

A connection is SILENT until bytes come, BEGUN until its first message is whole, and GREETED when that message had a
valid seal that did not come before: what a stranger has heard and says again proves nothing, and stays BEGUN. A
greeted connection is never closed for the sake of one that is not. When the table is full, the oldest of the larger
of the other two kinds makes room: a flood of half-sent greetings does not cost a caller its place that has only just
connected, nor do silent connections cost one its place whose greeting came in two pieces. One source (an address, or
a process of this host) has at most three quarters of the table. No I/O, no clock, no lock: the listener has one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

SILENT, BEGUN, GREETED = range(3)
REMEMBERED = 4096  # greetings: a stranger must have heard more than these to be taken for a caller again


class Pending(Protocol):
    """A connection in the table. The table alone changes `stage`."""

    source: Hashable
    stage: int

    def __hash__(self) -> int: ...


P = TypeVar("P", bound=Pending)


class PendingTable(Generic[P]):
    """A bounded table of connections. Dicts keep the order in which connections came to a stage."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._share = limit - limit // 4  # of one source
        self._stages: tuple[dict[P, None], ...] = ({}, {}, {})
        self._sources: dict[Hashable, dict[P, None]] = {}  # those that have not greeted
        self._greetings: dict[bytes, None] = {}  # the seals of the last ones, oldest first

    def __len__(self) -> int:
        return sum(map(len, self._stages))

    def __contains__(self, connection: P) -> bool:
        return connection in self._stages[connection.stage]

    def __iter__(self) -> Iterator[P]:
        return iter([connection for stage in self._stages for connection in stage])

    def add(self, connection: P) -> P | None:
        """Enter a connection that has said nothing. Returns the one that makes room for it, if one must."""
        victim = self._victim(connection.source)
        connection.stage = SILENT
        self._stages[SILENT][connection] = None
        self._sources.setdefault(connection.source, {})[connection] = None
        return victim

    def advance(self, connection: P, stage: int) -> P | None:
        """A connection came to a later stage. Returns one that makes room: an older one that has greeted, and no more."""
        if connection not in self:
            return None
        del self._stages[connection.stage][connection]
        connection.stage = stage
        self._stages[stage][connection] = None
        if stage != GREETED:
            return None
        self._leave_source(connection)
        return next(iter(self._stages[GREETED])) if len(self._stages[GREETED]) > self.limit else None

    def is_new(self, greeting: bytes) -> bool:
        """Return True if this greeting did not come before. It is remembered."""
        if greeting in self._greetings:
            return False
        self._greetings[greeting] = None
        if len(self._greetings) > REMEMBERED:
            del self._greetings[next(iter(self._greetings))]
        return True

    def remove(self, connection: P) -> bool:
        """Return True if it was there."""
        if connection not in self:
            return False
        del self._stages[connection.stage][connection]
        if connection.stage != GREETED:
            self._leave_source(connection)
        return True

    def _leave_source(self, connection: P) -> None:
        of_source = self._sources[connection.source]
        del of_source[connection]
        if not of_source:
            del self._sources[connection.source]

    def _victim(self, source: Hashable) -> P | None:
        of_source = self._sources.get(source)
        if of_source is not None and len(of_source) >= self._share:
            return next(iter(of_source))
        silent, begun = self._stages[SILENT], self._stages[BEGUN]
        if len(silent) + len(begun) < self.limit:
            return None
        return next(iter(begun if len(begun) >= len(silent) else silent))
