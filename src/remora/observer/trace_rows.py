"""The ends of calls in a trace, as they travel to the observer: rows of numbers, and each text once.

A busy worker ends fifty thousand calls a second. As objects of the model they would fill a hundred times the room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from remora.names import joined
from remora.observer.model import CallKey, Event, EventKind
from remora.observer.timeline import Operator
from remora.recorder import MADE, Raw

FIELDS = 11  # of a row

_KINDS = {
    (True, False): EventKind.CALL_ENDED,
    (True, True): EventKind.CALL_FAILED,
    (False, False): EventKind.RUN_ENDED,
    (False, True): EventKind.RUN_FAILED,
}


@dataclass
class Rows:
    """Each row: 1 at the caller and 0 at the callee; peer, id, function, when it ended and how long it took in
    nanoseconds, thread, 1 if it failed, bytes, and the caller and the number of the call that was served meanwhile, or -1.
    Peers and functions are places in `texts`."""

    texts: list[str] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    lost: int = 0

    @classmethod
    def of(cls, ends: Iterable[Raw], failed: int, ahead: float) -> Rows:
        """`failed` is the flag of a reply that is an error, `ahead` is the wall clock minus the recorder's clock."""
        found = cls()
        places: dict[str, int] = {}

        def place(text: str) -> int:
            at = places.get(text)
            if at is None:
                at = places[text] = len(found.texts)
                found.texts.append(text)
            return at

        for end, peer, id, module, name, _, began, ended, thread, flags, size, parent in ends:
            function = joined(module, name)
            above = (place(parent[1]), parent[2]) if parent is not None and parent[1] else (-1, -1)
            found.rows.append([
                int(end == MADE), place(peer), id, place(function), round((ended + ahead) * 1e9),
                max(round((ended - began) * 1e9), 0), thread, int(bool(flags & failed)), size, *above,
            ])  # fmt: skip
        return found

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {"texts": self.texts, "rows": self.rows, "lost": self.lost}

    @classmethod
    def from_json(cls, data: Any) -> Rows:
        """Read what `to_json` made; ValueError if it is anything else."""
        if not isinstance(data, dict):
            raise ValueError("the rows of a trace are no object")
        texts, rows, lost = data.get("texts"), data.get("rows"), data.get("lost")
        if not (isinstance(texts, list) and all(type(each) is str for each in texts) and type(lost) is int):
            raise ValueError("the rows of a trace have no texts")
        if not (isinstance(rows, list) and all(_is_row(row, len(texts)) for row in rows)):
            raise ValueError("a row of a trace is not what it should be")
        return cls(texts, rows, lost)

    def events(self, worker: str) -> list[Event]:
        """The ends as events of the model. Numbers of nanoseconds lose less than half a microsecond."""
        return [_event(row, self.texts, worker) for row in self.rows]


def _is_row(row: Any, texts: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == FIELDS
        and all(type(each) is int and abs(each) < 1 << 64 for each in row)
        and all(0 <= row[n] < texts for n in (1, 3))
        and -1 <= row[9] < texts
    )


def _event(row: list[int], texts: list[str], worker: str) -> Event:
    made, peer, id, function, ended, length, thread, failed, size, above, parent = row
    return Event(
        time=ended / 1e9,
        kind=_KINDS[bool(made), bool(failed)],
        peer=texts[peer],
        call=CallKey(caller=worker if made else texts[peer], id=id),
        function=texts[function],
        seconds=length / 1e9,
        bytes=size or None,
        thread=thread,
        parent=None if above < 0 else CallKey(caller=texts[above], id=parent),
    )


def notes(data: Any) -> list[Event]:
    """Read what else the recorder noted: a time, a kind, a peer or none, and a text. ValueError if it is anything else."""
    found = []
    for row in data if isinstance(data, list) else [None]:
        if not (isinstance(row, list) and len(row) == 4 and type(row[0]) is float and type(row[3]) is str):
            raise ValueError("a note of a trace is not what it should be")
        if not (row[2] is None or type(row[2]) is str):
            raise ValueError("a note of a trace is about no worker")
        found.append(Event(time=row[0], kind=EventKind(row[1]), peer=row[2], text=row[3]))
    return found


def operators(data: Any, threads: Mapping[int, str], native: Mapping[int, int]) -> list[Operator]:
    """Read what `remora.introspection.operators` made; ValueError if it is anything else. `threads` are names by number,
    `native` are numbers by those that the system has."""
    found = []
    for row in data if isinstance(data, list) else [None]:
        if not (isinstance(row, list) and len(row) == 5 and all(type(each) is str for each in row[:3])):
            raise ValueError("an operator of a trace is not what it should be")
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in row[3:]):
            raise ValueError("an operator of a trace has no time")
        name, category, track, start, length = row
        kind, _, number = track.partition(" ")
        thread = native.get(int(number)) if kind == "cpu" and number.isdecimal() and number.isascii() else None
        if kind == "cpu":
            track = f"{threads.get(thread or -1, 'thread')} ({number})"
        found.append(
            Operator(name=name, category=category, track=track, start=start / 1e9, seconds=length / 1e9, thread=thread)
        )
    return found
