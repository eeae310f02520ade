"""The last minutes of a group, as the dashboard saw them: rates and sizes over time, and the events that came.

Workers keep counters and a short ring of events; what a counter was a minute ago is known only here. All is bounded: each
series keeps `LENGTH` points, a worker has `EVENTS` events, and what belongs to a worker is dropped when it is gone for long.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from remora.observer.model import Event, EventKind, GroupSnapshot, Histogram, LinkStatus, WorkerSnapshot

LENGTH = 600  # five minutes at two a second
EVENTS = 4000
EVENTS_OF_ALL = 60_000
# Of those that are no call that went well, so many more are kept: thousands of calls a second push a death out in no time.
NOTABLE = 500
NOTABLE_OF_ALL = 20_000
WENT_WELL = frozenset({EventKind.CALL_ENDED, EventKind.RUN_ENDED})
LINKS = 2000  # pairs with a series of their own
GAP = 5.0  # seconds: after a longer silence no rate is computed, and lines are broken


@dataclass(slots=True)
class Series:
    """Numbers that were taken at the same times."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH))
    values: dict[str, deque[float | None]] = field(default_factory=dict)

    def add(self, time: float, **values: float | None) -> None:
        """One more moment. A name that is new has no values before."""
        for name in values:
            if name not in self.values:
                self.values[name] = deque([None] * len(self.times), maxlen=LENGTH)
        self.times.append(time)
        for name, kept in self.values.items():
            kept.append(values.get(name))

    def tell(self, *names: str, points: int = LENGTH) -> dict[str, list[float | None]]:
        """As the browser draws it: the times, and the values of each name."""
        times: list[float | None] = [round(each, 2) for each in self.times]
        found = {"time": times[-points:]}
        for name in names:
            values = self.values.get(name, [None] * len(self.times))
            found[name] = [None if each is None else float(f"{each:.4g}") for each in values][-points:]
        return found

    def last(self, name: str) -> float | None:
        """The newest value."""
        values = self.values.get(name)
        return values[-1] if values else None


class Buckets:
    """Histograms put together: bucket k counts from 2**k to 2**(k + 1) nanoseconds."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.count = 0
        self.failed = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, histogram: Histogram) -> None:
        self.counts.update(histogram.buckets)
        self.count += histogram.count
        self.failed += histogram.failed
        self.total += histogram.total
        self.longest = max(self.longest, histogram.longest)

    def quantile(self, share: float) -> float | None:
        """Seconds that this share did not exceed, as precisely as buckets allow; None without any."""
        return quantile(self.counts, share, self.longest)


def quantile(counts: Counter[int] | dict[int, int], share: float, longest: float = math.inf) -> float | None:
    """The share's place among the buckets, evenly spread within its bucket."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        if counts[bucket] <= 0:
            continue
        if left <= counts[bucket]:
            return min(2.0**bucket * (1.0 + left / counts[bucket]) / 1e9, longest)
        left -= counts[bucket]
    return None


def combine(histograms: Iterable[Histogram], key: Callable[[Histogram], str]) -> dict[str, Buckets]:
    """Histograms put together by a key."""
    found: dict[str, Buckets] = {}
    for each in histograms:
        found.setdefault(key(each), Buckets()).add(each)
    return found


