"""What pages show: everything that is there, with the right names, in bounded size, whatever is missing."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import pytest

from remora.dashboard.history import EVENTS
from remora.dashboard.pages import PAGES
from remora.dashboard.server import Dashboard
from remora.observer.model import (
    PARTS,
    CallKey,
    CallStatus,
    Event,
    EventKind,
    GroupSnapshot,
    Query,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from tests.dashboard.client import get, let_in
from tests.dashboard.simulated import SimulatedGroup

ADDRESSES = [
    "overview",
    "workers",
    "workers/worker1",
    "workers/worker6",
    "calls",
    "calls/worker0%2377",
    "waiting",
    "timeline",
    "timeline?worker=worker1",
    "references",
    "references/3.1",
    "links",
    "links/worker1/worker2",
    "gradients",
    "gradients/4711.1",
    "events",
    "events?show=all",
    "stacks",
    "stacks/worker1",
    "stacks/worker1/1003",
    "functions",
    "functions/model.forward",
]
MOST = 300_000  # bytes of one moment of one page


def shown(group: Any, address: str, looks: int = 2) -> Any:
    dashboard = Dashboard(group)
    cookie = let_in(dashboard)
    for _ in range(looks):
        answer = get(dashboard, f"/api/{address}", cookie=cookie)
        assert answer.status == 200, answer.text
    return answer.json


class Still:
    """A group that always gives the same snapshot."""

    def __init__(self, *workers: WorkerSnapshot, time: float = 1000.0) -> None:
        self._snapshot = GroupSnapshot(group="still", time=time, workers=workers)

    def snapshot(self, query: Query = Query(), timeout: float = 1.0) -> GroupSnapshot:
        return self._snapshot


def worker(name: str, **parts: Any) -> WorkerSnapshot:
    fixed = {"rank": 0, "group": "still", "incarnation": "1", "pid": 1, "host": "h", "time": 1000.0, "up": 10.0}
    return WorkerSnapshot(name=name, **{**fixed, **parts})


def make(kind: str) -> Any:
    if kind == "large":  # made once: it takes longer than to show it. Its links would be 40,000
        parts = tuple(part for part in PARTS if part != "links")
        return Still(*SimulatedGroup(200).snapshot(Query(parts=parts, limit=100)).workers, time=time.time())
    group = SimulatedGroup(0 if kind == "empty" else 8)
    group.dead = {"worker6"} if kind == "troubled" else set()
    group.silent = set(group.names) if kind == "silent" else {"worker7"} if kind == "troubled" else set()
    return group


@pytest.mark.parametrize("kind", ["troubled", "large", "empty", "silent"])
def test_all_pages_are_there_and_bounded(kind: str) -> None:
    dashboard = Dashboard(make(kind))
    cookie = let_in(dashboard)
    for address in ADDRESSES:
        answer = get(dashboard, f"/api/{address}", cookie=cookie)
        assert answer.status == 200, address
        assert len(answer.body) < MOST, address
        assert answer.json["view"] is not None
        assert answer.json["all"] - answer.json["answered"] == {"troubled": 2, "silent": 8}.get(kind, 0)


@pytest.mark.parametrize("page", PAGES)
def test_pages_ask_for_parts_that_there_are(page: str) -> None:
    assert set(PAGES[page].PARTS) <= set(PARTS)


def test_a_page_that_is_not_there_is_not_found() -> None:
    dashboard = Dashboard(SimulatedGroup(1))
    for path in ("/nothing", "/api/nothing", "/stream/nothing"):
        assert get(dashboard, path, cookie=let_in(dashboard)).status == 404


def test_a_group_that_cannot_be_asked_is_said() -> None:
    group = SimulatedGroup(1)
    group.error = "no worker answers"
    dashboard = Dashboard(group)
    for path in ("/api/overview", "/api/snapshot", "/metrics"):
        answer = get(dashboard, path, cookie=let_in(dashboard))
        assert answer.status == 503
        assert "no worker answers" in answer.text


def test_the_whole_snapshot_and_parts_of_it() -> None:
    dashboard = Dashboard(SimulatedGroup(2))
    cookie = let_in(dashboard)
    assert get(dashboard, "/api/snapshot", cookie=cookie).json["workers"][0]["threads"]
    only = get(dashboard, "/api/snapshot?parts=calls", cookie=cookie).json
    assert "owned" not in only["workers"][0]
    assert get(dashboard, "/api/snapshot?parts=secrets", cookie=cookie).status == 400


def test_names_travel_as_they_are_and_lead_to_their_page() -> None:
    """The browser escapes them (tests/dashboard/test_browser.py); nothing on the way makes a page of them."""
    name = '<b>"/../%2f'
    dashboard = Dashboard(Still(worker(name)))
    answer = get(dashboard, f"/api/workers/{quote(name, safe='')}", cookie=let_in(dashboard))
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["view"]["row"]["worker"] == name


def test_the_oldest_call_comes_first_with_its_furthest_stage() -> None:
    key = CallKey(caller="a", id=5)
    fixed: dict[str, Any] = {"key": key, "callee": "b", "function": "f", "kind": "PYTHON_CALL"}
    sent = CallStatus(stage=Stage.SENT, age=3.0, left=9.0, **fixed)
    young = CallStatus(
        key=CallKey(caller="a", id=6), callee="b", function="g", kind="PYTHON_CALL", stage=Stage.SENT, age=1.0
    )
    group = Still(
        worker("a", calls=(young, sent)), worker("b", calls=(CallStatus(stage=Stage.RUNNING, age=2.9, **fixed),))
    )
    rows = shown(group, "calls")["view"]["calls"]["rows"]
    assert [(row["function"], row["stage"], row["age"], row["left"]) for row in rows] == [
        ("f", "running", 3.0, 9.0),
        ("g", "sent", 1.0, None),
    ]


def test_from_a_call_to_the_stack_behind_a_lock() -> None:
    """a calls f on b; f waits there for a lock that b's main thread holds, which sleeps."""
    key = CallKey(caller="a", id=5)
    fixed: dict[str, Any] = {"key": key, "callee": "b", "function": "f", "kind": "PYTHON_CALL"}
    asleep = ThreadStatus(id=1, name="MainThread", role="main", stack=("train.py:3 main", "train.py:9 sleep_on_it"))
    serving = ThreadStatus(id=2, name="pool-0", role="pool", stack=("pool.py:1 run", "train.py:20 f"), serving=key)
    waits = WaitStatus(kind=WaitKind.LOCK, text="a lock", age=4.0, thread=2, serving=key, holder=1)
    group = Still(
        worker("a", calls=(CallStatus(stage=Stage.BEGUN, age=5.0, **fixed),)),
        worker(
            "b",
            calls=(CallStatus(stage=Stage.RUNNING, age=5.0, thread=2, **fixed),),
            threads=(asleep, serving),
            waits=(waits,),
        ),
    )
    view = shown(group, "calls/a%235")["view"]
    steps = view["chain"]["steps"]
    assert [step["stack"][-1] for step in steps] == ["train.py:20 f", "train.py:9 sleep_on_it"]
    assert "sleep_on_it" in view["chain"]["text"]
    assert not view["chain"]["cyclic"]


