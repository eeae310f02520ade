"""Turns the notes of a worker's recorder into events and histograms."""

from __future__ import annotations

from collections.abc import Iterator

from remora.names import joined
from remora.observer.model import CallKey, Event, EventKind, Histogram
from remora.recorder import MADE, Ended, Recorder
from remora.wire.frames import FAILED


def events(recorder: Recorder, me: str, now: float, since: float = 0.0) -> Iterator[Event]:
    """Yield what happened after `since`, by the wall clock. `now` is the time of the worker's clock, which may be a test's.

    A call that is over is one event at each of its ends: `time` is when it ended, `seconds` how long it took.
    """
    wall = recorder.wall(now)
    for each in recorder.calls():
        if wall + each.ended > since:
            yield _of_call(each, me, wall)
    for note in recorder.notes():
        if note.time > since:
            yield Event(time=note.time, kind=EventKind(note.kind), peer=note.peer, text=note.text)


def _of_call(call: Ended, me: str, wall: float) -> Event:
    failed = bool(call.flags & FAILED)
    made = call.end == MADE
    if made:
        kind = EventKind.CALL_FAILED if failed else EventKind.CALL_ENDED
    else:
        kind = EventKind.RUN_FAILED if failed else EventKind.RUN_ENDED
    return Event(
        time=wall + call.ended,
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