class History:
    """The figures kept of all snapshots so far."""

    def __init__(self) -> None:
        self.group = Series()
        self.workers: dict[str, Series] = {}
        self.functions: dict[str, Series] = {}
        self.owners: dict[str, Series] = {}  # references by their owner
        self.links: dict[tuple[str, str], Series] = {}
        self.events: dict[str, deque[Event]] = {}  # by worker; times are those of the observer's clock
        self.notable: dict[str, deque[Event]] = {}  # those among them, and before them, that are no call that went well
        self._last_event: dict[str, tuple[str, float]] = {}  # by worker: its incarnation, and the time on its own clock
        self._before: dict[str, WorkerSnapshot] = {}
        self._links_before: dict[tuple[str, str], tuple[float, LinkStatus]] = {}
        self._counts_before: dict[str, Counter[int]] = {}
        self._totals_before: dict[str, tuple[int, int]] = {}
        self._measured_at = 0.0  # when histograms were last asked for
        self._events_until: dict[str, float] = {}  # by worker, on its own clock
        self._latency_before: dict[str, float | None] = {"p50": None, "p99": None}

    @property
    def since(self) -> float:
        """Events before this time of the workers' clocks are all here."""
        return min(self._events_until.values(), default=0.0)

    def all_events(self) -> Iterator[tuple[str, Event]]:
        """Each with its worker; those of one worker in order."""
        for name, events in self.events.items():
            first = events[0].time if events else math.inf
            for each in self.notable[name]:
                if each.time >= first:
                    break
                yield name, each
            for each in events:
                yield name, each

    def add(self, snapshot: GroupSnapshot, parts: Iterable[str]) -> None:
        """Take in one more snapshot, in which `parts` were asked for."""
        parts = set(parts)
        for worker in snapshot.workers:
            self._add_worker(snapshot, worker)
            if "events" in parts:
                self._add_events(worker, snapshot.clock_offsets.get(worker.name, 0.0))
            if "links" in parts:
                self._add_links(snapshot.time, worker)
            if "owned" in parts:
                size = sum(each.bytes or 0 for each in worker.owned)
                count = len(worker.owned) + worker.left_out.get("owned", 0)
                self.owners.setdefault(worker.name, Series()).add(snapshot.time, count=count, bytes=size)
        self._add_group(snapshot, "histograms" in parts)
        if "histograms" in parts:
            self._add_functions(snapshot)
            self._measured_at = snapshot.time
        self._forget(snapshot)
        silent = {each.name for each in snapshot.missing if each.state in ("silent", "unreachable")}
        kept = {name: each for name, each in self._before.items() if name in silent}  # their events may still come
        self._before = {**kept, **{each.name: each for each in snapshot.workers}}
        self._events_until = {name: until for name, until in self._events_until.items() if name in self._before}

    def _elapsed(self, worker: WorkerSnapshot) -> float | None:
        """Seconds since the snapshot before of the same process, if there is one and it is not long ago."""
        before = self._before.get(worker.name)
        if before is None or before.incarnation != worker.incarnation:
            return None
        elapsed = worker.time - before.time
        return elapsed if 0 < elapsed < GAP else None

    def _add_worker(self, snapshot: GroupSnapshot, worker: WorkerSnapshot) -> None:
        made = served = failed = cpu = None
        elapsed = self._elapsed(worker)
        if elapsed is not None:
            before = self._before[worker.name]
            made = max(worker.calls_made - before.calls_made, 0) / elapsed
            served = max(worker.calls_served - before.calls_served, 0) / elapsed
            failed = max(worker.calls_failed - before.calls_failed, 0) / elapsed
            cpu = max(worker.cpu - before.cpu, 0.0) / elapsed
        self.workers.setdefault(worker.name, Series()).add(
            snapshot.time,
            made=made,
            served=served,
            failed=failed,
            cpu=cpu,
            resident=worker.memory.resident,
            queued=worker.pool.queued,
            running=worker.pool.running,
        )

    def _add_events(self, worker: WorkerSnapshot, offset: float) -> None:
        incarnation, last = self._last_event.get(worker.name, ("", -math.inf))
        if incarnation != worker.incarnation:
            last = -math.inf
        # What was told before is told apart on the worker's clock: what we know of its difference to ours changes.
        told = sorted((each for each in worker.events if each.time > last), key=lambda each: each.time)
        new = [_at(each, each.time - offset) for each in told]
        self.events.setdefault(worker.name, deque(maxlen=EVENTS)).extend(new)
        notable = self.notable.setdefault(worker.name, deque(maxlen=NOTABLE))
        notable.extend(each for each in new if each.kind not in WENT_WELL)
        self._last_event[worker.name] = worker.incarnation, told[-1].time if told else last
        self._events_until[worker.name] = worker.time

    def _add_links(self, time: float, worker: WorkerSnapshot) -> None:
        for link in worker.links:
            pair = worker.name, link.peer
            if pair not in self.links and len(self.links) >= LINKS:
                continue
            then, before = self._links_before.get(pair, (0.0, link))
            elapsed = time - then
            known = 0 < elapsed < GAP
            self.links.setdefault(pair, Series()).add(
                time,
                sent=max(link.bytes_sent - before.bytes_sent, 0) / elapsed if known else None,
                received=max(link.bytes_received - before.bytes_received, 0) / elapsed if known else None,
                round_trip=link.round_trip,
                queued=link.queued_bytes,
            )
            self._links_before[pair] = time, link

    def _add_group(self, snapshot: GroupSnapshot, measured: bool) -> None:
        self.group.add(
            snapshot.time,
            made=self._sum("made", snapshot),
            served=self._sum("served", snapshot),
            failed=self._sum("failed", snapshot),
            resident=sum(each.memory.resident for each in snapshot.workers),
            queued=sum(each.pool.queued for each in snapshot.workers),
            running=sum(each.pool.running for each in snapshot.workers),
            **(self._latency(snapshot) if measured else self._latency_before),
        )

    def _sum(self, name: str, snapshot: GroupSnapshot) -> float | None:
        known = [value for each in snapshot.workers if (value := self.workers[each.name].last(name)) is not None]
        return sum(known) if known else None

    def _latency(self, snapshot: GroupSnapshot) -> dict[str, float | None]:
        """Of the calls that ended since the snapshot before."""
        counts: Counter[int] = Counter()
        for worker in snapshot.workers:
            for each in worker.histograms:
                if each.measure == "call":
                    counts.update(each.buckets)
        before, self._counts_before[""] = self._counts_before.get("", counts), counts
        new = Counter({bucket: count - before[bucket] for bucket, count in counts.items() if count > before[bucket]})
        if snapshot.time - self._measured_at >= GAP:
            new.clear()
        self._latency_before = {"p50": quantile(new, 0.5), "p99": quantile(new, 0.99)}
        return self._latency_before

    def _add_functions(self, snapshot: GroupSnapshot) -> None:
        histograms = (each for worker in snapshot.workers for each in worker.histograms if each.measure == "call")
        elapsed = snapshot.time - self._measured_at
        for name, found in combine(histograms, lambda each: each.function).items():
            counts, failed = self._totals_before.get(name, (found.count, found.failed))
            before = self._counts_before.get(name, found.counts)
            new = Counter({bucket: count - before[bucket] for bucket, count in found.counts.items()})
            known = 0 < elapsed < GAP
            self.functions.setdefault(name, Series()).add(
                snapshot.time,
                rate=max(found.count - counts, 0) / elapsed if known else None,
                failed=max(found.failed - failed, 0) / elapsed if known else None,
                p50=quantile(new, 0.5) if known else None,
                p99=quantile(new, 0.99) if known else None,
            )
            self._totals_before[name] = found.count, found.failed
            self._counts_before[name] = found.counts

    def _forget(self, snapshot: GroupSnapshot) -> None:
        """Drop series that have had no value for as long as a series is, and bound the events of all."""
        oldest = self.group.times[0]
        kept: list[dict[str, Series]] = [self.workers, self.functions, self.owners]
        for series in kept:
            for name in [name for name, each in series.items() if each.times and each.times[-1] < oldest]:
                del series[name]
        for pair in [pair for pair, each in self.links.items() if each.times[-1] < oldest]:
            del self.links[pair]
            self._links_before.pop(pair, None)
        for name in self.events.keys() - self.workers.keys():
            del self.events[name], self.notable[name], self._last_event[name]
        _bound(self.events, EVENTS_OF_ALL)
        _bound(self.notable, NOTABLE_OF_ALL)


def _bound(events: dict[str, deque[Event]], most: int) -> None:
    """Keep the newest: all workers the same number at most."""
    if sum(map(len, events.values())) > most:
        share = most // len(events)
        for each in events.values():
            while len(each) > share:
                each.popleft()


def _at(event: Event, time: float) -> Event:
    return Event(
        time=time,
        kind=event.kind,
        peer=event.peer,
        call=event.call,
        function=event.function,
        seconds=event.seconds,
        bytes=event.bytes,
        thread=event.thread,
        parent=event.parent,
        text=event.text,
    )
