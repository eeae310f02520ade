"""Takes the snapshot of a worker. It may be taken on any thread, while every lock of the worker is held by threads that are
stuck: tables are copied, no lock is taken, and no code of the program is run.

Each part is filtered first and cut to the limit after that; `left_out` says how many entries were one too many.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import torch

from remora.introspection import calls, coroutines, links, recorded_calls, reference_lists, threads, wait_finder
from remora.introspection.subject import Subject
from remora.observer.directory import host_name
from remora.observer.model import CallStatus, Pool, Query, WorkerSnapshot

T = TypeVar("T")

_ZERO = 1e-9  # (an age that is measured may be less than nothing, by rounding)


class Cut:
    """Cuts parts to the limit of a query, and counts what is left out."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self.left_out: Counter[str] = Counter()

    def part(
        self, name: str, make: Callable[[], Iterable[T]], fits: Callable[[T], bool], last: bool = False
    ) -> tuple[T, ...]:
        """Return the entries of a part that fit, if it was asked for: the first ones, or the last."""
        if name not in self._query.parts:
            return ()
        found = [each for each in make() if fits(each)]
        more = len(found) - max(self._query.limit, 0)
        if more <= 0:
            return tuple(found)
        self.left_out[name] += more
        return tuple(found[more:] if last else found[:-more])


def take(subject: Subject, query: Query = Query()) -> WorkerSnapshot:
    """Return what a worker says of itself now."""
    agent, cut = subject.agent, Cut(query)
    agent.recorder.fold()
    everybody = threads.look(subject.name) if {"threads", "waits", "calls"} & set(query.parts) else []
    seen = wait_finder.look(subject, everybody, everything="waits" in query.parts)
    kept = cache(subject.references.table.snapshot)  # (there may be very many)
    if "threads" in query.parts and seen.coroutines_left_out:
        cut.left_out["threads"] += seen.coroutines_left_out
    limit, running = agent.pool.limit, agent.pool.counts()
    return WorkerSnapshot(
        name=subject.name,
        rank=subject.record.id,
        group=subject.group,
        incarnation=subject.record.incarnation,
        pid=os.getpid(),
        host=host_name(),
        time=time.time(),
        up=time.monotonic() - subject.joined_at,
        versions=versions(),
        program=program(),
        cpu=time.process_time(),
        interpreter_wait=agent.measure_gil_wait() / 1e6 if agent.gil_profiling else None,
        calls_made=agent.recorder.made,
        calls_served=agent.recorder.served,
        calls_failed=agent.recorder.failures,
        memory=links.memory(subject),
        pool=Pool(
            limit=limit,
            threads=running[0],
            running=running[2],
            queued=len(agent.pool.user_tasks),
            coroutines=coroutines.count(subject),
        ),
        calls=cut.part("calls", lambda: _calls(subject, seen), lambda each: _fits_call(each, query, subject.name)),
        waits=cut.part(
            "waits",
            lambda: sorted(seen.waits, key=lambda each: -(each.age or 0.0)),
            lambda each: _old(each.age, query) and _concerns(query, *each.workers) and _named(query, each.text),
        ),
        owned=cut.part(
            "owned",
            lambda: sorted(reference_lists.owned(kept()), key=lambda each: -each.age),
            lambda each: _old(each.age, query) and _concerns(query, *each.holders) and _named(query, each.function),
        ),
        held=cut.part(
            "held",
            lambda: sorted(reference_lists.held(kept()), key=lambda each: -each.age),
            lambda each: _old(each.age, query) and _concerns(query, each.owner) and _named(query, each.function),
        ),
        passes=cut.part(
            "passes",
            lambda: reference_lists.passes(subject, time.monotonic()),
            lambda each: _old(each.age, query) and _concerns(query, each.started_by, *each.owes, *each.awaits),
        ),
        links=cut.part("links", lambda: links.links(subject), lambda each: _concerns(query, each.peer)),
        events=recorded_calls.events(
            cut.part(
                "events",
                lambda: recorded_calls.seldom_last(
                    recorded_calls.happened(agent.recorder, agent.clock.now(), query.since), query.limit
                ),
                lambda each: (not query.peer or query.peer == recorded_calls.peer_of(each))
                and (not query.function or _named(query, recorded_calls.function_of(each))),
                last=True,
            ),
            subject.name,
        ),
        histograms=cut.part(
            "histograms",
            lambda: sorted(recorded_calls.histograms(agent.recorder), key=lambda each: -each.total),
            lambda each: _concerns(query, each.peer) and _named(query, each.function),
        ),
        threads=cut.part(
            "threads", lambda: [*threads.statuses(everybody, seen.serving), *seen.coroutines], lambda each: True
        ),
        left_out=dict(cut.left_out),
    )


def versions() -> dict[str, str]:
    """Return the versions of what runs here."""
    mine = str(sys.modules["remora"].__version__)  # (of the package itself, which is above this file)
    return {"remora": mine, "torch": str(torch.__version__), "python": platform.python_version()}


def program() -> str:
    """Return the program of this process, as it was started."""
    return " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]])[:200] if sys.argv else "python"


def _calls(subject: Subject, seen: wait_finder.Seen) -> list[CallStatus]:
    running = {key: thread for thread, key in seen.serving.items()}
    found = [*calls.made(subject, seen.waiting), *calls.served(subject, running, seen.makes)]
    return sorted(found, key=lambda each: -each.age)


# Filters.


def _old(age: float | None, query: Query) -> bool:
    """An age that is not known may be any."""
    return age is None or age + _ZERO >= query.older_than


def _named(query: Query, *names: Any) -> bool:
    return not query.function or any(query.function in name for name in names if name)


def _concerns(query: Query, *workers: str | None) -> bool:
    return not query.peer or query.peer in workers


def _fits_call(call: CallStatus, query: Query, me: str) -> bool:
    other = call.callee if call.key.caller == me else call.key.caller
    return _old(call.age, query) and _named(query, call.function) and _concerns(query, other)
