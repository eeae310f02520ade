"""Groups of workers that find each other on a store: static ones, whose size is known, and dynamic ones.

A static group forms by a roll call (`remora.rendezvous.roll_call`). A dynamic one is a log on the board: each line,
under a number drawn atomically, says that a worker joined or left; names and ids are held by keys of their own, which
change hands atomically, so that no two workers have the same.

Nothing here authenticates anyone. The store is open to whoever can reach it, so a record is a hint where to dial, and
the handshake decides (`remora.protocol.handshake`).
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.rendezvous.board import Board
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.roll_call import RollCall


class Group(Protocol):
    """The workers that can call each other. `group_id` is drawn at random when the group forms; known after `join`."""

    group_id: str

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Become a member. Returns all members, this one included, by id."""

    def leave(self, record: WorkerRecord) -> None:
        """Cease to be a member."""

    def remove(self, record: WorkerRecord) -> None:
        """Strike off a member that died."""

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Others who have the name or the id of this one."""

    def members(self) -> list[WorkerRecord]:
        """Who is there now, by id."""

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """The member of that name or id."""


class StaticGroup:
    """A group of `world_size` workers with the ids from 0 on, who all have to come. A timeout of 0 means none.

    `has_ended` finds out whether one that came has died: all may have been started again while some were waiting.
    """

    def __init__(
        self, store: Store, world_size: int, timeout: float, has_ended: Callable[[WorkerRecord], bool] | None = None
    ) -> None:
        if world_size < 1:
            raise RendezvousError(f"A group has at least one worker, but world_size is {world_size}.")
        self.group_id = ""
        self._board = Board(store)
        self._size = world_size
        self._timeout = timeout
        self._has_ended = has_ended
        self._members: list[WorkerRecord] = []

    def __repr__(self) -> str:
        return f"<StaticGroup {self.group_id[:8]} at {self._board.where}: {len(self._members)} of {self._size} workers>"

    def join(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Wait until all are there. If they cannot form a group, this raises on every one of them."""
        if not 0 <= record.id < self._size:
            raise RendezvousError(f"Worker {record} cannot be one of {self._size}: the last rank is {self._size - 1}.")
        deadline = time.monotonic() + self._timeout if self._timeout else math.inf
        try:
            self._board.agree_on_kind("static")
            while True:
                roster = RollCall(self._board, self._size, record, self._has_ended).attend(deadline)
                if roster.error:
                    raise RendezvousError(f"{roster.error} The group at {self._board.where} was not formed.")
                if roster.has(record):
                    break
                # That group was complete when we signed in, after we had seen that it was forming. The next one is ours.
        finally:
            self._board.close()
        self.group_id, self._members = roster.group, list(roster.workers)
        return self.members()

    def leave(self, record: WorkerRecord) -> None:
        """Nothing to do: a static group ends as a whole, and the next one is another generation."""

    def remove(self, record: WorkerRecord) -> None:
        """Nothing to do: nobody takes the place of a dead member."""

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Who has them when the group forms is found out by all together."""
        return []

    def members(self) -> list[WorkerRecord]:
        """All members, by id; none before `join`."""
        return list(self._members)

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """The member of that name or id, if there is one."""
        return next((each for each in self._members if name_or_id in (each.name, each.id)), None)


class DynamicGroup:
    """A group that anyone may join and leave at any time. Nobody waits for anybody, so the timeout does not matter."""

    def __init__(self, store: Store, timeout: float) -> None:
        self.group_id = ""
        self._board = Board(store)
        self._reading = threading.Lock()  # guards what follows, while it is brought up to date
        self._read = 0
        self._unwritten: set[int] = set()  # lines that were drawn and not yet written: their workers are slow, or dead
        self._present: dict[str, WorkerRecord] = {}  # by incarnation: joined, and not left
        self._early: set[str] = set()  # incarnations that left by a line that we read before the one by which they joined

    def __repr__(self) -> str:
        return f"<DynamicGroup {self.group_id[:8]} at {self._board.where}: {len(self._present)} workers>"

    def join(self, record: WorkerRecord, dead: Collection[str] = ()) -> list[WorkerRecord]:
        """Become a member. A name or id that is held by an incarnation in `dead` is taken over."""
        self._board.agree_on_kind("dynamic")
        self.group_id = self._board.swap("dynamic/group", secrets.token_hex(16))
        self._claim(_name_key(record), record, f"name {record.name!r}", dead)
        try:
            self._claim(_id_key(record), record, f"id {record.id}", dead)
        except RendezvousError:
            self._release(_name_key(record), record)
            raise
        self._write({"joined": json.loads(record.to_json())})
        return self.members()

    def leave(self, record: WorkerRecord) -> None:
        """Cease to be a member. Harmless if it has left already, or was struck off."""
        listed = next((each for each in self.members() if each.incarnation == record.incarnation), None)
        if listed is not None:
            self._write({"left": record.incarnation})
            record = listed  # who strikes it off may know it by its call alone, and the keys are held by all that it said
        self._release(_name_key(record), record)
        self._release(_id_key(record), record)

    def remove(self, record: WorkerRecord) -> None:
        """Strike off a member that died. All who notice may do it: to say it twice does no harm."""
        self.leave(record)

    def holders(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Others who have the name or the id of this one; also such as are not on the list any more."""
        keys = [key for key in (_name_key(record), _id_key(record)) if self._board.has([key])]
        held = {text for text in self._board.take(keys) if text} if keys else set()
        found = [WorkerRecord.from_json(text) for text in sorted(held)]
        return [each for each in found if each.incarnation != record.incarnation]

    def members(self) -> list[WorkerRecord]:
        """Who is there now, by id. Reads only what was not read before: one operation when nothing happened."""
        with self._reading:
            end = self._board.add("dynamic/lines", 0)
            numbers = sorted(self._unwritten | set(range(self._read + 1, end + 1)))
            written = self._written(numbers)
            for line in self._board.take([_line_key(number) for number in written]):
                self._apply(line)
            self._unwritten = set(numbers) - set(written)
            self._read = end
            if not self._unwritten:
                self._early.clear()  # they were said to leave twice: the line by which they joined is never behind
            return sorted(self._present.values(), key=lambda record: record.id)

    def find(self, name_or_id: str | int) -> WorkerRecord | None:
        """The member of that name or id, if there is one now."""
        return next((each for each in self.members() if name_or_id in (each.name, each.id)), None)

    def _written(self, numbers: list[int]) -> list[int]:
        if not numbers or self._board.has([_line_key(number) for number in numbers]):
            return numbers
        return [number for number in numbers if self._board.has([_line_key(number)])]

    def _apply(self, line: str) -> None:
        """The order of lines does not matter: an incarnation joins once and leaves once, and never comes back."""
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
        self._board.put(_line_key(self._board.add("dynamic/lines", 1)), json.dumps(line, separators=(",", ":")))

    def _claim(self, key: str, record: WorkerRecord, what: str, dead: Collection[str]) -> None:
        mine = record.to_json().decode()
        while (held := self._board.swap(key, mine)) != mine:
            holder = WorkerRecord.from_json(held)
            if holder.incarnation not in dead:
                raise RendezvousError(
                    f"Worker {what} is not unique in the group at {self._board.where}: worker {holder} has it, and has "
                    "neither left nor been declared dead."
                )
            self.leave(holder)
            self._board.swap(key, "", old=held)

    def _release(self, key: str, record: WorkerRecord) -> None:
        self._board.swap(key, "", old=record.to_json().decode())


def _line_key(number: int) -> str:
    return f"dynamic/line/{number}"


def _name_key(record: WorkerRecord) -> str:
    return f"dynamic/name/{record.name}"


def _id_key(record: WorkerRecord) -> str:
    return f"dynamic/id/{record.id}"
