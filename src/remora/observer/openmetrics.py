"""A group as metrics: families of samples, and their text for Prometheus (format 0.0.4) or OpenMetrics.

Names follow the conventions of OpenTelemetry for remote calls: `rpc.client.call.duration` is
`rpc_client_call_duration_seconds` here, and the function of a call is its `rpc_method`. What those conventions do not have
begins with `remora_`. Pure: from a `GroupSnapshot` to text, without a library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from remora.observer.model import GroupSnapshot, Histogram, LinkStatus, Query, Stage, WorkerSnapshot

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
QUERY = Query(parts=("calls", "owned", "held", "passes", "links", "histograms", "waits"), limit=100_000)

# Upper limits, in powers of two nanoseconds: from a microsecond to 275 seconds, each four times the one before. They are the
# same in every series, because sums over series with different limits mean nothing.
LIMITS = tuple(range(10, 39, 2))

# By `Histogram.measure`: the family, and its help.
MEASURES = {
    "call": ("rpc_client_call_duration_seconds", "Duration of calls, as their callers saw them."),
    "run": ("rpc_server_call_duration_seconds", "Duration of the functions that calls ran."),
    "queue": ("remora_server_queue_duration_seconds", "How long calls waited at the callee for a thread."),
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: how many took at most so many seconds, for each limit; the number of all, and their sum."""

    at_most: tuple[tuple[float, int], ...]
    count: int
    total: float


@dataclass(slots=True)
class Family:
    """A metric. The values are numbers, or distributions where `kind` is "histogram"."""

    name: str  # of a counter: without the ending "_total"
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    samples: list[tuple[dict[str, str], float | Distribution]] = field(default_factory=list)


def families(group: GroupSnapshot) -> list[Family]:
    """The metrics of a group. Families without samples are left out."""
    found: dict[str, Family] = {}

    def add(name: str, kind: str, about: str, labels: Mapping[str, str], value: float | Distribution) -> None:
        found.setdefault(name, Family(name, kind, about)).samples.append((dict(labels), value))

    _answers(group, add)
    for worker in group.workers:
        labels = {"group": group.group, "worker": worker.name}
        _worker(worker, labels, add)
        _calls(worker, labels, add)
        _references(worker, labels, add)
        for link in worker.links:
            _link(link, {**labels, "peer": link.peer}, add)
        _histograms(worker.histograms, labels, add)
    return list(found.values())


def render(group: GroupSnapshot, openmetrics: bool = False) -> str:
    """The text that Prometheus reads; that of OpenMetrics if `openmetrics`."""
    lines = [line for family in families(group) for line in _lines(family, openmetrics)]
    return "\n".join([*lines, *(["# EOF"] if openmetrics else [])]) + "\n"


# What is told.

Add = Callable[[str, str, str, Mapping[str, str], "float | Distribution"], None]


def _answers(group: GroupSnapshot, add: Add) -> None:
    about = "1: the worker answered the observer; 0: it did not."
    for worker in group.workers:
        add("remora_worker_up", "gauge", about, {"group": group.group, "worker": worker.name, "state": "answers"}, 1)
    for missing in group.missing:
        add("remora_worker_up", "gauge", about, {"group": group.group, "worker": missing.name, "state": missing.state}, 0)


def _worker(worker: WorkerSnapshot, labels: Mapping[str, str], add: Add) -> None:
    versions = {f"version_{name}": version for name, version in worker.versions.items()}
    told = {"rank": str(worker.rank), "host": worker.host, "pid": str(worker.pid), **_label_names(versions)}
    add("remora_worker_info", "gauge", "Who a worker is; always 1.", {**labels, **told}, 1)
    memory, pool = worker.memory, worker.pool
    for name, about, value in (
        ("remora_uptime_seconds", "Seconds since the worker joined.", worker.up),
        ("remora_resident_memory_bytes", "Memory of the process.", memory.resident),
        ("remora_shared_memory_bytes", "Shared memory that the worker made.", memory.shared_own),
        ("remora_shared_memory_lent_bytes", "Shared memory that others use of it.", memory.shared_lent),
        ("remora_shared_memory_borrowed_bytes", "Shared memory of others that it uses.", memory.shared_borrowed),
        ("remora_device_memory_lent_bytes", "Device memory that others use of it.", memory.device_lent),
        ("remora_buffer_bytes", "Memory that it keeps for messages.", memory.buffers),
        ("remora_pool_limit", "How many functions may run at once.", pool.limit),
        ("remora_pool_threads", "Threads that serve.", pool.threads),
        ("remora_pool_running", "Functions that run.", pool.running),
        ("remora_pool_queued", "Calls that wait for a thread.", pool.queued),
        ("remora_pool_coroutines", "Coroutines that run.", pool.coroutines),
        ("remora_backward_passes", "Backward passes under way.", len(worker.passes)),
        ("remora_waits", "Threads and coroutines that wait.", len(worker.waits)),
    ):
        add(name, "gauge", about, labels, value)
    if worker.interpreter_wait is not None:
        about = "How long a thread waits for the interpreter."
        add("remora_interpreter_wait_seconds", "gauge", about, labels, worker.interpreter_wait)
    for name, about, value in (
        ("remora_cpu_seconds", "Processor time of the process.", worker.cpu),
        ("remora_calls_made", "Calls that the worker made.", worker.calls_made),
        ("remora_calls_served", "Calls that the worker served.", worker.calls_served),
        ("remora_calls_failed", "Calls that the worker made and that failed.", worker.calls_failed),
    ):
        add(name, "counter", about, labels, value)


