"""Places what the workers say on one clock: the two ends of each call as spans, each function within its call.

Times are nanoseconds since the beginning of the timeline: no rounding can make two spans overlap. `observer.clocks` corrects
the clocks. What the workers say is not trusted: whatever the events are, the result is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from remora.observer.clocks import Pair, corrections
from remora.observer.model import CallKey, CallStatus, Event, EventKind, Stage, WorkerSnapshot

NANO = 1_000_000_000
LONGEST = 10**6 * NANO  # no timeline is longer than eleven days; what says so is nonsense
FAILED, OPEN = "failed", "still running"
CALL_ENDS = {EventKind.CALL_ENDED: "", EventKind.CALL_FAILED: FAILED}
RUN_ENDS = {EventKind.RUN_ENDED: "", EventKind.RUN_FAILED: FAILED}
OF_CALLS = {EventKind.CALL_STARTED, EventKind.RUN_STARTED, *CALL_ENDS, *RUN_ENDS}
NO_THREAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, kernel or range of torch.profiler. Times are seconds of the worker's wall clock."""

    name: str
    category: str
    track: str  # the name of the thread, or the device and the stream
    start: float
    seconds: float
    thread: int | None = None  # its number (`Recording.threads`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record of one worker during a timeline."""

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
        """Return the recording in a snapshot."""
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
class Span:
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
class Lane:
    """A worker of the timeline."""

    recording: Recording
    pid: int
    calls: dict[CallKey, Span] = field(default_factory=dict)
    runs: dict[CallKey, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    begin: float  # seconds of the observer's wall clock
    length: int  # nanoseconds

    def place(self, seconds: float) -> int:
        """Return the place of a moment in it."""
        return max(0, min(self.length, round((min(seconds, self.begin + 1e7) - self.begin) * NANO)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The workers, the correction of each clock by the name of the worker, and the window."""

    lanes: list[Lane]
    clocks: dict[str, float]
    window: Window


def lay_out(recordings: Iterable[Recording], begin: float | None = None, end: float | None = None) -> Timeline:
    """Place what happened from `begin` to `end` (seconds of the observer's wall clock; None: all that there is)."""
    lanes = [
        Lane(each, pid, *_spans(each))
        for pid, each in enumerate(sorted(recordings, key=lambda each: (each.rank, each.name)), start=1)
    ]
    clocks = _clocks(lanes)
    window = _window(lanes, clocks, begin, end)
    for lane in lanes:
        _to_timeline(lane, clocks[lane.recording.name], window)
    _contain(lanes)
    return Timeline(lanes, clocks, window)


# From events to the two ends of each call.


def _spans(recording: Recording) -> tuple[dict[CallKey, Span], dict[CallKey, Span]]:
    """The calls that a worker made, and those that it served. An end without a beginning has its `seconds`; a beginning
    without an end is open."""
    calls: dict[CallKey, Span] = {}
    runs: dict[CallKey, Span] = {}
    for event in recording.events:
        key = event.call
        if key is None or event.kind not in OF_CALLS or not is_sane(event.time):
            continue
        mine = event.kind in CALL_ENDS or event.kind is EventKind.CALL_STARTED
        if mine and key.caller != recording.name:
            continue  # no worker makes the calls of another one
        spans = calls if mine else runs
        ends = CALL_ENDS if mine else RUN_ENDS
        if event.kind in ends:
            began = spans.get(key)
            if event.seconds is not None and is_sane(event.seconds):
                start = event.time - event.seconds
            else:
                start = event.time if began is None else began.start
            spans[key] = _span(event, min(start, event.time), event.time, ends[event.kind])
        elif key not in spans:
            spans[key] = _span(event, event.time, float("inf"), OPEN)
    for status in recording.calls:
        _add_open(recording, status, calls, runs)
    return calls, runs


def _span(event: Event, start: float, end: float, mark: str) -> Span:
    assert event.call is not None
    return Span(
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
    recording: Recording, status: CallStatus, calls: dict[CallKey, Span], runs: dict[CallKey, Span]
) -> None:
    """A call that was under way when the snapshot was taken."""
    mine = status.stage in (Stage.UNSENT, Stage.SENT, Stage.BEGUN)
    spans = calls if mine else runs
    if status.stage is Stage.QUEUED or status.key in spans or (mine and status.key.caller != recording.name):
        return
    if not (is_sane(status.age) and is_sane(recording.time)):
        return
    spans[status.key] = Span(
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


def is_sane(seconds: float | None) -> bool:
    """Return True if a time is a number, not negative, and not beyond all calendars."""
    return seconds is not None and 0.0 <= seconds < 1e11


def is_sane_operator(each: Operator) -> bool:
    return is_sane(each.start) and is_sane(each.seconds)


# One clock.


def _clocks(lanes: Sequence[Lane]) -> dict[str, float]:
    """By worker: what to subtract from its times. No function begins before its call, or ends after it."""
    pairs = []
    for lane, run, home, call in both_ends(lanes):
        if home is not lane:
            both = call.ended_well and run.mark != OPEN
            slack = call.end - run.end if both else float("inf")
            pairs.append(Pair(run.key.caller, lane.recording.name, call.start - run.start, slack))
    return corrections({lane.recording.name: lane.recording.offset for lane in lanes}, pairs)


def both_ends(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, Span, Lane, Span]]:
    """The calls of which both ends are known: the callee and its run, the caller and its call."""
    homes = {lane.recording.name: lane for lane in lanes}
    for lane in lanes:
        for key, run in lane.runs.items():
            home = homes.get(key.caller)
            call = None if home is None else home.calls.get(key)
            if home is not None and call is not None:
                yield lane, run, home, call


def _window(lanes: Sequence[Lane], clocks: Mapping[str, float], begin: float | None, end: float | None) -> Window:
    times: list[float] = []
    for lane in lanes:
        shift = clocks[lane.recording.name]
        for span in (*lane.calls.values(), *lane.runs.values()):
            times += [each - shift for each in (span.start, span.end) if each != float("inf")]
        times += [each.time - shift for each in lane.recording.events if is_sane(each.time)]
        operators = filter(is_sane_operator, lane.recording.operators)
        times += [each - shift for one in operators for each in (one.start, one.start + one.seconds)]
        times += [lane.recording.time - shift] if lane.recording.calls and is_sane(lane.recording.time) else []
    first = begin if begin is not None else min(times, default=0.0)
    last = end if end is not None else max(times, default=first)
    return Window(first, max(1, min(LONGEST, round((last - first) * NANO))))


def _to_timeline(lane: Lane, shift: float, window: Window) -> None:
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


def _contain(lanes: Sequence[Lane]) -> None:
    """Have each function run within its call, where the clocks still say otherwise: they drift, and may be set. A function
    whose caller gave up may run on."""
    for _, run, _, call in both_ends(lanes):
        last = max(call.end_ns, run.end_ns) if call.mark == FAILED else call.end_ns
        length = min(run.end_ns - run.begin_ns, last - call.begin_ns)
        begin = max(call.begin_ns, min(run.begin_ns, last - length))
        run.moved = begin - run.begin_ns
        run.begin_ns, run.end_ns = begin, begin + length
