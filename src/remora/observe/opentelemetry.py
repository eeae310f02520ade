"""Calls as a part of OpenTelemetry traces.

    from remora.observe import opentelemetry
    opentelemetry.propagate()                   # in every worker: spans travel with calls from now on
    …
    known = opentelemetry.export(tracer_provider)           # in one worker: what the group remembers, as spans
    known = opentelemetry.export(tracer_provider, known)    # later: what is new

`propagate` has a call that is made inside a span carry the span's `traceparent`. What the callee's program does inside its
function belongs to the same trace. `export` makes the spans of the calls themselves, two for each: one at the caller and one
at the callee. No span is made on the path of a call. The spans have ids that follow from the trace and the name of the call
(caller and number), so that both ends, and the spans of the program between them, agree on parents without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from remora.agent.calls.call import NEVER, current_serving
from remora.agent.calls.call_trace import tracing
from remora.observe.snapshots import group_snapshot
from remora.observer.model import CallKey, Event, EventKind, GroupSnapshot, Query

try:
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("remora.observe.opentelemetry needs OpenTelemetry: pip install opentelemetry-sdk") from error

CALL, RUN = "call", "run"  # the two ends
KINDS = {
    EventKind.CALL_ENDED: CALL, EventKind.CALL_FAILED: CALL, EventKind.RUN_ENDED: RUN, EventKind.RUN_FAILED: RUN,
}  # fmt: skip
FAILED = (EventKind.CALL_FAILED, EventKind.RUN_FAILED)
QUERY = Query(parts=("events",), limit=1_000_000)

_scope = InstrumentationScope("remora")
_format = TraceContextTextMapPropagator()


def propagate(enable: bool = True) -> None:
    """Have calls carry the current span along, and functions that serve calls run inside it; or no more."""
    tracing.tracer = _Propagation() if enable else None


class _Propagation:
    """The tracer that the agent asks."""

    def outgoing(self) -> str | None:
        """The current span, if there is one. The recorder remembers it with the call that is made next (`Serving`)."""
        span = trace.get_current_span().get_span_context()
        text = traceparent(span) if span.is_valid else None
        serving = current_serving.get()
        if text is not None:
            deadline, caller, number = (NEVER, "", 0) if serving is None else serving[:3]
            current_serving.set((deadline, caller, number, text))
        elif serving is not None and len(serving) > 3:  # of a call that was made before
            current_serving.set(None if not serving[1] else serving[:3])
        return text

    def arrived(self, caller: str, call: int, trace_of_call: str) -> None:
        """Make the callee's end of the call the current span."""
        span = parse(trace_of_call)
        if span is not None:
            id = span_id(RUN, span.trace_id, CallKey(caller=caller, id=call))
            served = SpanContext(span.trace_id, id, True, span.trace_flags, span.trace_state)
            context.attach(trace.set_span_in_context(NonRecordingSpan(served)))  # (until the context of the call ends)


