"""Forms one group of known size: every worker signs in, and the last to come publishes the roster that all wait for.

The keys are below `static/<fingerprint of the secret>/<size>/`, so that groups of different secrets or sizes do not mix:

    generation        which group is forming now: 0, then 1 when that one is complete, and so on
    <g>/<id>          the record of the worker that took this id; emptied if it gives up, or is found dead
    <g>/gone/<id>     the worker that gave up, as opposed to a worker that never came
    <g>/arrived       how many have signed in, workers that died before the group was complete included
    <g>/state         changes whenever a worker gives up or is found dead; `closed` once the roster has been decided on
    <g>/roster        the outcome for all: the members and the group's id, or why there is none

Beside these, `static/last` names the worker that came last, its kind of secret and its size, for workers that wait in vain,
and `static/waiting` counts those that wait, of all sizes and secrets. Both are hints, which any process may have written.

The generation is read from the store and not counted by a process, so workers with different histories agree on it.
A roster is decided on by changing `state` from what it was *before* the records were gathered, so no worker that gave up
meanwhile is in it. The generation moves on before the roster is shown, so a worker that has seen it finds the next one.
Each worker takes a fixed number of steps, and polls for the roster. Only the last one reads all records, in one operation
where the store can, and checks that none of those workers has died while it waited: all may have been restarted since.
If the last one is too slow, or ends on the way, a worker whose time is over and that finds all of them there decides in its
place; only one decision takes effect.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from remora.errors import AuthenticationError, RendezvousError
from remora.long_wait import LongWait, listed
from remora.protocol.conversation import printable
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.store_table import StoreTable
from remora.vocabulary.ids import MAX_WORKER_ID

_GRACE = 2.0  # seconds for a roster that has been decided on to be shown, and seen
_PAUSE = 0.02  # seconds
_LOOKING = 3.0  # seconds to find out which of the workers that came have died
_MAX_SHOWN = 16
_MAX_ERROR = 4096  # characters
_LAST = "static/last"
_WAITING = "static/waiting"
_LOOK_AROUND = 0.5  # seconds between two looks at what keeps the others from coming
_OF_TORCH = "rpc_prefix_0/0/{}"  # what torch.distributed.rpc writes for a rank, in its first group of a process
_CLOSED = "closed"


@dataclass(frozen=True)
class Roster:
    """The outcome of a generation: its members by id, or the reason of its failure."""

    group: str = ""
    workers: tuple[WorkerRecord, ...] = ()
    error: str = ""
    secrets_differ: bool = False  # that is the error

    def raise_error(self, where: str) -> None:
        """Raise an error with the reason, if there is no group."""
        if self.error:
            kind = AuthenticationError if self.secrets_differ else RendezvousError
            raise kind(f"{self.error} The group at {where} was not formed.")

    def has(self, record: WorkerRecord) -> bool:
        return any(each.incarnation == record.incarnation for each in self.workers)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Roster:
        try:
            fields = json.loads(text)
            workers = tuple(WorkerRecord.from_fields(each) for each in fields["workers"])
            error = printable(str(fields["error"]), _MAX_ERROR)
            return cls(str(fields["group"]), workers, error, fields["secrets_differ"] is True)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RendezvousError(f"The store holds a value that is not a roster: {text[:80]!r}.") from error


@dataclass(frozen=True)
class _Comer:
    """A worker that came to the store, by its own hint; printable."""

    worker: str
    size: int
    fingerprint: str
    kind: str


class StaticJoin:
    """One worker's part in the forming of one group."""

    def __init__(
        self, table: StoreTable, size: int, record: WorkerRecord, has_ended: Callable[[WorkerRecord], bool] | None = None
    ) -> None:
        self._table = table
        self._size = size
        self._record = record
        self._has_ended = has_ended
        self._mine = record.to_json().decode()
        self._started = time.monotonic()
        self._base = f"static/{table.seal.fingerprint}/{size}"
        self.generation = int(table.swap(f"{self._base}/generation", "0"))

    def attend(self, deadline: float) -> Roster:
        """Sign in and wait for the roster. If it does not come in time, withdraw, and raise an error that names the
        missing."""
        self._table.add(_WAITING, 1)
        try:
            return self._wait_for_roster(deadline)
        finally:
            with suppress(RendezvousError):  # the store is gone: the outcome says so
                self._table.add(_WAITING, -1)

    def outlast_others(self) -> None:
        """Wait until no worker waits any more, for a moment at most: the store ends with this process, which has failed, and
        the others are about to learn why."""
        end = time.monotonic() + _GRACE
        with suppress(RendezvousError):
            while self._table.add(_WAITING, 0) > 0 and time.monotonic() < end:
                time.sleep(_PAUSE)

    def _wait_for_roster(self, deadline: float) -> Roster:
        self._sign_in()
        self._say_who_came()
        if self._table.add(self._key("arrived"), 1) >= self._size:
            self._close()
        report = LongWait(self._still_waiting)
        look_again = self._started + _LOOK_AROUND

        def look() -> None:
            nonlocal look_again
            if time.monotonic() >= look_again:
                look_again = time.monotonic() + _LOOK_AROUND
                self._look_around()
                report.look()

        try:
            complete = self._table.wait(self._key("roster"), deadline, look)
        except KeyboardInterrupt:
            self._withdraw()
            raise
        if not complete:
            self._give_up()
        return Roster.from_json(self._table.take([self._key("roster")])[0])

    def _sign_in(self) -> None:
        key = self._key(self._record.id)
        held = self._table.swap(key, self._mine)
        if held != self._mine and self._clear_place_of_the_dead(WorkerRecord.from_json(held)):
            held = self._table.swap(key, self._mine)
        if held != self._mine:
            self._table.put(self._key("conflict"), self._mine)

    def _clear_place_of_the_dead(self, record: WorkerRecord) -> bool:
        """Return True if a worker that has signed in is dead. Its place is free then, and it is in no roster."""
        if self._has_ended is None or not self._has_ended(record):
            return False
        self._table.swap(self._key(record.id), "", old=record.to_json().decode())
        self._reopen()
        return True

    # A worker that waits for long looks for what keeps the others from coming.

    def _look_around(self) -> None:
        if self._table.has([self._key("roster")]):
            return  # it was formed meanwhile: what is at the store now may be of another group
        last = _last_to_come(self._table)
        if last.fingerprint != self._table.seal.fingerprint:
            self._fail_for_secrets(last)
        elif last.size != self._size:
            text = (
                f"Worker {last.worker} came with world_size={last.size}, worker {self._record} with "
                f"world_size={self._size}. Start all workers of a group with the same world_size."
            )
            for each in (self, StaticJoin(self._table, last.size, self._record)):  # the workers that wait for either
                each._close(lambda: Roster(error=text))
        if self._table.has_foreign(_OF_TORCH.format(self._record.id)):
            return  # we used it ourselves before: what the others wrote is from then
        foreign = [number for number in self._absent()[:_MAX_SHOWN] if self._table.has_foreign(_OF_TORCH.format(number))]
        if foreign:
            self._close(
                lambda: Roster(
                    error=f"Rank {foreign[0]} came with torch.distributed.rpc, worker {self._record} with remora.rpc: they "
                    "cannot talk. Import remora.rpc on every rank, or set REMORA_COMPAT=1 (see docs/migrating.md)."
                )
            )

    def _say_who_came(self) -> None:
        seal = self._table.seal
        self._table.put_hint(_LAST, json.dumps([str(self._record), self._size, seal.fingerprint, seal.kind]))

    def _fail_for_secrets(self, last: _Comer) -> None:
        """Fail because a worker with another secret came to the same store. That worker gets the same error."""
        mine = self._table.seal.kind
        text = (
            f"The workers of this group do not have the same secret. {mine}: {self._record}; {last.kind}: {last.worker}. "
            "Give all of them the same one (REMORA_SECRET, REMORA_SECRET_FILE or the options), or none of them."
        )
        self._say_who_came()
        self._close(lambda: Roster(error=text, secrets_differ=True))

    def _absent(self) -> list[int]:
        places = enumerate(self._places())
        return [number for number, key in places if not (self._table.has([key]) and self._table.take([key])[0])]

    def _still_waiting(self) -> str:
        absent = self._absent()
        numbers = listed(list(map(str, absent)), _MAX_SHOWN)
        ranks = f"rank{'s' if len(absent) > 1 else ''} {numbers}" if absent else "the last to come"
        hint = self._silent_host(absent).rstrip(".")
        return f"init_rpc: still waiting for {ranks} of {self._size} at {self._table.where}{hint}"

    # The last to come decides on the roster.

    def _close(self, decide: Callable[[], Roster | None] | None = None) -> None:
        mark = f"{_CLOSED} by {self._record.incarnation}"
        state = self._table.swap(self._key("state"), "open")
        while not state.startswith(_CLOSED):
            roster = (decide or self._gather)()
            if roster is None:
                return  # a worker gave up: its replacement will be the last to come
            if (now := self._table.swap(self._key("state"), mark, old=state)) == mark:
                self._move_on()
                self._table.put(self._key("roster"), roster.to_json())
            state = now

    def _gather(self) -> Roster | None:
        if not self._table.has(self._places()):
            return self._conflict()
        texts = self._table.take(self._places())
        if not all(texts):
            return None
        workers = tuple(WorkerRecord.from_json(text) for text in texts)
        if self._some_have_died(workers):
            return None  # a replacement will be the last to come
        return Roster(secrets.token_hex(16), workers, _duplicate_name(workers))

    def _some_have_died(self, workers: Iterable[WorkerRecord]) -> bool:
        """Return True if some of the workers are dead. The check has a time limit: the network may not answer for many of
        them, and the others wait meanwhile."""
        enough = time.monotonic() + _LOOKING
        others = [each for each in workers if each.incarnation != self._record.incarnation]
        dead = [each for each in others if time.monotonic() < enough and self._clear_place_of_the_dead(each)]
        return bool(dead)

    def _conflict(self) -> Roster | None:
        """Return the error if two workers want the same id: as many came as there are ids, and one is free."""
        if not self._table.has([self._key("conflict")]):
            return None
        second = WorkerRecord.from_json(self._table.take([self._key("conflict")])[0])
        first = self._table.take([self._key(second.id)])[0]
        holder = str(WorkerRecord.from_json(first)) if first else "another"
        text = f"Worker id {second.id} is not unique: workers {holder} and {second} both have it."
        return Roster(error=f"{text} (If it was restarted while the others were waiting, start all of them again.)")

    def _move_on(self) -> None:
        self._table.swap(f"{self._base}/generation", str(self.generation + 1), old=str(self.generation))

    # A worker that waited in vain leaves the place to another.

    def _give_up(self) -> None:
        """Withdraw, and raise an error that names the missing. If none is missing, the last to come is slow, or ended on the
        way: then this worker decides on the roster in its place, and returns."""
        if self._table.has(self._places()):
            self._close()
            if self._table.has([self._key("roster")]):
                return
        reason = self._who_is_missing()
        if self._withdraw():
            raise RendezvousError(reason)
        if not self._table.wait(self._key("roster"), time.monotonic() + _GRACE):
            self._move_on()  # the last to come died on the way: no worker should wait for this roster again
            raise RendezvousError(f"{reason} All workers came, but the last one ended before the group was formed.")

    def _withdraw(self) -> bool:
        """Withdraw; return False if the roster has been decided on, with this worker in it."""
        self._table.put(self._key(f"gone/{self._record.id}"), str(self._record))
        self._table.swap(self._key(self._record.id), "", old=self._mine)
        if not self._reopen():
            return False
        self._table.add(self._key("arrived"), -1)
        return True

    def _reopen(self) -> bool:
        """Prevent a roster of the records as they were, since a worker has gone. Return False if it has been decided on."""
        state = self._table.swap(self._key("state"), "open")
        while not state.startswith(_CLOSED):
            mark = f"open, without {secrets.token_hex(8)}"
            if (state := self._table.swap(self._key("state"), mark, old=state)) == mark:
                return True
        return False

    def _who_is_missing(self) -> str:
        present = [WorkerRecord.from_json(text) for text in self._there(range(self._size)) if text]
        absent = sorted(set(range(self._size)) - {each.id for each in present})
        gone = [number for number in absent if self._table.has([self._key(f"gone/{number}")])]
        leavers = [printable(text) for text in self._there(f"gone/{number}" for number in gone)]
        missing = [number for number in absent if number not in gone]
        last = _last_to_come(self._table)
        texts = [
            f"Worker {self._record} waited {time.monotonic() - self._started:.1f} s at {self._table.where} "
            f"for a group of {self._size} workers.",
            f"Missing: {listed([f'rank {number}' for number in missing], _MAX_SHOWN) or 'none'}.",
            f"Present: {listed(list(map(str, present)), _MAX_SHOWN)}.",
            f"Given up: {listed(leavers, _MAX_SHOWN)}." if gone else "",
            self._silent_host(missing).removeprefix(". "),
            "" if last.size == self._size else f"(Worker {last.worker} came with world_size={last.size}.)",
            "Start the missing workers with the same init_method and world_size, or allow more time.",
        ]
        return " ".join(filter(None, texts))

    def _silent_host(self, absent: list[int]) -> str:
        """Return a hint if rank 0 is missing and hosts the store, which then listens. A rank 0 that came with
        torch.distributed.rpc waits in torch's rendezvous before it writes anything; a rank 0 that forms a process group
        first may look the same."""
        if 0 not in absent or not self._table.where.startswith("tcp://"):
            return ""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return ""
        return (
            ". Rank 0 hosts this store and has not called init_rpc of remora.rpc: if it uses torch.distributed.rpc, import "
            "remora.rpc there, too, or set REMORA_COMPAT=1 (see docs/migrating.md)."
        )

    def _there(self, names: Iterable[str | int]) -> list[str]:
        return self._table.take([key for name in names if self._table.has([key := self._key(name)])])

    def _places(self) -> list[str]:
        """Return the keys of all records, by id."""
        return [self._key(number) for number in range(self._size)]

    def _key(self, last: str | int) -> str:
        return f"{self._base}/{self.generation}/{last}"


def _last_to_come(table: StoreTable) -> _Comer:
    """Return the worker that signed in last. It may have another secret, and any process may have written the hint."""
    hint = table.hint(_LAST)
    try:
        worker, size, fingerprint, kind = json.loads(hint)
        if type(size) is int and 0 < size <= MAX_WORKER_ID + 1:
            return _Comer(printable(str(worker)), size, str(fingerprint), printable(str(kind)))
    except (ValueError, TypeError, RecursionError):
        pass
    raise RendezvousError(
        f"The value of {_LAST!r} in the store at {table.where} was not written by a worker of this version of remora: "
        f"{hint[:80]!r}. Use a store that other programs cannot write to."
    )


def _duplicate_name(workers: tuple[WorkerRecord, ...]) -> str:
    name, count = Counter(each.name for each in workers).most_common(1)[0]
    if count == 1:
        return ""
    ranks = listed([str(each.id) for each in workers if each.name == name], _MAX_SHOWN)
    return f"Worker name {name!r} is not unique: the workers with ranks {ranks} all have it."
