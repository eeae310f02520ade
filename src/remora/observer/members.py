"""What an observer knows of the workers of a group before it asks them: where to ask, and what others say of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from remora.observer.directory import WorkerEntry
from remora.observer.snapshot_json import from_json

GONE = ("left", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker of a group, as another one describes it. `addresses` are those of its observer's sockets."""

    name: str
    rank: int
    incarnation: str
    state: str = "alive"  # or suspected, left, dead
    reason: str = ""
    host: str | None = None
    pid: int | None = None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """A member, and what it wrote down itself, if it is on this host."""

    member: Member
    entry: WorkerEntry | None = None


def of_entry(entry: WorkerEntry) -> Known:
    """A worker of this host."""
    member = Member(
        name=entry.name,
        rank=entry.rank,
        incarnation=entry.incarnation,
        host=entry.host,
        pid=entry.pid,
        addresses=entry.addresses,
    )
    return Known(member, entry)


class Members:
    """All workers of one group that an observer has heard of, by incarnation. What is said later counts."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}

    def see(self, entries: Iterable[WorkerEntry]) -> None:
        """These live on this host now. Those that did and are not among them have ended."""
        present = {entry.incarnation: entry for entry in entries}
        for incarnation, entry in present.items():
            before = self._known.get(incarnation)
            known = of_entry(entry)
            self._known[incarnation] = known if before is None else Known(replace(before.member, host=entry.host), entry)
        for incarnation, known in self._known.items():
            if known.entry is not None and incarnation not in present and known.member.state not in GONE:
                gone = f"its process (pid {known.entry.pid}) has ended, or it shut down"
                self._known[incarnation] = Known(replace(known.member, state="dead", reason=gone))

    def hear(self, told: object) -> None:
        """A worker says who is there. ValueError if that makes no sense."""
        if not isinstance(told, list):
            raise ValueError("not a list of workers")
        for each in told:
            member = from_json(Member, each)
            before = self._known.get(member.incarnation)
            if before is None:
                self._known[member.incarnation] = Known(member)
                continue
            if before.member.state in GONE and member.state not in GONE:
                continue  # the one that says so has not noticed yet
            merged = replace(
                member,
                addresses=member.addresses or before.member.addresses,
                host=before.member.host if before.entry is not None else member.host,
            )
            self._known[member.incarnation] = replace(before, member=merged)

    def add(self, member: Member) -> None:
        """Know one more."""
        self._known.setdefault(member.incarnation, Known(member))

    def present(self) -> list[Known]:
        """Those that can be asked, by rank."""
        return self._sorted(known for known in self._known.values() if known.member.state not in GONE)

    def gone(self) -> list[Known]:
        """Those that left or died."""
        return self._sorted(known for known in self._known.values() if known.member.state in GONE)

    @staticmethod
    def _sorted(some: Iterable[Known]) -> list[Known]:
        return sorted(some, key=lambda known: (known.member.rank, known.member.name))
