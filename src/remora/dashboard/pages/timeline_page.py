"""Timeline: a row for each thread, a bar for each function that ran and each call that was waited for.

A bar that would be narrower than a dot is put together with its neighbours, so the answer is bounded however many calls
there were. Bars are `[start, length, function, kind, count, call, busy, failed]`: times count from the start of the window,
functions and calls are places in lists (a call only where the bar is one), `busy` is the share of its length in which
anything ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remora.dashboard.moment import Moment
from remora.observer.model import Event, EventKind, Stage

PARTS = ("events", "calls", "threads")
SECONDS = 20.0  # shown if nothing else is asked for
LONGEST = 600.0
ROWS = 80
WORKERS = 16  # unless one is chosen
BARS = 3000
DOTS = 1200

RUN, CALL, ERROR, MANY = range(4)
_KINDS = {
    EventKind.RUN_ENDED: RUN,
    EventKind.RUN_FAILED: ERROR,
    EventKind.CALL_ENDED: CALL,
    EventKind.CALL_FAILED: ERROR,
}


@dataclass(slots=True)
class Bar:
    start: float
    end: float
    function: str
    kind: int
    call: str | None = None
    count: int = 1
    failed: int = 0
    busy: float = 0.0
    functions: Counter[str] = field(default_factory=Counter)


def view(moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]:
    end = _number(arguments.get("end"), moment.snapshot.time)
    seconds = min(max(_number(arguments.get("seconds"), SECONDS), 0.001), LONGEST)
    begin = end - seconds
    worker = path[0] if path else arguments.get("worker", "")
    chosen = [worker] if worker else moment.names[:WORKERS]
    rows = _rows(moment, begin, end, frozenset(chosen))
    # Busy rows first where there are too many, but in a fixed order, so that they do not jump.
    names = {name: place for place, name in enumerate(moment.names)}
    kept = sorted(rows, key=lambda key: -sum(each.end - each.start for each in rows[key]))[:ROWS]
    kept.sort(key=lambda key: (names.get(key[0], 0), key[1] is None, key[1] or 0))
    dot = seconds / min(DOTS, max(BARS // max(len(kept), 1), 20) * 2)
    functions: dict[str, int] = {}
    calls: dict[str, int] = {}
    return {
        "begin": begin,
        "end": end,
        "seconds": seconds,
        "now": "end" not in arguments,
        "rows": [
            {
                "worker": key[0],
                "thread": key[1],
                "name": _thread_name(moment, key),
                "bars": [_tell(each, begin, functions, calls) for each in put_together(rows[key], dot)],
            }
            for key in kept
        ],
        "functions": list(functions),
        "calls": list(calls),
        "left_out": len(rows) - len(kept),
        "chosen": 0 if worker or len(moment.names) <= WORKERS else WORKERS,
        "workers": moment.names[:1000],
    }


def _number(text: str | None, default: float) -> float:
    try:
        found = float(text) if text else default
    except ValueError:
        return default
    return found if abs(found) < 1e12 else default  # neither infinite nor none at all (comparing with NaN is false)


def _rows(moment: Moment, begin: float, end: float, chosen: Collection[str]) -> dict[tuple[str, int | None], list[Bar]]:
    rows: dict[tuple[str, int | None], list[Bar]] = {}
    for name, thread, bar in _bars(moment, begin, chosen):
        if bar.end > begin and bar.start < end:
            bar.start, bar.end = max(bar.start, begin), min(bar.end, end)
            rows.setdefault((name, thread), []).append(bar)
    return rows


def _bars(moment: Moment, begin: float, chosen: Collection[str]) -> Iterator[tuple[str, int | None, Bar]]:
    for name, events in moment.history.events.items():
        if name in chosen:
            for each in reversed(events):
                if each.time < begin:  # they are in order of time, and a bar ends when its event is
                    break
                if each.kind in _KINDS and each.seconds is not None:
                    yield name, each.thread, _bar_of(each)
    now = moment.snapshot.time
    for key, call in moment.calls.items():  # those that have not ended
        ends = ((call.at_callee, call.any.callee, RUN), (call.at_caller, call.any.key.caller, CALL))
        for seen, name, kind in ends:
            under_way = seen is not None and seen.thread is not None and (kind == CALL or seen.stage == Stage.RUNNING)
            if seen is not None and under_way and name in chosen:
                yield name, seen.thread, Bar(now - seen.age, now, seen.function, kind, key)


def _bar_of(event: Event) -> Bar:
    call = None if event.call is None else str(event.call)
    return Bar(event.time - (event.seconds or 0.0), event.time, event.function or "", _KINDS[event.kind], call)


def put_together(bars: Sequence[Bar], dot: float) -> list[Bar]:
    """In order of time; neighbours that are both narrower than a dot, and nearer than one, become one bar of many."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda each: each.start):
        bar.busy = bar.end - bar.start
        bar.failed = int(bar.kind == ERROR)
        last = found[-1] if found else None
        if last is not None and bar.busy < dot and bar.start - last.end < dot and _takes_more(last, dot):
            if last.kind != MANY:
                last.functions[last.function] += 1
                last.kind, last.call = MANY, None
            last.functions[bar.function] += 1
            last.count += 1
            last.failed += bar.failed
            last.busy += bar.busy
            last.end = max(last.end, bar.end)
        else:
            found.append(bar)
    return found


def _takes_more(bar: Bar, dot: float) -> bool:
    """A bar of many stays narrow, so that a pause or a change of functions is seen."""
    return bar.end - bar.start < (8 * dot if bar.kind == MANY else dot)


def _tell(bar: Bar, begin: float, functions: dict[str, int], calls: dict[str, int]) -> list[Any]:
    name = bar.functions.most_common(1)[0][0] if bar.functions else bar.function
    place = functions.setdefault(name, len(functions))
    call = None if bar.call is None else calls.setdefault(bar.call, len(calls))
    busy = round(min(bar.busy / max(bar.end - bar.start, 1e-9), 1.0), 2)
    return [
        round(bar.start - begin, 6),
        round(bar.end - bar.start, 6),
        place,
        bar.kind,
        bar.count,
        call,
        busy,
        bar.failed,
    ]


def _thread_name(moment: Moment, key: tuple[str, int | None]) -> str:
    worker, number = key
    if number is None:
        return "asynchronous"
    thread = moment.threads.get((worker, number))
    return f"thread {number}" if thread is None else thread.name
