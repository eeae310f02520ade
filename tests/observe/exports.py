"""What workers run in the tests of exports."""

from __future__ import annotations

import threading
from typing import Any

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from remora import rpc
from remora.observe import debug_server, opentelemetry, prometheus

# Of the process of each worker.
own = InMemorySpanExporter()  # the program's own spans
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(own))
tracer = provider.get_tracer("program")


def nothing() -> None:
    pass


def scrape_twice() -> list[dict[str, float]]:
    registry = CollectorRegistry()
    prometheus.register(registry)
    found = []
    for _ in range(2):
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                function = sample.labels.get("rpc_method")
                labels = f'{{worker="{sample.labels["worker"]}",function="{function}"}}' if function else ""
                values[sample.name + labels] = sample.value
        found.append(values)
        for _ in range(3):
            rpc.rpc_sync("worker1", nothing)
    return found


def use_opentelemetry(enable: bool = True) -> None:
    opentelemetry.propagate(enable)


def without_arguments() -> None:
    pass


def asynchronous(number: int) -> int:
    return number


def made_there(number: int) -> int:
    with tracer.start_as_current_span("in_made_there"):
        return number


async def coroutine() -> None:
    with tracer.start_as_current_span("in_coroutine"):
        pass


def middle() -> None:
    with tracer.start_as_current_span("inside"):
        rpc.rpc_sync("worker2", last)


def last() -> None:
    with tracer.start_as_current_span("innermost"):
        pass


def alone() -> None:
    pass


def fails() -> None:
    raise ValueError("as it should")


def of_thread(number: int) -> int:
    return number


def program_with_spans() -> None:
    rpc.rpc_sync("worker1", without_arguments_warm)
    with tracer.start_as_current_span("program"):
        rpc.rpc_sync("worker1", middle)
        rpc.rpc_sync("worker1", without_arguments)
        rpc.rpc_async("worker1", asynchronous, args=(1,)).wait()
        assert rpc.remote("worker1", made_there, args=(1,)).to_here() == 1
        rpc.rpc_sync("worker1", coroutine)
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        try:
            rpc.rpc_sync("worker1", fails)
        except ValueError:
            pass
    rpc.rpc_sync("worker1", alone)
    threads = [threading.Thread(target=_thread, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def without_arguments_warm() -> None:
    pass


def _thread(number: int) -> None:
    with tracer.start_as_current_span(f"thread {number}"):
        for n in range(10):
            rpc.rpc_sync("worker1", of_thread, args=(n,))
            rpc.rpc_async("worker2", of_thread, args=(n,)).wait()


def call_in_span(to: str) -> int:
    with tracer.start_as_current_span("caller"):
        return rpc.rpc_sync(to, of_thread, args=(4,))


def own_spans() -> list[dict[str, Any]]:
    return [_told(each) for each in own.get_finished_spans()]


_known: frozenset[str] = frozenset()


def spans_of_calls() -> list[dict[str, Any]]:
    global _known
    exporter = InMemorySpanExporter()
    calls = TracerProvider()
    calls.add_span_processor(SimpleSpanProcessor(exporter))
    _known = opentelemetry.export(calls, _known)
    return [_told(each) for each in exporter.get_finished_spans()]


def _told(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    return {
        "name": span.name, "kind": span.kind.name, "id": span.context.span_id, "trace": span.context.trace_id,
        "parent": None if span.parent is None else span.parent.span_id, "start": span.start_time, "end": span.end_time,
        "attributes": dict(span.attributes or {}), "error": span.status.status_code is trace.StatusCode.ERROR,
    }  # fmt: skip


_server: Any = None


def start_debug_server() -> int:
    global _server
    from torch._C._distributed_c10d import _WorkerServer

    debug_server.register()
    _server = _WorkerServer("::", 0)
    return int(_server.port)


def stop_debug_server() -> None:
    _server.shutdown()
