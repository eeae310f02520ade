"""Writes the timeline of a group as Chrome trace JSON, which Perfetto opens.

A worker is a process of the timeline and a thread is a track. A function that runs, and a call that a thread waits for, is
a complete slice. Calls of one thread that overlap, and coroutines, are asynchronous slices. An arrow leads from each call to
the function that it runs, and one leads back. All times are whole nanoseconds until the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remora.observer.timeline import (
    NANO,
    NO_THREAD,
    OF_CALLS,
    OPEN,
    Lane,
    Operator,
    Recording,
    Span,
    Window,
    both_ends,
    is_sane,
    is_sane_operator,
    lay_out,
)

Entry = dict[str, Any]  # one object of the list `traceEvents`

NOTED = 2000  # nanoseconds: a slice that was moved by less is not worth a word
TORCH_TRACKS = 1 << 20  # the tracks of operators have numbers from here on


def chrome_trace(
    recordings: Iterable[Recording], begin: float | None = None, end: float | None = None, note: str = ""
) -> dict[str, Any]:
    """The timeline of the workers from `begin` to `end` (seconds of the observer's wall clock; None: of what there is)."""
    timeline = lay_out(recordings, begin, end)
    lanes, clocks, window = timeline.lanes, timeline.clocks, timeline.window
    entries = [entry for lane in lanes for entry in _lane_entries(lane, clocks, window)]
    entries += _arrows(lanes)
    entries.sort(key=_order)
    for entry in entries:
        for name in ("ts", "dur"):
            if name in entry:
                entry[name] /= 1000
    lost = {lane.recording.name: lane.recording.lost for lane in lanes if lane.recording.lost}
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "remora trace",
            "begin": window.begin,
            "seconds": window.length / NANO,
            "clock corrections": {lane.recording.name: clocks[lane.recording.name] for lane in lanes},
            **({"events lost": lost} if lost else {}),
            **({"note": note} if note else {}),
        },
    }


def write_trace(path: str, trace: Mapping[str, Any]) -> None:
    """Write the JSON: the file appears when it is complete."""
    draft = f"{path}.{os.getpid()}.part"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise


