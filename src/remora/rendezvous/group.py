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
from collections.abc import Callable, Collection
from typing import Protocol

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


class Group(Protocol):
    """The workers that can call each other. `group_id` is drawn at random when the group forms; known after `join`."""

    group_id: str

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Become a member. Returns all members, this one included, by id."""

    def leave(self, record: WorkerRecord) -> None:
        """Cease to be a member."""

    def remove(self, record: WorkerRecord) -> None:
        """Remove a member that died."""

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Return other members that have the name or the id of this one."""

    def members(self) -> list[WorkerRecord]:
        """Return the current members, by id."""

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """Return the member of that name or id."""

    def publish(self, key: str, text: str) -> None:
        """Write something for processes outside of the group that know the secret. What the key had is lost."""


class StaticGroup:
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
        self.group_id = ""
        self._store = store
        self._table = StoreTable(store, seal)
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

    def leave(self, record: WorkerRecord) -> None:
        """Do nothing: a static group ends as a whole, and the next one is another generation."""

    def remove(self, record: WorkerRecord) -> None:
        """Do nothing: no worker replaces a dead member of a static group."""

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Return none: the workers find out together, when the group forms, if two have the same name or id."""
        return []

    def members(self) -> list[WorkerRecord]:
        """Return all members, by id; none before `join`."""
        return list(self._members)

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """Return the member of that name or id, if there is one."""
        return next((each for each in self._members if name_or_id in (each.name, each.id)), None)

    def publish(self, key: str, text: str) -> None:
        """Write something for processes outside of the group."""
        self._table.put(key, text)


class DynamicGroup:
    """A group that any worker may join and leave at any time. No worker waits for another, so there is no timeout."""

    def __init__(self, store: Store, timeout: float, seal: RecordSeal | None = None) -> None:
        self.group_id = ""
        self._table = StoreTable(store, seal)
        self._strange_lines = False  # the log says that there are some
        self._reading = threading.Lock()  # guards: the roster and its version, while they are brought up to date
        self._read = 0
        self._unwritten: set[int] = set()  # lines that were drawn and not yet written: their workers are slow, or dead
        self._present: dict[str, WorkerRecord] = {}  # by incarnation: joined, and not left
        self._early: set[str] = set()  # incarnations that left by a line that we read before the one by which they joined

    def __repr__(self) -> str:
        return f"<DynamicGroup {self.group_id[:8]} at {self._table.where}: {len(self._present)} workers>"

    def join(self, record: WorkerRecord, dead: Collection[str] = ()) -> list[WorkerRecord]:
        """Become a member. A name or id that is held by an incarnation in `dead` is taken over."""
        self._table.agree_on_kind("dynamic")
        self._agree_on_secret(record)
        self.group_id = self._table.swap(_GROUP, secrets.token_hex(16))
        self._claim(self._name_key(record), record, f"name {record.name!r}", dead)
        try:
            self._claim(self._id_key(record), record, f"id {record.id}", dead)
        except RendezvousError:
            self._release(self._name_key(record), record)
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
        """Cease to be a member. Harmless if the worker has left already, or was removed."""
        listed = next((each for each in self.members() if each.incarnation == record.incarnation), None)
        if listed is not None:
            self._write({"left": record.incarnation})
            record = listed  # the worker that removes it may know only its id, and all of its record holds the keys
        self._release(self._name_key(record), record)
        self._release(self._id_key(record), record)

    def remove(self, record: WorkerRecord) -> None:
        """Remove a member that died. All workers that notice may do it: a second time does no harm."""
        self.leave(record)

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Return other workers that have the name or the id of this one, also if they are no longer members."""
        keys = [key for key in (self._name_key(record), self._id_key(record)) if self._table.has([key])]
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

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """Return the member of that name or id, if there is one now."""
        return next((each for each in self.members() if name_or_id in (each.name, each.id)), None)

    def publish(self, key: str, text: str) -> None:
        """Write something for processes outside of the group."""
        self._table.put(key, text)

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
            if "left" in fields:
                self._take_out(str(fields["left"]))
            else:
                self._put_in(WorkerRecord.from_fields(fields["joined"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RendezvousError(f"The store holds a line that no worker wrote: {line[:80]!r}.") from error

    def _put_in(self, record: WorkerRecord) -> None:
        if record.incarnation in self._early:
            self._early.discard(record.incarnation)
        else:
            self._present[record.incarnation] = record

    def _take_out(self, incarnation: str) -> None:
        if self._present.pop(incarnation, None) is None:
            self._early.add(incarnation)

    def _write(self, line: dict[str, object]) -> None:
        self._table.put(self._line_key(self._table.add(self._key("lines"), 1)), json.dumps(line, separators=(",", ":")))

    def _claim(self, key: str, record: WorkerRecord, what: str, dead: Collection[str]) -> None:
        mine = record.to_json().decode()
        while (held := self._table.swap(key, mine)) != mine:
            holder = WorkerRecord.from_json(held)
            if holder.incarnation not in dead:
                raise RendezvousError(
                    f"Worker {what} is not unique in the group at {self._table.where}: worker {holder} has it, and has "
                    "neither left nor been declared dead."
                )
            self.leave(holder)
            self._table.swap(key, "", old=held)

    def _release(self, key: str, record: WorkerRecord) -> None:
        self._table.swap(key, "", old=record.to_json().decode())

    def _key(self, last: str) -> str:
        return f"dynamic/{self.group_id}/{last}"

    def _line_key(self, number: int) -> str:
        return self._key(f"line/{number}")

    def _name_key(self, record: WorkerRecord) -> str:
        return self._key(f"name/{record.name}")

    def _id_key(self, record: WorkerRecord) -> str:
        return self._key(f"id/{record.id}")
