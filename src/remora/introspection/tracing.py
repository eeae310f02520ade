"""Traces of this worker: all calls that end while one is being made, and torch's operators if they are asked for.

An observer begins a trace and ends it. It also ends by itself, so an observer that goes away leaves nothing behind. The
recorder hands over what it folds (`Recorder.subscribe`), which costs the threads that make calls nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remora.introspection.operators import OperatorProfile
from remora.introspection.visitors import NEVER, Later
from remora.observer.trace_rows import Rows
from remora.options import check_timeout
from remora.recorder import Raw, Recorder

MOST_TRACES = 4  # at a time
MOST_ENDS = 100_000  # of calls, in one trace: more are counted, and lost
LONGEST = 3600.0  # seconds
KEPT = 30.0  # seconds after its end for which a trace waits to be taken
GLANCE = 0.05  # seconds between two looks at a profiler that starts or ends


@dataclass
class _Trace:
    """One trace. `ends` grows on the thread that folds; `over` is set once."""

    until: float  # when it ends by itself
    expires: float  # when it is forgotten
    profile: OperatorProfile | None = None
    ends: list[Raw] = field(default_factory=list)
    lost: int = 0
    begun_at: float = 0.0  # by the wall clock
    over: bool = False
    threads: dict[int, str] = field(default_factory=dict)  # names by number, also of threads that have ended since
    native: dict[int, int] = field(default_factory=dict)  # numbers by the number that the system has

    def see_threads(self) -> None:
        """Take note of who is there."""
        # (`threading.enumerate` takes a lock, which a thread that is stuck may hold)
        known: dict[int, threading.Thread] = getattr(threading, "_active", {}).copy()
        for each in known.values():
            if each.ident is not None and each.native_id is not None:
                self.threads[each.ident] = each.name
                self.native[each.native_id] = each.ident

    def hear(self, batch: list[Raw]) -> None:
        """The recorder folded these."""
        now = time.monotonic()
        if now > self.expires:
            self.ends = []  # no observer takes them any more
        if not self.over and now <= self.until:
            room = max(MOST_ENDS - len(self.ends), 0)
            self.ends += batch[:room]
            self.lost += max(len(batch) - room, 0)


class Traces:
    """The traces of one worker. `now` is its clock, by which the recorder's times are."""

    def __init__(self, name: str, recorder: Recorder, failed: int, now: Callable[[], float]) -> None:
        self._name = name
        self._recorder = recorder
        self._failed = failed
        self._now = now
        self._traces: dict[str, _Trace] = {}  # only the observer's thread uses it

    def begin(self, id: str, seconds: float, torch: bool = False) -> Any:
        """Begin a trace that an observer calls `id`; it takes at most so many seconds. Answered when it has begun."""
        self.drop_expired()
        if id in self._traces:
            raise ValueError(f"a trace {id[:40]!r} is being made already")
        if len(self._traces) >= MOST_TRACES:
            raise ValueError(f"{MOST_TRACES} traces of {self._name} are being made already: end one, or try again later")
        seconds = min(check_timeout(seconds, "seconds"), LONGEST)
        until = time.monotonic() + seconds
        self._traces[id] = trace = _Trace(until, until + KEPT, OperatorProfile(self._name, seconds) if torch else None)
        return self._begun(trace)

    def _begun(self, trace: _Trace) -> Any:
        if trace.profile is not None and not trace.profile.begun:
            return Later(GLANCE, lambda: self._begun(trace))
        if trace.over:
            raise ValueError("the trace was ended before it had begun")
        self._recorder.fold()  # what is over already belongs to no trace
        trace.see_threads()
        trace.begun_at = time.time()
        self._recorder.subscribe(trace.hear)
        return {"time": trace.begun_at, "note": "" if trace.profile is None else trace.profile.problem}

    def end(self, id: str) -> Any:
        """End a trace. Answered with what was recorded; None if there is no such trace (any more)."""
        trace = self._traces.get(id)
        if trace is None:
            return None
        if trace.profile is not None:
            trace.profile.end()
        return Later(GLANCE, lambda: self._ended(id))  # another thread may be about to fold what has ended until now

    def _ended(self, id: str) -> Any:
        trace = self._traces.get(id)
        if trace is None:
            return None
        profile = trace.profile
        if profile is not None and not profile.ended:
            return Later(GLANCE, lambda: self._ended(id))
        self._close(self._traces.pop(id))
        rows = Rows.of(trace.ends, self._failed, time.time() - self._now())
        rows.lost += trace.lost
        return {
            "rows": rows.to_json(),
            "notes": [list(note) for note in self._recorder.notes() if note.time >= trace.begun_at],
            "threads": {str(number): name for number, name in trace.threads.items()},
            "native": {str(native): number for native, number in trace.native.items()},
            "operators": [] if profile is None else profile.operators,
            "note": "" if profile is None else profile.problem,
        }

    def drop_expired(self) -> float:
        """Forget the traces that no observer ended. Return when the next one expires."""
        now = time.monotonic()
        for id, trace in list(self._traces.items()):
            if now >= trace.expires:
                self._close(self._traces.pop(id))
        return min((trace.expires for trace in self._traces.values()), default=NEVER)

    def close(self) -> None:
        """The worker ends."""
        for trace in self._traces.values():
            self._close(trace)
        self._traces.clear()

    def _close(self, trace: _Trace) -> None:
        self._recorder.fold()
        trace.over = True
        trace.see_threads()
        self._recorder.unsubscribe(trace.hear)
        if trace.profile is not None:
            trace.profile.end()
