"""The tables of a worker's peers: by name, by id, and those who are gone. Nothing happens here but finding and keeping."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable

from remora.agent.peers.peer import Peer
from remora.errors import WorkerNotFound
from remora.long_wait import listed
from remora.rendezvous.record import WorkerRecord
from remora.vocabulary.ids import WorkerKey

MOST_DEPARTED = 256  # how many of those who are gone are remembered, so that calls to them can say what became of them


class PeerTable:
    """The workers that are known. A name and an id belong to the worker that had them last."""

    def __init__(self) -> None:
        self.me: Peer  # this worker as its own peer
        self._lock = threading.RLock()  # guards: the three tables
        self.by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._departed: dict[WorkerKey, Peer] = {}  # in the order in which they went

    def enter(self, record: WorkerRecord, make: Callable[[], Peer]) -> tuple[Peer, Peer | None, bool]:
        """Return the peer of that record, the one of the same name that it replaces, and True if it is new."""
        key = WorkerKey(record.id, record.incarnation)
        with self._lock:
            of_name = self.by_name.get(record.name)
            if of_name is not None and of_name.key == key:
                if not of_name.record.addresses or (record.extra and not of_name.record.extra):
                    of_name.learn(record)  # until now it was known by its call alone
                return of_name, None, False
            if key in self._departed:
                return self._departed[key], None, False  # news of it came late
            peer = make()
            self.by_name[record.name] = self._by_id[record.id] = peer
        return peer, of_name, True

    def mark_departed(self, peer: Peer) -> None:
        """Remember a peer that is gone for a while, and forget the one that is gone for longest."""
        with self._lock:
            self._departed[peer.key] = peer
            while len(self._departed) > MOST_DEPARTED:
                old = self._departed.pop(next(iter(self._departed)))
                if self.by_name.get(old.name) is old:
                    del self.by_name[old.name]
                if self._by_id.get(old.id) is old:
                    del self._by_id[old.id]

    def find(self, key: str | int) -> Peer:
        """Return the peer of that name or id."""
        peer = self.by_name.get(key) if isinstance(key, str) else self._by_id.get(key)
        if peer is None:
            names = list(self.by_name)
            near = difflib.get_close_matches(str(key), names, 1) if isinstance(key, str) else []
            hint = f". Did you mean {near[0]!r}?" if near else ""
            known = f"{len(names)} workers ({listed(sorted(names))})"
            raise WorkerNotFound(f"could not find destination {key!r} among {known}{hint}")
        return peer

    def of_id(self, id: int) -> Peer | None:
        """The worker of that id, if there is one."""
        return self._by_id.get(id)

    def by_key(self, key: WorkerKey) -> Peer | None:
        """Return that very worker, if it is not gone."""
        peer = self._by_id.get(key.id)
        return peer if peer is not None and peer.key == key and not peer.gone else None

    def known(self, key: WorkerKey) -> Peer | None:
        """Return that very worker, gone or not, if it is remembered."""
        return self.by_key(key) or self._departed.get(key)

    def all(self) -> list[Peer]:
        """Return all workers that are there, and the last of those names whose workers are gone."""
        return list(self.by_name.values())  # (made in one go, without the lock: a destructor may ask, anywhere)
