"""The threads of this process and where they are: their stacks, and what the frames of Remora in them say.

A thread that makes a call or serves a request notes that nowhere, so it costs nothing. To know it, look at the frames:
the one that waits for a reply has the call among its variables. Only variables of Remora's own frames are looked at here.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from types import FrameType
from typing import Any

from remora.agent.runtime import event_loop
from remora.agent.serving.dispatch import Request
from remora.observer.model import CallKey, ThreadStatus

DEEPEST = 200  # frames of a stack; of a deeper one the middle is left out
_SERVES = Request.__call__.__code__
FOLLOWS = event_loop._follow.__code__  # the outermost frame of a coroutine that serves a request
_OURS = re.compile(r"remora-(?:faults-)?(.+)-(\d+|timers|loop|observer)|remora-faults-(.+)")
_ROLES = {"timers": "timers", "loop": "event loop", "observer": "observer"}


@dataclass(frozen=True)
class Thread:
    """One thread of this process at one moment."""

    id: int
    name: str
    role: str
    frames: tuple[FrameType, ...]  # the innermost first

    @property
    def request(self) -> Request | None:
        """The request that the thread serves; of an event loop's thread, what the coroutine serves that runs."""
        for frame in self.frames:
            if frame.f_code is _SERVES:
                return frame.f_locals.get("self")
            if frame.f_code is FOLLOWS:
                return request_of(frame.f_locals.get("done"))
        return None

    @property
    def stack(self) -> tuple[str, ...]:
        """Return "file:line function" of each frame, the innermost last."""
        return stack_of(self.frames[::-1])


def stack_of(frames: tuple[FrameType, ...]) -> tuple[str, ...]:
    """Return "file:line function" of each frame, the innermost last."""
    lines = [f"{each.f_code.co_filename}:{each.f_lineno} {each.f_code.co_qualname}" for each in frames]
    if len(lines) > DEEPEST:
        half = DEEPEST // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} more frames", *lines[-half:]]
    return tuple(lines)


def request_of(done: Any) -> Request | None:
    """Return the request that is answered by what a coroutine does at its end."""
    owners = [getattr(done, "__self__", None), *captured(done)]
    return next((each for each in owners if isinstance(each, Request)), None)


def captured(function: Any) -> list[Any]:
    """Return what a function of ours has from outside."""
    return [each.cell_contents for each in getattr(function, "__closure__", None) or ()]


def key_of(request: Request) -> CallKey:
    """Return the name of the call that a request answers."""
    return CallKey(caller=request.caller.name, id=request.frame.call)


def look(worker: str) -> list[Thread]:
    """Return all threads of this process but those of other workers, and but this one. Takes no lock: the one of the
    `threading` module may be held by a thread that is stuck."""
    known: dict[int, threading.Thread] = getattr(threading, "_active", {}).copy()
    here = threading.get_ident()
    main = threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        thread = known.get(ident)
        name = f"thread {ident}" if thread is None else thread.name
        role = "main" if ident == main else role_of(name, worker)
        if ident != here and role is not None:
            found.append(Thread(ident, name, role, tuple(outward(frame))))
    return found


def role_of(name: str, worker: str) -> str | None:
    """Return what a thread is for, by its name. None for one of another worker."""
    match = _OURS.fullmatch(name)
    if name.startswith("remora-observing"):
        return "observer"
    if match is None:
        return "program"
    if match[3] is not None:
        return "faults"
    return _ROLES.get(match[2], "pool") if match[1] == worker else None


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the innermost first. They are found in C, in one step of the interpreter, so
    that their thread does not run on meanwhile: a frame was seen to lead to what is none."""
    found: deque[Any] = deque()
    try:
        found.extend(accumulate(repeat("f_back"), getattr, initial=frame))
    except AttributeError:
        found.pop()  # None, which called the outermost
    return iter(found)


def statuses(threads: list[Thread], serving: dict[int, CallKey]) -> list[ThreadStatus]:
    """Return what an observer is told of the threads. `serving`: by thread, the call that it serves."""
    return [
        ThreadStatus(id=each.id, name=each.name, role=each.role, stack=each.stack, serving=serving.get(each.id))
        for each in threads
    ]
