"""The snapshot: what a worker, and a group of workers, says of itself to an observer. Pure data, its JSON form, its version.

One `WorkerSnapshot` is taken by one worker at one moment. A `GroupSnapshot` holds those that came within the deadline, and
says of every other worker why it has none. Values of arguments are never in it: only names, counts, sizes and times.

All ages and durations are seconds. `time` is the worker's wall clock (seconds since 1970), which may differ between hosts;
`GroupSnapshot.clock_offsets` says by how much. A call has one name in the whole group: the caller's name and its number
there (`CallKey`), so the two ends of a call can be matched.

Its JSON form is in `remora.observer.snapshot_json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from remora.errors import RemoraError

VERSION = 1


class UnknownVersion(RemoraError):
    """A snapshot was written by a version of Remora whose snapshots this one cannot read."""


class Stage(StrEnum):
    """The progress of a call. The first three are seen by its caller, the others by its callee."""

    UNSENT = "unsent"  # it waits at the caller: for a link, or for room on it
    SENT = "sent"
    BEGUN = "begun"  # sent, and the callee has said that the function runs
    QUEUED = "queued"  # it waits at the callee for a slot of the pool
    RUNNING = "running"
    ANSWERING = "answering"  # the function has ended; its answer waits to be sent


class WaitKind(StrEnum):
    """The kinds of things that a thread, a coroutine or a worker waits for."""

    CALL = "call"  # the answer to a call
    REFERENCE = "reference"  # a value that is being made
    BACKWARD = "backward"  # a backward pass
    GATHERING = "gathering"  # an all_gather or a barrier: some have not come
    SHUTDOWN = "shutdown"
    LINK = "link"  # room on a link that is full
    POOL = "pool"  # a slot in the pool
    LOCK = "lock"  # a lock of the program that another thread of this worker holds
    JOIN = "join"  # the group to form
    LOOP = "event loop"  # the event loop, which another coroutine blocks
    THREAD = "thread"  # another thread of this worker, or what it runs
    FUTURE = "future"  # something else that this worker does


class EventKind(StrEnum):
    """The kinds of notes of the recorder. Events of calls have `call` and `function`, all others say more in `text`.

    A call is noted when it ends, once at each of its ends: its beginning is `time - seconds`. (Those under way are in
    `WorkerSnapshot.calls`.) Only an exporter that wants both makes CALL_STARTED and RUN_STARTED of that.
    """

    CALL_STARTED = "call started"
    CALL_ENDED = "call ended"  # at the caller, with `seconds`
    CALL_FAILED = "call failed"
    RUN_STARTED = "run started"  # at the callee
    RUN_ENDED = "run ended"  # with `seconds`
    RUN_FAILED = "run failed"
    JOINED = "joined"
    SUSPECTED = "suspected"
    RECOVERED = "recovered"
    LEFT = "left"
    DIED = "died"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    REFUSED = "refused"  # a stranger at the listener
    TIMED_OUT = "timed out"  # a call of this worker
    FAULT = "fault"  # injected on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """Names a call in the whole group."""

    caller: str
    id: int

    def __str__(self) -> str:
        return f"{self.caller}#{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """A call under way, as one of its two ends sees it."""

    key: CallKey
    callee: str
    function: str  # module.qualname, or the name of the operator
    kind: str  # the type of its message, such as PYTHON_CALL
    stage: Stage
    age: float
    left: float | None = None  # until its deadline; None: it has none
    bytes: int = 0
    asynchronous: bool = False
    thread: int | None = None  # the thread that waits for it, or runs it (`ThreadStatus.id`)
    parent: CallKey | None = None  # the call that was being served when it was made
    makes: str | None = None  # at the callee: the value that it makes (`OwnedReference.id`)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatus:
    """A thread or coroutine of this worker that waits."""

    kind: WaitKind
    text: str  # what it waits for, in words: "f on worker1", "barrier 3: worker2 and worker5 have not come"
    age: float | None = None  # None: not known
    thread: int | None = None  # None: a coroutine, or the worker as a whole
    serving: CallKey | None = None  # the call that it serves meanwhile; None: it is the program's own thread
    call: CallKey | None = None  # CALL: the one that it waits for; LOCK: the one whose coroutine holds it
    workers: tuple[str, ...] = ()  # that have to do something before it goes on
    reference: str | None = None  # REFERENCE: `OwnedReference.id`
    context: int | None = None  # BACKWARD: `PassStatus.context`
    holder: int | None = None  # LOCK: the thread that holds it, where that is known; LOOP, THREAD: the other thread
    limited: bool = False  # it waits for a time only, and then goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedReference:
    """A value on this worker that remote references point to."""

    id: str
    type: str
    state: str  # "ready", "being made" or "failed"
    age: float
    bytes: int | None = None  # of its tensors; None: not known
    device: str | None = None
    holders: tuple[str, ...] = ()  # workers with a confirmed reference
    unconfirmed: int = 0  # forks on their way
    function: str | None = None  # that made it
    site: str | None = None  # "file:line" of its creation, if that is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReference:
    """A reference on this worker to a value of another one."""

    id: str
    owner: str
    state: str
    age: float
    function: str | None = None
    site: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStatus:
    """A distributed backward pass that this worker takes part in."""

    context: int
    number: int
    started_by: str
    phase: str
    age: float
    owes: dict[str, int] = field(default_factory=dict)  # by worker: gradients that this one still has to send there
    awaits: dict[str, int] = field(default_factory=dict)  # by worker: gradients that have not come from there


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """The connection to one peer."""

    peer: str
    state: str  # of the peer: alive, suspected, left or dead
    transport: str | None = None  # "inproc", "unix", "tcp"; None: there is no link now
    reason: str = ""  # why it is suspected or gone
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    queued_messages: int = 0  # kept until the peer acknowledges them
    queued_bytes: int = 0  # not yet taken by the kernel
    paused: bool = False  # flow control does not let us read
    round_trip: float | None = None  # seconds, of late, of the transport where it knows, else of calls
    reconnects: int = 0
    silent_for: float | None = None
    shared_lent: int = 0  # bytes of shared memory that the peer uses of ours
    shared_borrowed: int = 0
    device_lent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    time: float  # wall clock of the worker
    kind: EventKind
    peer: str | None = None
    call: CallKey | None = None
    function: str | None = None
    seconds: float | None = None
    queued: float | None = None  # RUN_ENDED, RUN_FAILED: how long the request waited for its turn before that
    bytes: int | None = None
    thread: int | None = None
    parent: CallKey | None = None
    trace: str | None = None  # of a call that is part of a distributed trace: the span in which it was made (`traceparent`)
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The distribution of durations: counts in buckets, each twice as wide as the one before."""

    measure: str  # "call" (at the caller, whole), "queue", "run"
    function: str
    peer: str | None
    count: int
    failed: int
    total: float  # seconds, all together
    longest: float
    buckets: dict[int, int] = field(default_factory=dict)  # k: how many took from 2**k to 2**(k + 1) nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStatus:
    """One thread, and where it is."""

    id: int
    name: str
    role: str  # "main", "program", "pool", "timers", "event loop", "observer", "faults", "coroutine"
    stack: tuple[str, ...] = ()  # "file:line function", the innermost last
    serving: CallKey | None = None
    task: str | None = None  # for a coroutine in its place: its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a worker keeps."""

    resident: int = 0
    shared_own: int = 0  # of shared memory that it made
    shared_lent: int = 0
    shared_borrowed: int = 0
    buffers: int = 0  # warm memory for messages
    device_lent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The threads that serve."""

    limit: int = 0
    threads: int = 0
    running: int = 0  # functions now
    queued: int = 0
    coroutines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """All that one worker says of itself at one moment. Parts that were not asked for are empty; `left_out` says how many
    entries of a part the limit cut off, after the filter."""

    name: str
    rank: int
    group: str
    incarnation: str
    pid: int
    host: str
    time: float
    up: float  # seconds since it joined
    versions: dict[str, str] = field(default_factory=dict)  # "remora", "torch", "python"
    program: str = ""
    cpu: float = 0.0  # seconds of processor time since its process began
    interpreter_wait: float | None = None  # seconds that a thread waits for the interpreter, if measured
    calls_made: int = 0  # since it joined
    calls_served: int = 0
    calls_failed: int = 0
    memory: Memory = field(default_factory=Memory)
    pool: Pool = field(default_factory=Pool)
    calls: tuple[CallStatus, ...] = ()
    waits: tuple[WaitStatus, ...] = ()
    owned: tuple[OwnedReference, ...] = ()
    held: tuple[HeldReference, ...] = ()
    passes: tuple[PassStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    events: tuple[Event, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    threads: tuple[ThreadStatus, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A worker of the group that gave no snapshot, and why."""

    name: str
    rank: int | None
    state: str  # "dead", "left", "silent" (it lives and did not answer in time), "unreachable", "refused"
    reason: str
    pid: int | None = None
    host: str | None = None
    stacks: str = ""  # what faulthandler wrote, where it could be had


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """Those workers of a group that answered within the deadline, and what is known of the others."""

    group: str
    time: float  # of the observer
    workers: tuple[WorkerSnapshot, ...] = ()
    missing: tuple[Missing, ...] = ()
    clock_offsets: dict[str, float] = field(default_factory=dict)  # by worker: its wall clock minus the observer's
    clock_errors: dict[str, float] = field(default_factory=dict)  # by worker: how far the offset may be off
    version: int = VERSION

    def worker(self, name: str) -> WorkerSnapshot | None:
        """The snapshot of one worker."""
        return next((each for each in self.workers if each.name == name), None)


PARTS = ("calls", "waits", "owned", "held", "passes", "links", "events", "histograms", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to a worker: the parts of its snapshot, filtered there first, then cut to `limit` entries each."""

    parts: tuple[str, ...] = PARTS
    limit: int = 1000
    older_than: float = 0.0  # calls, waits and references at least so old
    function: str = ""  # only what has this text in the name of its function
    peer: str = ""  # only what concerns this worker
    since: float = 0.0  # events after this time of the worker's wall clock
