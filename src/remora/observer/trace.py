"""Makes a timeline of a group: the events of all workers on one clock, as Chrome trace JSON, which Perfetto opens.

A worker is a process of the timeline and a thread is a track. A function that runs, and a call that a thread waits for, is
a complete slice. Calls of one thread that overlap, and coroutines, are asynchronous slices. An arrow leads from each call to
the function that it runs, and one leads back.

Times are nanoseconds since the beginning of the timeline until they are written: no rounding can make two slices overlap.
`observer.clocks` corrects the clocks. What the workers say is not trusted: whatever the events are, the result is valid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remora.observer.clocks import Pair, corrections
from remora.observer.model import CallKey, CallStatus, Event, EventKind, Stage, WorkerSnapshot

Entry = dict[str, Any]  # one object of the list `traceEvents`

NANO = 1_000_000_000
LONGEST = 10**6 * NANO  # no timeline is longer than eleven days; what says so is nonsense
FAILED, OPEN = "failed", "still running"
NOTED = 2000  # nanoseconds: a slice that was moved by less is not worth a word
CALL_ENDS = {EventKind.CALL_ENDED: "", EventKind.CALL_FAILED: FAILED}
RUN_ENDS = {EventKind.RUN_ENDED: "", EventKind.RUN_FAILED: FAILED}
OF_CALLS = {EventKind.CALL_STARTED, EventKind.RUN_STARTED, *CALL_ENDS, *RUN_ENDS}
NO_THREAD = 0
TORCH_TRACKS = 1 << 20  # the tracks of operators have numbers from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What torch.profiler says of one operator, kernel or range. Times are seconds of the worker's wall clock."""

    name: str
    category: str
    track: str  # the name of the thread, or the device and the stream
    start: float
    seconds: float
    thread: int | None = None  # its number (`Recording.threads`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one worker did during a timeline."""

    name: str
    rank: int
    events: Sequence[Event] = ()
    calls: Sequence[CallStatus] = ()  # under way at the end
    time: float = 0.0  # of its wall clock, when `calls` was taken
    threads: Mapping[int, str] = field(default_factory=dict)  # by their number: names
    operators: Sequence[Operator] = ()
    lost: int = 0  # events that the worker had forgotten before they could be read
    offset: float = 0.0  # its wall clock minus the observer's, as round trips say
    program: str = ""

    @classmethod
    def of(cls, snapshot: WorkerSnapshot, offset: float = 0.0) -> Recording:
        """What a snapshot tells."""
        return cls(
            name=snapshot.name,
            rank=snapshot.rank,
            events=snapshot.events,
            calls=snapshot.calls,
            time=snapshot.time,
            threads={each.id: each.name for each in snapshot.threads},
            lost=snapshot.left_out.get("events", 0),
            offset=offset,
            program=snapshot.program,
        )


@dataclass(slots=True)
class _Span:
    """One end of a call: the caller's wait for it, or the callee's run of it. Times in seconds of the worker's wall clock,
    then in nanoseconds of the timeline."""

    key: CallKey
    function: str
    thread: int
    start: float
    end: float
    peer: str = ""
    parent: CallKey | None = None
    mark: str = ""  # FAILED or OPEN; empty: it ended well
    bytes: int | None = None
    cut: bool = False  # it began before the timeline
    moved: int = 0  # nanoseconds by which it was moved to lie within its caller's
    begin_ns: int = 0
    end_ns: int = 0
    nests: bool = False  # it is a complete slice of its track

    @property
    def ended_well(self) -> bool:
        return not self.mark


@dataclass(slots=True)
class _Lane:
    """A worker of the timeline."""

    recording: Recording
    pid: int
    calls: dict[CallKey, _Span] = field(default_factory=dict)
    runs: dict[CallKey, _Span] = field(default_factory=dict)


def chrome_trace(
    recordings: Iterable[Recording], begin: float | None = None, end: float | None = None, note: str = ""
) -> dict[str, Any]:
    """The timeline of the workers from `begin` to `end` (seconds of the observer's wall clock; None: of what there is)."""
    lanes = [
        _Lane(each, pid, *_spans(each))
        for pid, each in enumerate(sorted(recordings, key=lambda each: (each.rank, each.name)), start=1)
    ]
    clocks = _clocks(lanes)
    window = _window(lanes, clocks, begin, end)
    for lane in lanes:
        _to_timeline(lane, clocks[lane.recording.name], window)
    _contain(lanes)
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


# From events to the two ends of each call.


