"""Turns the notes of a worker's recorder into events and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from remora.names import joined
from remora.observer.model import CallKey, Event, EventKind, Histogram
from remora.recorder import MADE, Ended, Note, Raw, Recorder
from remora.wire.frames import FAILED

Happened = tuple[float, Raw | Note]  # when, by the wall clock, and what

_peer, _module, _name, _ended = (itemgetter(Ended._fields.index(each)) for each in ("peer", "module", "name", "ended"))


def happened(recorder: Recorder, now: float, since: float = 0.0) -> list[Happened]:
    """Return what happened after `since`, by the wall clock, oldest first. `now` is the time of the worker's clock, which
    may be a test's. These are thousands of tuples; an event is made only of those that an observer gets (`events`)."""
    wall = recorder.wall(now)
    found: list[Happened] = [(wall + _ended(each), each) for each in recorder.ends()]
    found += [(note.time, note) for note in recorder.notes()]
    return sorted((each for each in found if each[0] > since), key=lambda each: each[0])


def peer_of(entry: Happened) -> str | None:
    """Return the other worker that had part in it."""
    what = entry[1]
    peer: str | None = what.peer if isinstance(what, Note) else _peer(what)
    return peer


def function_of(entry: Happened) -> str | None:
    """Return the function that was called."""
    what = entry[1]
    return None if isinstance(what, Note) else joined(_module(what), _name(what))


def seldom_last(found: list[Happened], limit: int) -> list[Happened]:
    """Return them so that a limit, which cuts the first ones, spares what is seldom, up to half of it: a busy worker has
    thousands of calls a second, and a death between them is what the reader looks for."""
    if len(found) <= limit:
        return found
    notes = [each for each in found if isinstance(each[1], Note)]
    spared = notes[len(notes) - min(len(notes), max(limit, 0) // 2) :]
    known = set(map(id, spared))
    return [each for each in found if id(each) not in known] + spared


def events(entries: Iterable[Happened], me: str) -> tuple[Event, ...]:
    """Return them as events, oldest first."""
    return tuple(_event(each, me) for each in sorted(entries, key=lambda each: each[0]))


def _event(entry: Happened, me: str) -> Event:
    """Return it as an event. A call that is over is one event at each of its ends: `time` is when it ended, `seconds` how
    long it took."""
    time, what = entry
    if isinstance(what, Note):
        return Event(time=time, kind=EventKind(what.kind), peer=what.peer, text=what.text)
    return _of_call(Ended._make(what), me, time)


def _of_call(call: Ended, me: str, time: float) -> Event:
    failed = bool(call.flags & FAILED)
    made = call.end == MADE
    if made:
        kind = EventKind.CALL_FAILED if failed else EventKind.CALL_ENDED
    else:
        kind = EventKind.RUN_FAILED if failed else EventKind.RUN_ENDED
    return Event(
        time=time,
        kind=kind,
        peer=call.peer,
        call=CallKey(caller=me if made else call.peer, id=call.id),
        function=joined(call.module, call.name),
        seconds=max(call.ended - call.began, 0.0),
        queued=None if made else max(call.began - call.came, 0.0),
        bytes=None if made else call.bytes,
        thread=call.thread or None,
        parent=CallKey(caller=call.parent[1], id=call.parent[2]) if call.parent is not None and call.parent[1] else None,
        trace=call.parent[3] if call.parent is not None and len(call.parent) > 3 else None,
    )


def histograms(recorder: Recorder) -> Iterator[Histogram]:
    """Yield how long calls, their waits for a slot, and their functions took."""
    for (measure, module, name, peer), tally in recorder.tallies():
        yield Histogram(
            measure=measure,
            function=joined(module, name),
            peer=peer,
            count=tally.count,
            failed=tally.failed,
            total=tally.total,
            longest=tally.longest,
            buckets={k: n for k, n in enumerate(tally.buckets) if n},
        )