def traceparent(span: SpanContext) -> str:
    """A span as W3C writes it."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


def parse(text: str) -> SpanContext | None:
    """The reverse of `traceparent`; None if that makes no sense."""
    span = trace.get_current_span(_format.extract({"traceparent": text}, context=context.Context())).get_span_context()
    return span if span.is_valid else None


def span_id(end: str, trace_id: int, key: CallKey) -> int:
    """The id of the span of one end of a call."""
    return _hash(f"{end} {trace_id:032x} {key}", 8)


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest()) or 1


# From events to spans.


def export(
    provider: TracerProvider, known: frozenset[str] = frozenset(), group: GroupSnapshot | None = None
) -> frozenset[str]:
    """Give the calls that the workers of the group remember to the processors of `provider`, as spans, but those that are
    `known`. Return the names of all, which are known the next time. `group`: a snapshot with events; None: take one."""
    processor: object = provider._active_span_processor  # (no public name leads to spans that ended in the past)
    names = []
    for name, span in spans_of(group_snapshot(QUERY) if group is None else group):
        names.append(name)
        if name not in known:
            processor.on_end(span(provider))  # type: ignore[attr-defined]
    return frozenset(names)


def spans_of(group: GroupSnapshot) -> Iterator[tuple[str, Callable[[TracerProvider], ReadableSpan]]]:
    """The name of each end of a call, and its span, once the provider is known."""
    ends = list(_ends(group))
    parents = {event.call: event.parent for _, _, event, _ in ends if KINDS[event.kind] == CALL and event.call}
    traces = {event.call: span for _, _, event, span in ends if event.call and span is not None}
    made = set(parents)
    for worker, offset, event, _ in ends:
        if event.call is not None:
            name = f"{worker} {KINDS[event.kind]} {event.call}"
            yield name, _span(worker, offset, event, event.call, parents, traces, made)


def _ends(group: GroupSnapshot) -> Iterator[tuple[str, float, Event, SpanContext | None]]:
    """The ends of calls: the worker, its clock, the event, and the span in which the call was made."""
    for worker in group.workers:
        offset = group.clock_offsets.get(worker.name, 0.0)
        for event in worker.events:
            if event.kind in KINDS and event.call is not None and event.seconds is not None:
                yield worker.name, offset, event, parse(event.trace) if event.trace else None


def _span(
    worker: str,
    offset: float,
    event: Event,
    key: CallKey,
    parents: dict[CallKey, CallKey | None],
    traces: dict[CallKey, SpanContext],
    made: Iterable[CallKey],
) -> Callable[[TracerProvider], ReadableSpan]:
    end = KINDS[event.kind]
    trace_id = _trace_id(key, parents, traces)
    above = _parent(end, key, trace_id, parents, traces, made)
    seconds = event.seconds or 0.0
    finish = round((event.time - offset) * 1e9)
    service, _, method = (event.function or "").rpartition(".")
    attributes: dict[str, str | int] = {
        "rpc.system.name": "remora", "rpc.service": service, "rpc.method": method, "remora.worker": worker,
        "remora.peer": event.peer or "", "remora.call": str(key),
    }  # fmt: skip

    def make(provider: TracerProvider) -> ReadableSpan:
        return ReadableSpan(
            name=event.function or "call",
            context=SpanContext(trace_id, span_id(end, trace_id, key), False, TraceFlags(TraceFlags.SAMPLED)),
            parent=None if above is None else SpanContext(trace_id, above, True, TraceFlags(TraceFlags.SAMPLED)),
            resource=provider.resource,
            attributes=attributes,
            kind=SpanKind.CLIENT if end == CALL else SpanKind.SERVER,
            status=Status(StatusCode.ERROR if event.kind in FAILED else StatusCode.UNSET),
            start_time=finish - round(seconds * 1e9),
            end_time=finish,
            instrumentation_scope=_scope,
        )

    return make


def _trace_id(key: CallKey, parents: dict[CallKey, CallKey | None], traces: dict[CallKey, SpanContext]) -> int:
    """The trace of the span in which a call, or the call that it was made for, was made. Without one, the outermost call
    begins a trace of its own."""
    seen = {key}
    while key not in traces:
        above = parents.get(key)
        if above is None or above in seen:
            return _hash(f"trace {key}", 16)
        seen.add(above)
        key = above
    return traces[key].trace_id


def _parent(
    end: str,
    key: CallKey,
    trace_id: int,
    parents: dict[CallKey, CallKey | None],
    traces: dict[CallKey, SpanContext],
    made: Iterable[CallKey],
) -> int | None:
    """The id of the span around one: around the callee's end is the caller's, around that the span of the program, or the
    callee's end of the call for which it was made."""
    if end == RUN and key in made:
        return span_id(CALL, trace_id, key)
    if key in traces:
        return traces[key].span_id
    above = parents.get(key)
    return None if end == RUN or above is None else span_id(RUN, trace_id, above)