def _spans(recording: Recording) -> tuple[dict[CallKey, _Span], dict[CallKey, _Span]]:
    """The calls that a worker made, and those that it served. An end without a beginning has its `seconds`; a beginning
    without an end is open."""
    calls: dict[CallKey, _Span] = {}
    runs: dict[CallKey, _Span] = {}
    for event in recording.events:
        key = event.call
        if key is None or event.kind not in OF_CALLS or not _sane(event.time):
            continue
        mine = event.kind in CALL_ENDS or event.kind is EventKind.CALL_STARTED
        if mine and key.caller != recording.name:
            continue  # no worker makes the calls of another one
        spans = calls if mine else runs
        ends = CALL_ENDS if mine else RUN_ENDS
        if event.kind in ends:
            began = spans.get(key)
            if event.seconds is not None and _sane(event.seconds):
                start = event.time - event.seconds
            else:
                start = event.time if began is None else began.start
            spans[key] = _span(event, min(start, event.time), event.time, ends[event.kind])
        elif key not in spans:
            spans[key] = _span(event, event.time, float("inf"), OPEN)
    for status in recording.calls:
        _add_open(recording, status, calls, runs)
    return calls, runs


def _span(event: Event, start: float, end: float, mark: str) -> _Span:
    assert event.call is not None
    return _Span(
        key=event.call,
        function=event.function or "?",
        thread=event.thread or NO_THREAD,
        start=start,
        end=end,
        peer=event.peer or "",
        parent=event.parent,
        mark=mark,
        bytes=event.bytes,
    )


def _add_open(
    recording: Recording, status: CallStatus, calls: dict[CallKey, _Span], runs: dict[CallKey, _Span]
) -> None:
    """A call that was under way when the snapshot was taken."""
    mine = status.stage in (Stage.UNSENT, Stage.SENT, Stage.BEGUN)
    spans = calls if mine else runs
    if status.stage is Stage.QUEUED or status.key in spans or (mine and status.key.caller != recording.name):
        return
    if not (_sane(status.age) and _sane(recording.time)):
        return
    spans[status.key] = _Span(
        key=status.key,
        function=status.function or "?",
        thread=status.thread or NO_THREAD,
        start=recording.time - status.age,
        end=float("inf"),
        peer=status.callee if mine else status.key.caller,
        parent=status.parent,
        mark=OPEN,
        bytes=status.bytes or None,
    )


def _sane(seconds: float | None) -> bool:
    """Whether a time can be calculated with: a number, not negative, and not beyond all calendars."""
    return seconds is not None and 0.0 <= seconds < 1e11


def _sane_operator(each: Operator) -> bool:
    return _sane(each.start) and _sane(each.seconds)


# One clock.


@dataclass(frozen=True, slots=True)
class _Window:
    begin: float  # seconds of the observer's wall clock
    length: int  # nanoseconds

    def place(self, seconds: float) -> int:
        """Where a moment lies in it."""
        return max(0, min(self.length, round((min(seconds, self.begin + 1e7) - self.begin) * NANO)))


def _clocks(lanes: Sequence[_Lane]) -> dict[str, float]:
    """By worker: what to subtract from its times. No function begins before its call, or ends after it."""
    pairs = []
    for lane, run, home, call in _both_ends(lanes):
        if home is not lane:
            both = call.ended_well and run.mark != OPEN
            slack = call.end - run.end if both else float("inf")
            pairs.append(Pair(run.key.caller, lane.recording.name, call.start - run.start, slack))
    return corrections({lane.recording.name: lane.recording.offset for lane in lanes}, pairs)


def _both_ends(lanes: Sequence[_Lane]) -> Iterator[tuple[_Lane, _Span, _Lane, _Span]]:
    """The calls of which both ends are known: the callee and its run, the caller and its call."""
    homes = {lane.recording.name: lane for lane in lanes}
    for lane in lanes:
        for key, run in lane.runs.items():
            home = homes.get(key.caller)
            call = None if home is None else home.calls.get(key)
            if home is not None and call is not None:
                yield lane, run, home, call


def _window(lanes: Sequence[_Lane], clocks: Mapping[str, float], begin: float | None, end: float | None) -> _Window:
    times: list[float] = []
    for lane in lanes:
        shift = clocks[lane.recording.name]
        for span in (*lane.calls.values(), *lane.runs.values()):
            times += [each - shift for each in (span.start, span.end) if each != float("inf")]
        times += [each.time - shift for each in lane.recording.events if _sane(each.time)]
        operators = filter(_sane_operator, lane.recording.operators)
        times += [each - shift for one in operators for each in (one.start, one.start + one.seconds)]
        times += [lane.recording.time - shift] if lane.recording.calls and _sane(lane.recording.time) else []
    first = begin if begin is not None else min(times, default=0.0)
    last = end if end is not None else max(times, default=first)
    return _Window(first, max(1, min(LONGEST, round((last - first) * NANO))))


