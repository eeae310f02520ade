"""The questions that a worker answers to observers. All of them only look: there is none that changes anything."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from remora.agent.peers.peer import Peer
from remora.introspection import snapshot, threads
from remora.introspection.subject import Subject
from remora.introspection.tracing import Traces
from remora.introspection.visitors import NEVER
from remora.observer.members import Member
from remora.observer.model import Query
from remora.observer.snapshot_json import from_json, to_json
from remora.wire.frames import FAILED

Answer = Callable[[Subject, dict[str, Any]], Any]

OBSERVERS = "observers"  # under this name a worker's record has the addresses of its observer's sockets


class Questions:
    """The questions that one worker answers, by name."""

    def __init__(self) -> None:
        self.subject: Subject | None = None  # known when the worker is complete; no observer is let in before
        self._answers: dict[str, Answer] = {
            "snapshot": _snapshot,
            "clock": lambda subject, arguments: time.time(),
            "members": lambda subject, arguments: [to_json(each) for each in members(subject)],
            "stacks": lambda subject, arguments: stacks(subject),
            "trace": self._trace,
            "traced": lambda subject, arguments: self._traces_of(subject).end(str(arguments.get("id"))),
        }
        self._traces: Traces | None = None

    def answer(self, question: str, arguments: dict[str, Any]) -> Any:
        """Return the answer, in JSON; or a `Later`. ValueError if there is no such question, or it makes no sense."""
        subject, answer = self.subject, self._answers.get(question)
        if answer is None or subject is None:
            raise ValueError(f"there is no question {question[:40]!r}; there are {', '.join(sorted(self._answers))}")
        return answer(subject, arguments)

    def remove_expired(self) -> float:
        """Remove what observers left behind, if it is time. Return when something will be due."""
        return NEVER if self._traces is None else self._traces.drop_expired()

    def close(self) -> None:
        """The worker ends."""
        if self._traces is not None:
            self._traces.close()

    def _trace(self, subject: Subject, arguments: dict[str, Any]) -> Any:
        seconds, id = arguments.get("seconds"), str(arguments.get("id"))
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise ValueError("a trace takes a number of seconds")
        return self._traces_of(subject).begin(id, seconds, arguments.get("torch") is True)

    def _traces_of(self, subject: Subject) -> Traces:
        if self._traces is None:
            self._traces = Traces(subject.name, subject.agent.recorder, FAILED, subject.agent.clock.now)
        return self._traces


def _snapshot(subject: Subject, arguments: dict[str, Any]) -> Any:
    query = from_json(Query, arguments.get("query", {}))
    if math.isnan(query.older_than) or math.isnan(query.since):
        raise ValueError("a time is a number")
    return to_json(snapshot.take(subject, query))


def members(subject: Subject) -> Iterator[Member]:
    """Yield every worker that this one knows, itself included, and where it can be observed."""
    for peer in subject.agent.peers.all():
        yield _member(peer)


def _member(peer: Peer) -> Member:
    record = peer.record
    told = record.extra.get(OBSERVERS)
    addresses = tuple(each for each in told if isinstance(each, str)) if isinstance(told, list) else ()
    host = record.extra.get("host")
    return Member(
        name=peer.name,
        rank=peer.id,
        incarnation=peer.key.incarnation,
        state=peer.condition,
        reason=peer.reason or peer.suspicion,
        host=host if isinstance(host, str) else None,
        pid=peer.pid,
        addresses=addresses,
    )


def stacks(subject: Subject) -> list[Any]:
    """Return the threads of the worker and where they are, in JSON."""
    everybody = threads.look(subject.name)
    serving = {each.id: threads.key_of(request) for each in everybody if (request := each.request) is not None}
    return [to_json(each) for each in threads.statuses(everybody, serving)]