def _calls(worker: WorkerSnapshot, labels: Mapping[str, str], add: Add) -> None:
    stages = Counter(call.stage for call in worker.calls)
    oldest: dict[Stage, float] = {}
    for call in worker.calls:
        oldest[call.stage] = max(oldest.get(call.stage, 0.0), call.age)
    for stage in Stage:
        add("remora_calls", "gauge", "Calls under way.", {**labels, "stage": str(stage)}, stages[stage])
        about = "Age of the oldest call under way."
        add("remora_oldest_call_seconds", "gauge", about, {**labels, "stage": str(stage)}, oldest.get(stage, 0.0))
    if "calls" in worker.left_out:
        about = "Calls under way that are in no other metric: there were too many."
        add("remora_calls_left_out", "gauge", about, labels, worker.left_out["calls"])


def _references(worker: WorkerSnapshot, labels: Mapping[str, str], add: Add) -> None:
    owned = len(worker.owned) + worker.left_out.get("owned", 0)
    held = len(worker.held) + worker.left_out.get("held", 0)
    add("remora_references_owned", "gauge", "Values that references of others point to.", labels, owned)
    add("remora_references_held", "gauge", "References to values of others.", labels, held)
    size = sum(each.bytes or 0 for each in worker.owned)
    add("remora_references_owned_bytes", "gauge", "Tensors in the values that references point to.", labels, size)


def _link(link: LinkStatus, labels: Mapping[str, str], add: Add) -> None:
    add("remora_peer_alive", "gauge", "1: the peer is alive; 0: suspected, left or dead.", labels, link.state == "alive")
    for name, about, value in (
        ("remora_link_sent_bytes", "Bytes sent to the peer.", link.bytes_sent),
        ("remora_link_received_bytes", "Bytes received from the peer.", link.bytes_received),
        ("remora_link_sent_messages", "Messages sent to the peer.", link.messages_sent),
        ("remora_link_received_messages", "Messages received from the peer.", link.messages_received),
        ("remora_link_reconnects", "How often the link was made again.", link.reconnects),
    ):
        add(name, "counter", about, labels, value)
    for name, about, value in (
        ("remora_link_queued_messages", "Messages that the peer has not acknowledged.", link.queued_messages),
        ("remora_link_queued_bytes", "Bytes that the kernel has not taken.", link.queued_bytes),
        ("remora_link_paused", "1: flow control does not let the worker read.", link.paused),
    ):
        add(name, "gauge", about, labels, value)
    if link.round_trip is not None:
        add("remora_link_round_trip_seconds", "gauge", "Round trip of late.", labels, link.round_trip)
    if link.silent_for is not None:
        add("remora_link_silent_seconds", "gauge", "How long nothing has come from the peer.", labels, link.silent_for)


def _histograms(histograms: Iterable[Histogram], labels: Mapping[str, str], add: Add) -> None:
    for each in histograms:
        if each.measure in MEASURES:
            name, about = MEASURES[each.measure]
            told = {**labels, "rpc_system_name": "remora", "rpc_method": each.function}
            told |= {"peer": each.peer} if each.peer is not None else {}
            add(name, "histogram", about, told, _distribution(each))
            if each.failed and each.measure != "queue":
                failures = name.removesuffix("_duration_seconds") + "_failures"
                add(failures, "counter", "Those of them that failed.", told, each.failed)


def _distribution(histogram: Histogram) -> Distribution:
    at_most = tuple(
        (2**limit / 1e9, sum(count for bucket, count in histogram.buckets.items() if bucket < limit)) for limit in LIMITS
    )
    # The buckets may be a moment older or younger than the count, which has to be the last of the sums.
    count = max(histogram.count, sum(histogram.buckets.values()))
    return Distribution(at_most, count, histogram.total)


# The text.


def _lines(family: Family, openmetrics: bool) -> Iterator[str]:
    counter = family.kind == "counter"
    name = f"{family.name}_total" if counter else family.name
    header = family.name if openmetrics else name
    yield f"# HELP {header} {_escaped(family.help)}"
    yield f"# TYPE {header} {family.kind}"
    for labels, value in family.samples:
        if isinstance(value, Distribution):
            for limit, count in value.at_most:
                yield f"{name}_bucket{_labels({**labels, 'le': f'{limit:.9g}'})} {count}"
            yield f"{name}_bucket{_labels({**labels, 'le': '+Inf'})} {value.count}"
            yield f"{name}_sum{_labels(labels)} {_number(value.total)}"
            yield f"{name}_count{_labels(labels)} {value.count}"
        else:
            yield f"{name}{_labels(labels)} {_number(value)}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    escaped = escaped.replace('"', '\\"') if quotes else escaped
    return "".join(each if each.isprintable() else "?" for each in escaped)


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(float(value))


def _label_names(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels whose names came from a worker: what no name of a label may have is replaced."""
    return {"".join(c if c.isascii() and c.isalnum() else "_" for c in name): text for name, text in labels.items()}