def _to_timeline(lane: _Lane, shift: float, window: _Window) -> None:
    """Place the spans in the window. What lies outside it altogether goes."""
    for spans in (lane.calls, lane.runs):
        for key, span in list(spans.items()):
            start, end = span.start - shift, span.end - shift
            if end < window.begin or start > window.begin + window.length / NANO:
                del spans[key]
                continue
            span.cut = start < window.begin
            if end != float("inf") and end > window.begin + window.length / NANO:
                span.mark = OPEN
            span.begin_ns = min(window.place(start), window.length - 1)
            span.end_ns = max(window.place(end), span.begin_ns + 1)


def _contain(lanes: Sequence[_Lane]) -> None:
    """Have each function run within its call, where the clocks still say otherwise: they drift, and may be set. A function
    whose caller gave up may run on."""
    for _, run, _, call in _both_ends(lanes):
        last = max(call.end_ns, run.end_ns) if call.mark == FAILED else call.end_ns
        length = min(run.end_ns - run.begin_ns, last - call.begin_ns)
        begin = max(call.begin_ns, min(run.begin_ns, last - length))
        run.moved = begin - run.begin_ns
        run.begin_ns, run.end_ns = begin, begin + length


# What is written.


def _lane_entries(lane: _Lane, clocks: Mapping[str, float], window: _Window) -> Iterator[Entry]:
    recording = lane.recording
    title = plain(recording.name) + (f" ({plain(recording.program, 60)})" if recording.program else "")
    yield _named(lane.pid, NO_THREAD, "process_name", name=title)
    yield _named(lane.pid, NO_THREAD, "process_sort_index", sort_index=lane.pid)
    tracks: dict[int, list[_Span]] = {}
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


def _nest(spans: list[_Span], served: set[int]) -> None:
    """Decide which spans of a track are complete slices: those that lie within each other. Of calls that overlap in any way
    no thread waits, for it can wait for one at a time."""
    latest: _Span | None = None
    spans.sort(key=lambda each: (each.begin_ns, -each.end_ns, id(each) not in served, each.key.caller, each.key.id))
    for span in spans:
        span.nests = True
    for span in (each for each in spans if id(each) not in served):
        if latest is not None and span.begin_ns < latest.end_ns:
            span.nests = latest.nests = False
        if latest is None or span.end_ns > latest.end_ns:
            latest = span
    around: list[_Span] = []
    for span in spans:
        if span.nests:
            while around and around[-1].end_ns <= span.begin_ns:
                around.pop()
            span.nests = not around or span.end_ns <= around[-1].end_ns
            if span.nests:
                around.append(span)


def _slices(pid: int, span: _Span, runs: bool) -> Iterator[Entry]:
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


def _marker(pid: int, span: _Span, at: int, name: str) -> Entry:
    """A complete slice of a nanosecond: it lies within any other one of its track, or beside it."""
    return {"ph": "X", "cat": "end of an arrow", "name": name, "pid": pid, "tid": span.thread, "ts": at, "dur": 1}


def _arrows(lanes: Sequence[_Lane]) -> Iterator[Entry]:
    """From each call to its function, and back from those that were answered."""
    for number, (lane, run, home, call) in enumerate(_both_ends(lanes)):
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


def _instants(lane: _Lane, shift: float, window: _Window) -> Iterator[Entry]:
    """What happened at a moment: a worker died, a link broke, a fault was injected."""
    for event in lane.recording.events:
        if event.kind not in OF_CALLS and _sane(event.time):
            at = event.time - shift
            if window.begin <= at <= window.begin + window.length / NANO:
                name = " ".join(filter(None, (str(event.kind), event.peer)))
                told = {"text": plain(event.text, 500)} if event.text else {}
                yield {
                    "ph": "i", "s": "p", "cat": "event", "name": plain(name), "pid": lane.pid, "tid": NO_THREAD,
                    "ts": min(window.place(at), window.length - 1), "args": told,
                }  # fmt: skip


def _operator_entries(lane: _Lane, shift: float, window: _Window, numbers: Mapping[int, int]) -> Iterator[Entry]:
    """The operators of torch, on tracks of their own, each below that of its thread: their clock is not exactly that of the
    events. `numbers` are those of the tracks of threads."""
    tracks: dict[str, list[tuple[int, int, Operator]]] = {}
    for each in lane.recording.operators:
        start = each.start - shift
        if _sane_operator(each) and window.begin <= start < window.begin + window.length / NANO:
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
