"""Makes a trace of a group: begins it on all workers, ends it there, and puts what they say on one timeline."""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol, TypeVar

from remora.errors import ObserverError
from remora.observer.model import GroupSnapshot, Query
from remora.observer.timeline import Recording
from remora.observer.trace import chrome_trace
from remora.observer.trace_rows import Rows, notes, operators

T = TypeVar("T")

ANSWER_TIME = 10.0  # seconds that workers have to begin a trace, or to hand it over
QUERY = Query(parts=("calls", "threads"), limit=100_000)


class Group(Protocol):
    """The part of a `GroupObserver` that a trace needs."""

    def snapshot(self, query: Query = ..., timeout: float = ...) -> GroupSnapshot: ...

    def ask_all(self, question: str, timeout: float, **arguments: Any) -> dict[str, Any | ObserverError]: ...


class GroupTrace:
    """One trace. It has begun when it is made; it ends by itself after `longest` seconds."""

    def __init__(self, group: Group, longest: float, torch: bool = False) -> None:
        self._group = group
        self._id = secrets.token_hex(8)
        self._longest = longest
        self.problems: dict[str, str] = {}  # by worker: what its part of the trace lacks, and why
        # Workers begin and end one after the other; the timeline has the time in which all of them recorded.
        answers = group.ask_all("trace", ANSWER_TIME, id=self._id, seconds=longest + 2 * ANSWER_TIME, torch=torch)
        self.begin = time.time()
        self._note(answers)

    def end(self) -> dict[str, Any]:
        """End it. Return the timeline, as Chrome trace JSON."""
        end = min(time.time(), self.begin + self._longest)
        # The snapshot first: a call that ends between the two questions is in the rows then, which count for more.
        snapshot = self._group.snapshot(QUERY, ANSWER_TIME)
        answers = self._group.ask_all("traced", ANSWER_TIME, id=self._id)
        self._note(answers)
        for missing in snapshot.missing:
            if missing.state != "left":
                self.problems[missing.name] = missing.reason or missing.state
        recordings = []
        for worker in snapshot.workers:
            offset = snapshot.clock_offsets.get(worker.name, 0.0)
            recording = Recording.of(worker, offset)
            try:
                recordings.append(_with_answer(recording, answers.get(worker.name)))
            except ValueError as error:
                self.problems[worker.name] = str(error)
        note = "; ".join(f"{name}: {problem}" for name, problem in sorted(self.problems.items()))
        return chrome_trace(recordings, self.begin, end, note)

    def _note(self, answers: dict[str, Any | ObserverError]) -> None:
        for name, answer in answers.items():
            if isinstance(answer, ObserverError):
                self.problems[name] = str(answer)
            elif isinstance(answer, dict) and answer.get("note"):
                self.problems[name] = str(answer["note"])


def _with_answer(recording: Recording, answer: Any) -> Recording:
    """Return the recording in a snapshot, with what the worker recorded. ValueError if that makes no sense."""
    if answer is None or isinstance(answer, ObserverError):
        raise ValueError("it has no trace" if answer is None else str(answer))
    answer = answer if isinstance(answer, dict) else {}
    rows = Rows.from_json(answer.get("rows"))
    threads = _by_number(answer.get("threads"), str)
    return Recording(
        name=recording.name,
        rank=recording.rank,
        events=[*rows.events(recording.name), *notes(answer.get("notes"))],
        calls=recording.calls,
        time=recording.time,
        threads={**threads, **recording.threads},
        operators=operators(answer.get("operators"), threads, _by_number(answer.get("native"), int)),
        lost=rows.lost,
        offset=recording.offset,
        program=recording.program,
    )


def _by_number(data: Any, kind: type[T]) -> dict[int, T]:
    """Read names, or numbers, of threads by their number."""
    if not isinstance(data, dict) or not all(key.isdecimal() and type(item) is kind for key, item in data.items()):
        raise ValueError("the threads of a trace are not what they should be")
    return {int(key): item for key, item in data.items()}
