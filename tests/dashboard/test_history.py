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


def test_an_event_that_is_told_again_is_kept_once_though_the_clocks_are_estimated_anew() -> None:
    history = History()
    event = Event(time=1090.0, kind=EventKind.JOINED, peer="b")
    for offset in (1000.0, 999.9995):
        history.add(snapshot(100.0, worker(1100.0, events=(event,)), offset=offset), PARTS)
    assert len(history.events["a"]) == 1
    restarted = worker(500.0, incarnation="2", events=(replace(event, time=490.0),))
    history.add(snapshot(101.0, restarted, offset=0.0), PARTS)
    assert len(history.events["a"]) == 2


def test_calls_that_went_well_push_out_neither_a_death_nor_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENTS", 20)
    history = History()
    seldom = (
        Event(time=1.0, kind=EventKind.DIED, peer="b"),
        Event(time=2.0, kind=EventKind.RUN_FAILED, function="f", seconds=0.1),
    )
    history.add(snapshot(3.0, worker(3.0, events=seldom)), PARTS)
    for begin in (10, 40):
        calls = tuple(Event(time=float(n), kind=EventKind.RUN_ENDED, seconds=0.1) for n in range(begin, begin + 30))
        history.add(snapshot(begin + 30.0, worker(begin + 30.0, events=calls)), PARTS)
    told = [each.kind for name, each in history.all_events() if name == "a"]
    assert told == [EventKind.DIED, EventKind.RUN_FAILED] + [EventKind.RUN_ENDED] * 20


def test_what_is_seldom_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("EVENTS", 30), ("NOTABLE", 10), ("NOTABLE_OF_ALL", 15)):
        monkeypatch.setattr(module, name, bound)
    history = History()
    joins = tuple(Event(time=float(n), kind=EventKind.JOINED, peer="b") for n in range(50))
    history.add(snapshot(100.0, worker(100.0, events=joins), worker(100.0, name="b", events=joins)), PARTS)
    assert sum(map(len, history.notable.values())) <= 15
    assert [each.time for name, each in history.all_events() if name == "a"] == [float(n) for n in range(20, 50)]


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
