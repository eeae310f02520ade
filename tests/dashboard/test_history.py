"""What is remembered: rates from counters, quantiles from buckets, events once each, all of it bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.dashboard import history as module
from remora.dashboard.history import History, quantile
from remora.observer.model import PARTS, Event, EventKind, GroupSnapshot, LinkStatus, Query, WorkerSnapshot
from tests.dashboard.simulated import SimulatedGroup


def snapshot(time: float, *workers: WorkerSnapshot, offset: float = 0.0) -> GroupSnapshot:
    return GroupSnapshot(group="g", time=time, workers=workers, clock_offsets={each.name: offset for each in workers})


def worker(time: float, served: int = 0, **more: object) -> WorkerSnapshot:
    fixed = {"name": "a", "rank": 0, "group": "g", "incarnation": "1", "pid": 1, "host": "h", "up": time}
    return WorkerSnapshot(time=time, calls_served=served, **{**fixed, **more})  # type: ignore[arg-type]


def test_a_rate_is_the_difference_of_two_counters() -> None:
    history = History()
    history.add(snapshot(100.0, worker(100.0, 50)), PARTS)
    assert history.group.last("served") is None
    history.add(snapshot(100.5, worker(100.5, 60)), PARTS)
    assert history.workers["a"].last("served") == pytest.approx(20.0)
    assert history.group.last("served") == pytest.approx(20.0)


def test_a_restarted_worker_and_a_long_pause_give_no_rate() -> None:
    history = History()
    history.add(snapshot(100.0, worker(100.0, 50)), PARTS)
    history.add(snapshot(100.5, worker(100.5, 1, incarnation="2")), PARTS)
    assert history.workers["a"].last("served") is None
    history.add(snapshot(200.0, worker(200.0, 9000, incarnation="2")), PARTS)
    assert history.workers["a"].last("served") is None


def test_bytes_of_a_link_become_a_rate() -> None:
    history = History()
    for time, sent in ((100.0, 0), (101.0, 5000)):
        history.add(snapshot(time, worker(time, links=(LinkStatus(peer="b", state="alive", bytes_sent=sent),))), PARTS)
    assert history.links["a", "b"].last("sent") == pytest.approx(5000.0)


def test_an_event_is_kept_once_and_on_the_clock_of_the_observer() -> None:
    history = History()
    events = tuple(Event(time=90.0 + n, kind=EventKind.JOINED, peer="b") for n in range(5))
    history.add(
        snapshot(
            100.0,
            worker(1100.0, events=tuple(replace(each, time=each.time + 1000) for each in events[:3])),
            offset=1000.0,
        ),
        PARTS,
    )
    history.add(
        snapshot(
            101.0, worker(1101.0, events=tuple(replace(each, time=each.time + 1000) for each in events)), offset=1000.0
        ),
        PARTS,
    )
    assert [each.time for each in history.events["a"]] == pytest.approx([each.time for each in events])


def test_events_are_asked_for_from_the_last_time_on() -> None:
    history = History()
    assert history.since == 0.0
    history.add(snapshot(100.0, worker(55.0)), PARTS)
    assert history.since == 55.0
    history.add(snapshot(101.0, worker(56.0)), ("calls",))  # without events: those after 55 are still to come
    assert history.since == 55.0


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("LENGTH", 5), ("LINKS", 4), ("EVENTS_OF_ALL", 40)):
        monkeypatch.setattr(module, name, bound)
    history = History()
    now = [1e6]
    group = SimulatedGroup(6, clock=lambda: now[0])
    for _ in range(12):
        now[0] += 1.0
        history.add(group.snapshot(Query(since=history.since)), PARTS)
    assert len(history.links) <= 4
    assert sum(map(len, history.events.values())) <= 40
    assert {len(each.times) for each in (history.group, *history.workers.values(), *history.functions.values())} == {
        module.LENGTH
    }


def test_a_worker_that_is_gone_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.group.times = type(history.group.times)(maxlen=3)
    history.add(snapshot(1.0, worker(1.0), worker(1.0, name="b")), PARTS)
    for time in (2.0, 3.0, 4.0):
        history.add(snapshot(time, worker(time)), PARTS)
    assert history.workers.keys() == {"a"} == history.events.keys()


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 1000), min_size=1), st.floats(0.0, 1.0))
def test_a_quantile_lies_in_its_bucket(counts: dict[int, int], share: float) -> None:
    found = quantile(Counter(counts), share)
    assert found is not None
    below = sum(count for bucket, count in counts.items() if 2.0 ** (bucket + 1) / 1e9 <= found * (1 - 1e-9))
    above = sum(count for bucket, count in counts.items() if 2.0**bucket / 1e9 >= found * (1 + 1e-9))
    assert below <= share * sum(counts.values()) + 1e-6
    assert above <= (1 - share) * sum(counts.values()) + 1e-6


def test_nothing_has_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({3: 0}, 0.5) is None
