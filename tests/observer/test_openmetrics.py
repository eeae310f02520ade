"""Metrics, read back by the parsers of the real library."""

from __future__ import annotations

import math
from typing import Any

import pytest

from remora.observer.model import (
    CallKey,
    CallStatus,
    GroupSnapshot,
    Histogram,
    LinkStatus,
    Missing,
    OwnedReference,
    Stage,
    WorkerSnapshot,
)  # fmt: skip
from remora.observer.openmetrics import render

prometheus = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")

AWKWARD = 'f"\\\n\x1b<λ>'


def worker(name: str, **parts: Any) -> WorkerSnapshot:
    base: dict[str, Any] = {
        "rank": 0, "group": "g", "incarnation": "i", "pid": 7, "host": "h", "time": 1e9, "up": 2.5,
    }  # fmt: skip
    return WorkerSnapshot(**{**base, **parts}, name=name)


def group() -> GroupSnapshot:
    call = CallStatus(
        key=CallKey(caller="worker0", id=1), callee="worker1", function="f", kind="PYTHON_CALL", stage=Stage.SENT, age=12.5
    )
    histograms = (
        Histogram(measure="call", function=AWKWARD, peer="worker1", count=6, failed=2, total=0.5, longest=0.4,
                  buckets={3: 1, 10: 2, 14: 1, 20: 1, 60: 1}),
        Histogram(measure="run", function="g", peer=None, count=1, failed=0, total=3e-5, longest=3e-5, buckets={14: 1}),
        Histogram(measure="what is this", function="g", peer=None, count=1, failed=0, total=1.0, longest=1.0),
    )  # fmt: skip
    full = worker(
        "worker0", versions={"remora": "1", "c++ abi": "2"}, calls=(call,), histograms=histograms, left_out={"owned": 5},
        owned=(OwnedReference(id="a", type="Tensor", state="ready", age=1.0, bytes=400),),
        links=(LinkStatus(peer="worker1", state="alive", bytes_sent=2**40, round_trip=3e-5),), calls_made=7,
    )  # fmt: skip
    return GroupSnapshot(
        group='g"', time=1e9, workers=(full, worker("worker1")),
        missing=(Missing(name="worker2", rank=2, state="dead", reason="killed"),),
    )  # fmt: skip


def samples(text: str, parser: Any) -> dict[tuple[str, str], dict[tuple[tuple[str, str], ...], float]]:
    """By name and type: by labels, the values. Every sample once."""
    found: dict[tuple[str, str], dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            values = found.setdefault((sample.name, family.type), {})
            assert labels not in values, f"{sample.name} is there twice"
            values[labels] = sample.value
    return found


@pytest.mark.parametrize("parser", [prometheus, openmetrics], ids=["0.0.4", "OpenMetrics"])
def test_the_text_is_what_the_parser_reads(parser: Any) -> None:
    found = samples(render(group(), openmetrics=parser is openmetrics), parser)
    up = {dict(labels)["worker"]: value for labels, value in found["remora_worker_up", "gauge"].items()}
    assert up == {"worker0": 1, "worker1": 1, "worker2": 0}
    assert {dict(labels)["group"] for labels in found["remora_uptime_seconds", "gauge"]} == {'g"'}
    assert set(found["remora_link_sent_bytes_total", "counter"].values()) == {2**40}
    assert found["remora_calls_made_total", "counter"][(("group", 'g"'), ("worker", "worker0"))] == 7
    sent = (("group", 'g"'), ("stage", "sent"), ("worker", "worker0"))
    assert found["remora_calls", "gauge"][sent] == 1
    assert found["remora_oldest_call_seconds", "gauge"][sent] == 12.5
    assert found["remora_references_owned", "gauge"][(("group", 'g"'), ("worker", "worker0"))] == 6
    info = [dict(labels) for labels in found["remora_worker_info", "gauge"]]
    assert info[0]["version_remora"] == "1"
    assert info[0]["version_c___abi"] == "2"
    assert sum(found["rpc_client_call_failures_total", "counter"].values()) == 2


@pytest.mark.parametrize("parser", [prometheus, openmetrics], ids=["0.0.4", "OpenMetrics"])
def test_histograms_are_cumulative_in_seconds_and_have_the_same_limits(parser: Any) -> None:
    found = samples(render(group(), openmetrics=parser is openmetrics), parser)
    buckets = found["rpc_client_call_duration_seconds_bucket", "histogram"]
    function = AWKWARD.replace("\x1b", "?")
    assert {dict(labels)["rpc_method"] for labels in buckets} == {function}
    counts = {float(dict(labels)["le"]): count for labels, count in buckets.items()}
    assert counts[2**10 / 1e9] == 1  # the bucket of 8 to 16 ns
    assert counts[2**12 / 1e9] == 3
    assert counts[max(limit for limit in counts if limit < math.inf)] == 5
    assert counts[math.inf] == 6
    assert [count for _, count in sorted(counts.items())] == sorted(counts.values())
    assert sum(found["rpc_client_call_duration_seconds_sum", "histogram"].values()) == 0.5
    assert sum(found["rpc_client_call_duration_seconds_count", "histogram"].values()) == 6
    served = {float(dict(labels)["le"]) for labels in found["rpc_server_call_duration_seconds_bucket", "histogram"]}
    assert served == set(counts)


def test_a_sample_stands_on_one_line_whatever_the_names() -> None:
    for line in render(group()).splitlines():
        assert line.startswith(("# HELP", "# TYPE", "remora_", "rpc_")), line


def test_a_group_without_workers_is_no_error() -> None:
    assert render(GroupSnapshot(group="g", time=0.0)).strip() == ""
    assert render(GroupSnapshot(group="g", time=0.0), openmetrics=True) == "# EOF\n"