def plain(text: str, limit: int = 200) -> str:
    """A name from a worker without control characters, and of a bounded length."""
    shown = "".join(each if each.isprintable() else "?" for each in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


# What is written.


def _lane_entries(lane: Lane, clocks: Mapping[str, float], window: Window) -> Iterator[Entry]:
    recording = lane.recording
    title = plain(recording.name) + (f" ({plain(recording.program, 60)})" if recording.program else "")
    yield _named(lane.pid, NO_THREAD, "process_name", name=title)
    yield _named(lane.pid, NO_THREAD, "process_sort_index", sort_index=lane.pid)
    tracks: dict[int, list[Span]] = {}
    served = set(map(id, lane.runs.values()))
    for span in (*lane.calls.values(), *lane.runs.values()):
        tracks.setdefault(span.thread, []).append(span)
    numbers = {thread: n for n, thread in enumerate(sorted(tracks), start=1)}
    for thread, spans in tracks.items():
        name = recording.threads.get(thread) or (f"thread {thread}" if thread else "calls that no thread waits for")
        yield _named(lane.pid, numbers[thread], "thread_name", name=plain(name))
        yield _named(lane.pid, numbers[thread], "thread_sort_index", sort_index=2 * numbers[thread])
        _nest(spans, served)
        for span in spans:
            span.thread = numbers[thread]
            yield from _slices(lane.pid, span, id(span) in served)
    shift = clocks[recording.name]
    yield from _instants(lane, shift, window)
    yield from _operator_entries(lane, shift, window, numbers)


def _nest(spans: list[Span], served: set[int]) -> None:
    """Decide which spans of a track are complete slices: those that lie within each other. Of calls that overlap in any way
    no thread waits, for it can wait for one at a time."""
    latest: Span | None = None
    spans.sort(key=lambda each: (each.begin_ns, -each.end_ns, id(each) not in served, each.key.caller, each.key.id))
    for span in spans:
        span.nests = True
    for span in (each for each in spans if id(each) not in served):
        if latest is not None and span.begin_ns < latest.end_ns:
            span.nests = latest.nests = False
        if latest is None or span.end_ns > latest.end_ns:
            latest = span
    around: list[Span] = []
    for span in spans:
        if span.nests:
            while around and around[-1].end_ns <= span.begin_ns:
                around.pop()
            span.nests = not around or span.end_ns <= around[-1].end_ns
            if span.nests:
                around.append(span)


def _slices(pid: int, span: Span, runs: bool) -> Iterator[Entry]:
    category = "run" if runs else "call"
    name = plain(span.function)
    told: dict[str, Any] = {"call": plain(str(span.key))}
    told |= {"from" if runs else "to": plain(span.peer)} if span.peer else {}
    told |= {"parent": plain(str(span.parent))} if span.parent is not None else {}
    told |= {"bytes": span.bytes} if span.bytes is not None else {}
    told |= {"end": span.mark} if span.mark else {}
    told |= {"began": "before this timeline"} if span.cut else {}
    told |= {"moved": f"{span.moved / 1000:g} us, to lie within its caller's"} if abs(span.moved) > NOTED else {}
    place = {"cat": category, "pid": pid, "tid": span.thread}
    length = span.end_ns - span.begin_ns
    if span.nests:
        yield {"ph": "X", "name": name, "ts": span.begin_ns, "dur": length, "args": told, **place}
        return
    number = f"{category} {pid} {plain(str(span.key))}"
    yield {"ph": "b", "name": name, "id": number, "ts": span.begin_ns, "args": told, **place}
    yield {"ph": "e", "name": name, "id": number, "ts": span.end_ns, **place}
    # Arrows end at complete slices of a track only.
    yield _marker(pid, span, span.begin_ns, f"{category} {name}")


def _marker(pid: int, span: Span, at: int, name: str) -> Entry:
    """A complete slice of a nanosecond: it lies within any other one of its track, or beside it."""
    return {"ph": "X", "cat": "end of an arrow", "name": name, "pid": pid, "tid": span.thread, "ts": at, "dur": 1}


def _arrows(lanes: Sequence[Lane]) -> Iterator[Entry]:
    """From each call to its function, and back from those that were answered."""
    for number, (lane, run, home, call) in enumerate(both_ends(lanes)):
        yield _arrow_end("s", "call", 2 * number, home.pid, call.thread, call.begin_ns)
        yield _arrow_end("f", "call", 2 * number, lane.pid, run.thread, run.begin_ns)
        if OPEN not in (call.mark, run.mark) and run.end_ns <= call.end_ns:
            name = f"answer {plain(run.function)}"
            yield _marker(lane.pid, run, run.end_ns - 1, name)
            yield _marker(home.pid, call, call.end_ns - 1, name)
            yield _arrow_end("s", "answer", 2 * number + 1, lane.pid, run.thread, run.end_ns - 1)
            yield _arrow_end("f", "answer", 2 * number + 1, home.pid, call.thread, call.end_ns - 1)


def _arrow_end(kind: str, name: str, number: int, pid: int, tid: int, at: int) -> Entry:
    end = {"ph": kind, "cat": "arrow", "name": name, "id": number, "pid": pid, "tid": tid, "ts": at}
    return end if kind == "s" else {**end, "bp": "e"}


def _instants(lane: Lane, shift: float, window: Window) -> Iterator[Entry]:
    """Yield the events that took no time: a worker died, a link broke, a fault was injected."""
    for event in lane.recording.events:
        if event.kind not in OF_CALLS and is_sane(event.time):
            at = event.time - shift
            if window.begin <= at <= window.begin + window.length / NANO:
                name = " ".join(filter(None, (str(event.kind), event.peer)))
                told = {"text": plain(event.text, 500)} if event.text else {}
                yield {
                    "ph": "i", "s": "p", "cat": "event", "name": plain(name), "pid": lane.pid, "tid": NO_THREAD,
                    "ts": min(window.place(at), window.length - 1), "args": told,
                }  # fmt: skip


def _operator_entries(lane: Lane, shift: float, window: Window, numbers: Mapping[int, int]) -> Iterator[Entry]:
    """The operators of torch, on tracks of their own, each below that of its thread: their clock is not exactly that of the
    events. `numbers` are those of the tracks of threads."""
    tracks: dict[str, list[tuple[int, int, Operator]]] = {}
    for each in lane.recording.operators:
        start = each.start - shift
        if is_sane_operator(each) and window.begin <= start < window.begin + window.length / NANO:
            begin = min(window.place(start), window.length - 1)
            finish = max(window.place(start + each.seconds), begin + 1)
            tracks.setdefault(each.track, []).append((begin, finish, each))
    for tid, (track, operators) in enumerate(sorted(tracks.items()), start=TORCH_TRACKS):
        above = numbers.get(operators[0][2].thread or -1)
        yield _named(lane.pid, tid, "thread_name", name=f"torch: {plain(track)}")
        yield _named(lane.pid, tid, "thread_sort_index", sort_index=tid if above is None else 2 * above + 1)
        around: list[int] = []  # the ends of the operators around this one
        for begin, finish, each in sorted(operators, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin:
                around.pop()
            kept = min([finish, *around[-1:]])  # of its clock, too, the last digits are not exact
            around.append(kept)
            yield {
                "ph": "X", "cat": plain(each.category), "name": plain(each.name), "pid": lane.pid, "tid": tid,
                "ts": begin, "dur": kept - begin,
            }  # fmt: skip


def _named(pid: int, tid: int, kind: str, **told: object) -> Entry:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": told}


_KINDS = {"M": 0, "e": 1, "X": 2, "b": 3, "i": 3, "s": 4, "f": 5}


def _order(entry: Entry) -> tuple[int, int, int]:
    """Readers take slices as they come: one that lies within another one comes after it, and an arrow after its slice."""
    kind = entry["ph"]
    return (-1 if kind == "M" else entry["ts"]), _KINDS[kind], -entry.get("dur", 0)