def test_a_cycle_is_red_and_nothing_else_is() -> None:
    view = shown(SimulatedGroup(8), "waiting")["view"]
    assert len(view["cycles"]) == 1
    assert sum(box["bad"] for box in view["boxes"]) == 3
    assert sum(edge["bad"] for edge in view["edges"]) == 3
    calm = shown(SimulatedGroup(8, cycle=False), "waiting")
    assert calm["cycles"] == 0
    assert not any(box["bad"] for box in calm["view"]["boxes"])


def test_many_that_wait_for_the_same_are_one_box() -> None:
    waits = [WaitStatus(kind=WaitKind.LOCK, text="a lock", age=1.0, thread=n, holder=1) for n in range(2, 60)]
    threads = [ThreadStatus(id=n, name=f"t{n}", role="program") for n in range(1, 60)]
    view = shown(Still(worker("a", waits=tuple(waits), threads=tuple(threads))), "waiting")["view"]
    assert sorted(box["count"] for box in view["boxes"]) == [1, 58]


def test_a_leak_is_one_line_with_its_maker_and_holder() -> None:
    row = shown(SimulatedGroup(8), "references")["view"]["sources"]["rows"][0]
    assert (row["owner"], row["function"], row["holders"]) == ("worker3", "cache.remember", ["worker4"])
    assert row["count"] > 800


def test_a_large_matrix_has_blocks_that_show_their_worst_pair() -> None:
    group = Still(*SimulatedGroup(80).snapshot(Query(parts=("links",))).workers)
    view = shown(group, "links?metric=round_trip", looks=1)["view"]["matrix"]
    assert view["size"] == 2
    assert len(view["cells"]) == 40
    assert view["cells"][1][3] == pytest.approx(0.042)  # 2 → 6 is slow
    inside = shown(group, "links?metric=round_trip&block=2-7", looks=1)["view"]["matrix"]
    assert inside["size"] == 1
    assert inside["cells"][0][4] == pytest.approx(0.042)


def test_short_runs_are_put_together_and_none_is_lost() -> None:
    events = tuple(
        Event(
            time=990 + n * 0.001,
            kind=EventKind.RUN_FAILED if n == 8000 else EventKind.RUN_ENDED,
            function="f",
            seconds=0.0005,
            thread=1,
        )
        for n in range(9000)
    )
    row = shown(Still(worker("a", events=events)), "timeline")["view"]["rows"][0]
    assert len(row["bars"]) < 400
    assert sum(bar[4] for bar in row["bars"]) == EVENTS
    assert sum(bar[7] for bar in row["bars"]) == 1
    assert all(abs(bar[6] - 0.5) < 0.2 for bar in row["bars"] if bar[4] > 3)
    near = shown(Still(worker("a", events=events)), "timeline?seconds=0.0100&end=998.0")["view"]["rows"][0]
    assert [bar[4] for bar in near["bars"]] == [1] * len(near["bars"])


@pytest.mark.parametrize("words", ["seconds=nan", "seconds=-5", "seconds=1e999", "end=inf", "end=x", "seconds=0"])
def test_nonsense_in_the_address_of_a_timeline_shows_now(words: str) -> None:
    view = shown(SimulatedGroup(2), f"timeline?{words}")["view"]
    assert 0 < view["seconds"] <= 600


@pytest.mark.parametrize(
    "address",
    [f"stacks/worker1/{'9' * 5000}", f"links?block={'9' * 5000}-1", f"links?block=0-{'9' * 5000}", "links?block=7-2"]
    + [f"{page}/%ff/%00?filter=%ff&sort=%00&limit=-1" for page in PAGES],
)
def test_nonsense_in_an_address_is_no_error(address: str) -> None:
    shown(SimulatedGroup(4), address, looks=1)


def test_metrics_are_those_of_the_whole_group() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    group = SimulatedGroup(3)
    group.dead = {"worker2"}
    dashboard = Dashboard(group)
    answer = get(dashboard, "/metrics", cookie=let_in(dashboard))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {each.name: each for each in parser.text_string_to_metric_families(answer.text)}
    workers = {sample.labels["worker"] for sample in families["rpc_client_call_duration_seconds"].samples}
    assert workers == {"worker0", "worker1"}
    modern = get(dashboard, "/metrics", cookie=let_in(dashboard), accept="application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")
