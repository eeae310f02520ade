"""Observes all workers of one group: keeps a connection to each, asks all of them at once, and says of those that do not
answer why not. A dead or stuck worker is never an error.

One thread at a time uses a `GroupObserver`. It asks on threads of its own, which end with each question.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from remora.errors import AuthenticationError, NothingFound, ObserverError
from remora.observer import directory, meeting, stopped
from remora.observer.client import ObserverLink, Unanswered
from remora.observer.directory import WorkerEntry
from remora.observer.members import Known, Member, Members
from remora.observer.model import GroupSnapshot, Missing, Query, WorkerSnapshot
from remora.protocol.conversation import printable
from remora.protocol.observing import observer_key
from remora.rendezvous.secret import find_secret, loopback_secret

T = TypeVar("T")

NO_DOOR = "it cannot be observed: its observers are off (REMORA_OBSERVERS), or it talks only inside its process"
THREADS = 64  # at most, for one question
SEEDS = 4  # workers that are asked at once who else is there
NEWS = 1.0  # seconds for which what they said is good
CLOCK_NEWS = 10.0  # seconds for which the difference of two clocks is good
STACK_TIME = 0.3  # seconds, at the end of a question, for the stacks of a worker that does not answer
ADDRESS_TIME = 1.0  # seconds for one of several addresses of a worker


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A group with workers of this user on this host."""

    group: str
    workers: tuple[WorkerEntry, ...]


def groups() -> list[GroupEntry]:
    """Return the groups of this user on this host."""
    found: dict[str, list[WorkerEntry]] = {}
    for entry in directory.entries():
        found.setdefault(entry.group, []).append(entry)
    return [GroupEntry(group, tuple(workers)) for group, workers in found.items()]


