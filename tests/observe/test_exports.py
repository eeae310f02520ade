"""What goes to other systems, with their real libraries: Prometheus, OpenTelemetry, torch's debug server."""

from __future__ import annotations

import builtins
import importlib
import itertools
import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from remora.testing.processes import Processes
from tests.observe import exports

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")


@pytest.fixture(scope="module")
def workers(fork_server: None) -> Iterator[Processes]:
    with Processes(3) as found:
        yield found


# Prometheus.


def test_metrics_are_computed_when_they_are_scraped(workers: Processes) -> None:
    first, second = workers.run(0, exports.scrape_twice)
    calls = 'rpc_client_call_duration_seconds_count{{worker="worker0",function="{}"}}'.format
    assert calls("tests.observe.exports.nothing") not in first
    assert second[calls("tests.observe.exports.nothing")] == 3
    assert second["remora_worker_up"] == 1
    assert second["remora_calls_made_total"] >= 3


def test_there_are_no_metrics_without_a_worker() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from remora.observe import prometheus

    registry = CollectorRegistry()
    prometheus.register(registry)
    assert generate_latest(registry) == b""


# OpenTelemetry.

Span = dict[str, Any]


@pytest.fixture(scope="module")
def spans(workers: Processes) -> list[Span]:
    """All spans of a program: of its own on three workers, and of its calls."""
    workers.run_all(exports.use_opentelemetry)
    workers.run(0, exports.program_with_spans)
    return [span for each in workers.run_all(exports.own_spans) for span in each] + workers.run(0, exports.spans_of_calls)


def named(spans: list[Span], name: str, kind: str) -> Span:
    (found,) = [span for span in spans if span["name"].rpartition(".")[2] == name and span["kind"] == kind]
    return found


def test_the_spans_of_a_call_lead_from_the_caller_to_what_the_callee_does(spans: list[Span]) -> None:
    """program > call of middle > middle runs > inside > call of last > last runs > innermost."""
    line = [
        named(spans, "program", "INTERNAL"), named(spans, "middle", "CLIENT"), named(spans, "middle", "SERVER"),
        named(spans, "inside", "INTERNAL"), named(spans, "last", "CLIENT"), named(spans, "last", "SERVER"),
        named(spans, "innermost", "INTERNAL"),
    ]  # fmt: skip
    assert line[0]["parent"] is None
    for above, below in itertools.pairwise(line):
        assert below["parent"] == above["id"], f"the parent of {below['name']} {below['kind']} is not {above['name']}"
        assert below["trace"] == above["trace"]
        assert above["start"] - 5e6 <= below["start"] <= below["end"] <= above["end"] + 5e6
    assert [each["attributes"].get("remora.worker") for each in line[1:3]] == ["worker0", "worker1"]
    assert line[1]["attributes"]["rpc.method"] == "middle"


def test_calls_of_all_kinds_carry_the_span(spans: list[Span]) -> None:
    program = named(spans, "program", "INTERNAL")
    for name in ("without_arguments", "asynchronous", "made_there", "coroutine", "add"):
        call, run = named(spans, name, "CLIENT"), named(spans, name, "SERVER")
        assert call["parent"] == program["id"], name
        assert run["parent"] == call["id"]
    for name in ("coroutine", "made_there"):
        assert named(spans, f"in_{name}", "INTERNAL")["parent"] == named(spans, name, "SERVER")["id"]


def test_calls_of_several_threads_at_once_belong_to_the_span_of_their_thread(spans: list[Span]) -> None:
    for n in range(4):
        thread = named(spans, f"thread {n}", "INTERNAL")
        calls = [each for each in spans if each["kind"] == "CLIENT" and each["parent"] == thread["id"]]
        assert len(calls) == 20
    ids = [each["id"] for each in spans]
    assert len(ids) == len(set(ids))


def test_a_call_outside_of_any_span_begins_a_trace(spans: list[Span]) -> None:
    call, run = named(spans, "alone", "CLIENT"), named(spans, "alone", "SERVER")
    assert call["parent"] is None
    assert run["parent"] == call["id"]
    assert run["trace"] == call["trace"] != named(spans, "program", "INTERNAL")["trace"]


def test_a_call_that_fails_is_a_span_with_an_error(spans: list[Span]) -> None:
    assert {named(spans, "fails", kind)["error"] for kind in ("CLIENT", "SERVER")} == {True}
    assert not named(spans, "middle", "CLIENT")["error"]


def test_a_span_is_exported_once(workers: Processes, spans: list[Span]) -> None:
    assert workers.run(0, exports.spans_of_calls) == []


def test_a_worker_that_does_not_use_opentelemetry_serves_calls_that_carry_a_span(workers: Processes) -> None:
    workers.run(2, exports.use_opentelemetry, enable=False)
    assert workers.run(0, exports.call_in_span, "worker2") == 4
    workers.run(2, exports.use_opentelemetry)


# torch's debug server.


def test_the_debug_server_of_torch_answers_with_a_snapshot(workers: Processes) -> None:
    port = workers.run(1, exports.start_debug_server)

    def ask(query: str) -> tuple[int, Any]:
        request = urllib.request.Request(f"http://localhost:{port}/handler/remora{query}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    status, snapshot = ask("")
    assert (status, snapshot["name"]) == (200, "worker1")
    assert snapshot["threads"]
    status, snapshot = ask("?parts=links")
    assert status == 200
    assert "links" in snapshot
    assert "threads" not in snapshot
    status, answer = ask("?parts=secrets")
    assert status == 400
    assert "secrets" in answer["error"]
    workers.run(1, exports.stop_debug_server)


# Without the libraries.


@pytest.mark.parametrize(
    ("module", "library", "package"),
    [
        ("prometheus", "prometheus_client", "prometheus_client"),
        ("opentelemetry", "opentelemetry", "opentelemetry-sdk"),
    ],
)
def test_a_library_that_is_missing_is_named(
    module: str, library: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, f"remora.observe.{module}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        importlib.import_module(f"remora.observe.{module}")
