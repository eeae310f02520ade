"""Groups of workers that find each other on a store: static ones, whose size is known, and dynamic ones.

A static group forms by `remora.rendezvous.static_join`. A dynamic one is a log in the store: each line, under a number
drawn atomically, says that a worker joined or left. Names and ids are keys of their own, which workers take and release
atomically, so that no two workers have the same.

Any process that reaches the store can write to it. So workers seal what they write with the group's secret
(`remora.rendezvous.seal`), and do not use values without a seal. The handshake (`remora.protocol.handshake`) decides which
peers a worker talks to: it compares the group's id and the incarnation in the sealed records.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from remora.errors import AuthenticationError, RendezvousError
from remora.protocol.conversation import printable
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.static_join import StaticJoin
from remora.rendezvous.store import hosts
from remora.rendezvous.store_table import StoreTable

log = logging.getLogger("remora")

_GROUP = "dynamic/group"  # where the id of the group stands
_MOST_LINES = 1 << 20  # of which a worker has not heard: more than any group has joins and leaves
_MOST_UNWRITTEN = 4096  # lines that were drawn and not written


class Group:
    """The workers that can call each other. `group_id` is drawn at random when the group forms; known after `join`."""

    def __init__(self, store: Store, seal: RecordSeal | None) -> None:
        self.group_id = ""
        self._table = StoreTable(store, seal)

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Become a member. Returns all members, this one included, by id."""
        raise NotImplementedError

    def members(self) -> list[WorkerRecord]:
        """Return the current members, by id."""
        raise NotImplementedError

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Return other workers that have the name or the id of this one, also if they are no longer members. (Those of a
        static group find out together, when it forms.)"""
        return []

    def leave(self, record: WorkerRecord) -> None:
        """Cease to be a member, or remove a member that died. All workers that notice may do it: a second time does no harm.
        (A static group ends as a whole, and the next one is another generation.)"""

    def publish(self, key: str, text: str) -> None:
        """Write something for processes outside of the group that know the secret. What the key had is lost."""
        self._table.put(key, text)


class StaticGroup(Group):
    """A group of `world_size` workers with the ids from 0 on, which all have to come. A timeout of 0 means none.

    `has_ended` finds out if a worker that came has died: all may have been restarted while some were waiting.
    """

    def __init__(
        self,
        store: Store,
        world_size: int,
        timeout: float,
        has_ended: Callable[[WorkerRecord], bool] | None = None,
        seal: RecordSeal | None = None,
    ) -> None:
        if world_size < 1:
            raise RendezvousError(f"A group has at least one worker, but world_size is {world_size}.")
        super().__init__(store, seal)
        self._store = store
        self._size = world_size
        self._timeout = timeout
        self._has_ended = has_ended
        self._members: list[WorkerRecord] = []

    def __repr__(self) -> str:
        return f"<StaticGroup {self.group_id[:8]} at {self._table.where}: {len(self._members)} of {self._size} workers>"

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Wait until all workers have come. If they cannot form a group, this raises on every one of them."""
        if not 0 <= record.id < self._size:
            raise RendezvousError(f"Worker {record} cannot be one of {self._size}: the last rank is {self._size - 1}.")
        deadline = time.monotonic() + self._timeout if self._timeout else math.inf
        try:
            self._table.agree_on_kind("static")
            generation = -1
            while True:
                call = StaticJoin(self._table, self._size, record, self._has_ended)
                if call.generation <= generation:
                    raise RendezvousError(
                        f"The store at {self._table.where} shows worker {record} the roster of a group that ended "
                        f"(generation {call.generation}): a process outside the group writes to it, or it was restored from "
                        "a copy. Use a new store (another port or file)."
                    )
                generation = call.generation
                try:
                    roster = call.attend(deadline)
                    roster.raise_error(self._table.where)
                except (RendezvousError, AuthenticationError):
                    if hosts(self._store):
                        call.outlast_others()
                    raise
                if roster.has(record):
                    break
                # That group was complete when we signed in, after we had seen that it was forming. The next one is ours.
        finally:
            self._table.close()
        self.group_id, self._members = roster.group, list(roster.workers)
        return self.members()

    def members(self) -> list[WorkerRecord]:
        """Return all members, by id; none before `join`."""
        return list(self._members)