class GroupObserver:
    """All workers of one group."""

    def __init__(self, group: str, key: bytes, members: Members) -> None:
        self.group = group
        self._key = key
        self._members = members
        self._heard_at = float("-inf")  # when a worker last said who is there
        self._links: dict[str, ObserverLink] = {}  # by incarnation; each is used by one thread at a time
        self._clocks: dict[str, tuple[float, float, float]] = {}  # by incarnation: measured when, offset, error

    @classmethod
    def find(
        cls,
        at: str | None = None,
        group: str | None = None,
        secret: str | bytes | None = None,
        secret_file: str | None = None,
        insecure: bool = False,
        timeout: float = 5.0,
    ) -> GroupObserver:
        """Find a group. `at` is None (this user's on this host), the address of a worker's observer socket, or the address
        of the group's store (`tcp://host:port`, `file:///path`), which needs torch. `group`: its id, or the beginning of it.

        NothingFound says what there is; AuthenticationError, that the secret is another one.
        """
        if at is None:
            return cls._of_this_host(group)
        given = find_secret(secret, secret_file)
        held = b"" if insecure and given is None else given.value if given is not None else loopback_secret()
        key = observer_key(held)
        if (link := meeting.worker_at(at, key, timeout)) is None:
            link = meeting.worker_of_store(at, held, key, timeout)
        who = link.identity
        if not who.group.startswith(group or ""):
            link.close()
            raise NothingFound("", f"{at} belongs to the group {who.group}, not to {printable(group or '')}")
        members = Members()
        members.add(Member(name=who.name, rank=who.id, incarnation=who.incarnation, addresses=(link.address,)))
        found = cls(who.group, key, members)
        found._links[who.incarnation] = link
        return found

    @classmethod
    def _of_this_host(cls, group: str | None) -> GroupObserver:
        there = groups()
        chosen = [each for each in there if each.group.startswith(group or "")]
        if not chosen:
            others = f"; there are: {', '.join(each.group[:8] for each in there)}" if there else ""
            wanted = f"no group {group!r}" if group else "no worker"
            raise NothingFound("", f"{wanted} of this user runs on this host (see {directory.folder()}){others}")
        if len(chosen) > 1:
            names = ", ".join(f"{each.group[:8]} ({each.workers[0].program or each.workers[0].name})" for each in chosen)
            raise NothingFound("", f"there are several groups on this host: {names}. Say which (--group)")
        members = Members()
        members.see(chosen[0].workers)
        return cls(chosen[0].group, bytes.fromhex(chosen[0].workers[0].key), members)

    def __repr__(self) -> str:
        return f"<GroupObserver of {self.group[:8]}: {len(self._members.present())} workers>"

    # Questions.

    def snapshot(self, query: Query = Query(), timeout: float = 2.0) -> GroupSnapshot:
        """Return the snapshots of all workers that answer in time, and for each other one why it has none."""
        now = time.time()

        def take(link: ObserverLink, left: float) -> WorkerSnapshot:
            found = link.snapshot(query, left)
            self._measure_clock(link)
            return found

        answers, missing = self._ask_each(take, timeout)
        clocks = {name: self._clocks.get(incarnation) for name, incarnation, _ in answers}
        return GroupSnapshot(
            group=self.group,
            time=now,
            workers=tuple(snapshot for _, _, snapshot in answers),
            missing=tuple(missing),
            clock_offsets={name: each[1] for name, each in clocks.items() if each is not None},
            clock_errors={name: each[2] for name, each in clocks.items() if each is not None},
        )

    def ask_all(self, question: str, timeout: float, **arguments: Any) -> dict[str, Any | ObserverError]:
        """Return the answer of each worker, by name; an ObserverError for one that gave none."""
        answers, missing = self._ask_each(lambda link, left: link.ask(question, timeout=left, **arguments), timeout)
        found: dict[str, Any | ObserverError] = {name: answer for name, _, answer in answers}
        return found | {each.name: ObserverError(each.name, each.reason) for each in missing if each.name not in found}

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def __enter__(self) -> GroupObserver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # How they are asked.

    def _ask_each(
        self, ask: Callable[[ObserverLink, float], T], timeout: float
    ) -> tuple[list[tuple[str, str, T]], list[Missing]]:
        """Ask every worker at once. (name, incarnation and answer of those that answered; the others)"""
        end = time.monotonic() + timeout
        self._look_around(end)
        answers: list[tuple[str, str, T]] = []
        missing = [_missing(known, known.member.state, known.member.reason) for known in self._members.gone()]
        present = self._members.present()

        def one(known: Known) -> tuple[str, str, T] | Missing:
            try:
                return known.member.name, known.member.incarnation, self._ask(known, ask, end - STACK_TIME)
            except AuthenticationError as error:
                return _missing(known, "refused", str(error))
            except Unanswered as error:
                state, reason, stacks = stopped.explain(known.entry, error.reason, end)
                return _missing(known, state, reason, stacks)
            except ObserverError as error:
                return _missing(known, "unreachable", error.reason)

        if present:
            with ThreadPoolExecutor(min(len(present), THREADS), thread_name_prefix="remora-observing") as pool:
                for outcome in pool.map(one, present):
                    if isinstance(outcome, Missing):
                        missing.append(outcome)
                    else:
                        answers.append(outcome)
        return answers, missing

    def _look_around(self, end: float) -> None:
        """Learn who is there: from the entries on this host, and from a few workers that answer."""
        with suppress(AuthenticationError):  # the directory is not safe: then others must tell
            self._members.see(entry for entry in directory.entries() if entry.group == self.group)
        seeds = self._members.present()[:SEEDS]
        now = time.monotonic()
        if not seeds or now - self._heard_at < NEWS:
            return
        until = min(now + (end - now) / 4, now + 1.0)

        def hear(known: Known) -> Any:
            with suppress(ObserverError, AuthenticationError):
                return self._ask(known, lambda link, left: link.ask("members", timeout=left), until)
            return None

        with ThreadPoolExecutor(len(seeds), thread_name_prefix="remora-observing") as pool:
            for told in pool.map(hear, seeds):
                if told is not None:
                    with suppress(ValueError):  # it makes no sense: another one's may
                        self._members.hear(told)
                        self._heard_at = now

    def _ask(self, known: Known, ask: Callable[[ObserverLink, float], T], end: float) -> T:
        """Ask one worker, on the connection that is there or on a new one."""
        incarnation = known.member.incarnation
        link = self._links.pop(incarnation, None)
        if link is not None and not link.closed:
            try:
                return self._asked(link, ask, end)
            except Unanswered:
                raise
            except ObserverError:
                if not link.closed:
                    raise  # it answered: the question failed
        return self._asked(self._connect(known, end), ask, end)

    def _asked(self, link: ObserverLink, ask: Callable[[ObserverLink, float], T], end: float) -> T:
        try:
            return ask(link, max(end - time.monotonic(), 0.01))
        finally:
            if not link.closed:
                self._links[link.identity.incarnation] = link

    def _connect(self, known: Known, end: float) -> ObserverLink:
        member = known.member
        addresses = member.addresses if known.entry is None else known.entry.addresses
        error = ObserverError(member.name, NO_DOOR)
        for n, address in enumerate(_within_reach(addresses, known.entry is not None)):
            left = max(end - time.monotonic(), 0.01)
            try:
                return ObserverLink(
                    address,
                    self._key,
                    group=self.group,
                    incarnation=member.incarnation,
                    timeout=left if n + 1 == len(addresses) else min(left, ADDRESS_TIME),
                    worker=member.name,
                )
            except Unanswered:
                raise  # it is there: its other addresses lead to the same thread
            except ObserverError as failure:
                error = failure
        raise error

    def _measure_clock(self, link: ObserverLink) -> None:
        now = time.monotonic()
        known = self._clocks.get(link.identity.incarnation)
        if known is None or now - known[0] > CLOCK_NEWS:
            with suppress(ObserverError):
                self._clocks[link.identity.incarnation] = (now, *link.clock_offset(timeout=1.0))


def _within_reach(addresses: tuple[str, ...], here: bool) -> list[str]:
    """Unix sockets first on this host; those of other hosts cannot be reached by them, and are tried last."""
    return sorted(addresses, key=lambda address: address.startswith("unix:") != here)


def _missing(known: Known, state: str, reason: str, stacks: str = "") -> Missing:
    member = known.member
    return Missing(
        name=member.name,
        rank=member.rank,
        state=state,
        reason=printable(reason, 500),
        pid=member.pid if known.entry is None else known.entry.pid,
        host=member.host,
        stacks=stacks,
    )