class DynamicGroup(Group):
    """A group that any worker may join and leave at any time. No worker waits for another, so there is no timeout."""

    def __init__(self, store: Store, seal: RecordSeal | None = None) -> None:
        super().__init__(store, seal)
        self._strange_lines = False  # the log says that there are some
        self._reading = threading.Lock()  # guards: the roster and its version, while they are brought up to date
        self._read = 0
        self._unwritten: set[int] = set()  # lines that were drawn and not yet written: their workers are slow, or dead
        self._present: dict[str, WorkerRecord] = {}  # by incarnation: joined, and not left
        self._early: set[str] = set()  # incarnations that left by a line that we read before the one by which they joined

    def __repr__(self) -> str:
        return f"<DynamicGroup {self.group_id[:8]} at {self._table.where}: {len(self._present)} workers>"

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Become a member."""
        self._table.agree_on_kind("dynamic")
        self._agree_on_secret(record)
        self.group_id = self._table.swap(_GROUP, secrets.token_hex(16))
        by_name, by_id = self._places(record)
        self._claim(by_name, record, f"name {record.name!r}")
        try:
            self._claim(by_id, record, f"id {record.id}")
        except RendezvousError:
            self._release(by_name, record)
            raise
        self._write({"joined": json.loads(record.to_json())})
        return self.members()

    def _agree_on_secret(self, record: WorkerRecord) -> None:
        """Raise if the first worker of the group had another secret. Its hint about the secret makes the error clear."""
        seal = self._table.seal
        mine = json.dumps([seal.fingerprint, seal.kind])
        held = self._table.swap_hint("dynamic/secret", mine)
        if held != mine:
            raise AuthenticationError(
                f"Worker {record} cannot join the group at {self._table.where}: the workers of this group do not have the "
                f"same secret. {seal.kind}: {record}; the group: {printable(held, 120)}. Give all of them the same one "
                "(REMORA_SECRET, REMORA_SECRET_FILE or the options), or none of them. If that group has ended, use another "
                "store (another port or file)."
            )

    def leave(self, record: WorkerRecord) -> None:
        """Cease to be a member, or remove one. Harmless if it has left already, or was removed."""
        listed = next((each for each in self.members() if each.incarnation == record.incarnation), None)
        if listed is not None:
            self._write({"left": record.incarnation})
            record = listed  # the worker that removes it may know only its id, and all of its record holds the keys
        for key in self._places(record):
            self._release(key, record)

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Return other workers that have the name or the id of this one, also if they are no longer members."""
        keys = [key for key in self._places(record) if self._table.has([key])]
        held = {text for text in self._table.take(keys) if text} if keys else set()
        found = [WorkerRecord.from_json(text) for text in sorted(held)]
        return [each for each in found if each.incarnation != record.incarnation]

    def members(self) -> list[WorkerRecord]:
        """Return the current members, by id. Reads only new lines: one operation when nothing happened."""
        with self._reading:
            if not self._knows_group():
                return []
            end = self._table.add(self._key("lines"), 0)
            if not 0 <= end - self._read <= _MOST_LINES or len(self._unwritten) > _MOST_UNWRITTEN:
                raise RendezvousError(
                    f"The count of lines in the store at {self._table.where} ({self._key('lines')!r}: {end}) is far from "
                    "what workers have written: a process outside the group changed it. Use a new store."
                )
            numbers = sorted(self._unwritten | set(range(self._read + 1, end + 1)))
            written = self._written(numbers)
            for line in self._table.take_proven([self._line_key(number) for number in written]):
                if line is not None:
                    self._apply(line)
                elif not self._strange_lines:
                    self._strange_lines = True
                    log.warning(
                        "the store at %s holds lines that no worker of this group wrote there; they are not used. A "
                        "process outside the group can write to it",
                        self._table.where,
                    )
            self._unwritten = set(numbers) - set(written)
            self._read = end
            if not self._unwritten:
                self._early.clear()  # they were said to leave twice: the line by which they joined is never behind
            return sorted(self._present.values(), key=lambda record: record.id)

    def _knows_group(self) -> bool:
        """Return True if there is a group. A worker that has not joined may read it, too."""
        if not self.group_id and self._table.has([_GROUP]):
            self.group_id = self._table.take([_GROUP])[0]
        return bool(self.group_id)

    def _written(self, numbers: list[int]) -> list[int]:
        if not numbers or self._table.has([self._line_key(number) for number in numbers]):
            return numbers
        return [number for number in numbers if self._table.has([self._line_key(number)])]

    def _apply(self, line: str) -> None:
        """Apply one line. Their order does not matter: an incarnation joins once and leaves once, and never comes back."""
        try:
            fields = json.loads(line)
            left = str(fields["left"]) if "left" in fields else None
            joined = WorkerRecord.from_fields(fields["joined"]) if left is None else None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RendezvousError(f"The store holds a line that no worker wrote: {line[:80]!r}.") from error
        if left is not None and self._present.pop(left, None) is None:
            self._early.add(left)
        if joined is not None and joined.incarnation in self._early:
            self._early.discard(joined.incarnation)
        elif joined is not None:
            self._present[joined.incarnation] = joined

    def _write(self, line: dict[str, object]) -> None:
        self._table.put(self._line_key(self._table.add(self._key("lines"), 1)), json.dumps(line, separators=(",", ":")))

    def _claim(self, key: str, record: WorkerRecord, what: str) -> None:
        mine = record.to_json().decode()
        if (held := self._table.swap(key, mine)) != mine:
            raise RendezvousError(
                f"Worker {what} is not unique in the group at {self._table.where}: worker "
                f"{WorkerRecord.from_json(held)} has it, and has neither left nor been declared dead."
            )

    def _release(self, key: str, record: WorkerRecord) -> None:
        self._table.swap(key, "", old=record.to_json().decode())

    def _key(self, last: str) -> str:
        return f"dynamic/{self.group_id}/{last}"

    def _line_key(self, number: int) -> str:
        return self._key(f"line/{number}")

    def _places(self, record: WorkerRecord) -> tuple[str, str]:
        """Return the keys that no two workers can have: of its name, and of its id."""
        return self._key(f"name/{record.name}"), self._key(f"id/{record.id}")
