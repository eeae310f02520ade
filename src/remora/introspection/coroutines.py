"""The coroutines of a worker: where they are, and what they wait for. Runs no code of the program.

An event loop is found on the stack of the thread that runs it: Remora's own, and those of the program. What a task waits for
follows from the frames of the coroutines that await each other, as for a thread. A task that waits for others (`gather`,
`wait_for`, a task group) waits for what they wait for. While a loop runs something that blocks, all that it serves wait.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events, events, locks, tasks
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import CO_COROUTINE
from types import CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

from remora.agent.calls.future import Future
from remora.agent.runtime.clean_state import InItsOwnState
from remora.agent.serving.dispatch import Request
from remora.devices.streams import OnItsOwnStreams
from remora.introspection.calls import copied, steadily
from remora.introspection.locks import held_in, name_of_awaited
from remora.introspection.subject import Subject
from remora.introspection.threads import FOLLOWS, Thread, captured, key_of, request_of, stack_of
from remora.observer.model import CallKey, ThreadStatus, WaitKind, WaitStatus
from remora.rref.value import Value

DEEPEST = 100  # coroutines that await each other, and tasks that do
MOST_OF_ONE = 16  # waits of one task
MOST_SHOWN = 2000  # coroutines of a worker whose stacks are shown

OfFuture = Callable[[Future[Any]], "list[WaitStatus] | None"]

_ROUND = base_events.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]
_STEP = events.Handle._run.__code__
_UNTIL = base_events.BaseEventLoop.run_until_complete.__code__
_ACQUIRE = locks.Lock.acquire.__code__
_WAIT_FOR = tasks.wait_for.__code__
_WAIT = tasks._wait.__code__  # type: ignore[attr-defined]
_EXIT = asyncio.TaskGroup.__aexit__.__code__ if hasattr(asyncio, "TaskGroup") else None


@dataclass(frozen=True)
class Loop:
    """An event loop, and the thread that runs it."""

    loop: asyncio.AbstractEventLoop
    thread: Thread
    busy: bool  # it runs a step of a task, or a callback
    until: Any  # the future at whose end the thread goes on; None: there is none


@dataclass(frozen=True)
class Coroutine:
    """A task of an event loop that does not run at this moment."""

    task: Any
    frames: tuple[FrameType, ...]  # the innermost last
    request: Request | None  # what it serves
    makes: Value | None  # of what it serves: the value that is made


def count(subject: Subject) -> int:
    """Return how many tasks are on the event loop of a worker."""
    loop = subject.agent.coroutines.loop
    return 0 if loop is None else len(steadily(lambda: asyncio.all_tasks(loop)))


def look(threads: list[Thread]) -> list[tuple[Loop, list[Coroutine]]]:
    """Return the event loops that run, with the tasks of each that wait."""
    return [(loop, _coroutines(loop.loop)) for thread in threads for loop in _loops(thread)]


def _loops(thread: Thread) -> Iterator[Loop]:
    busy = False
    found: asyncio.AbstractEventLoop | None = None
    for frame in thread.frames:
        busy = busy or (found is None and frame.f_code is _STEP)
        if frame.f_code is _ROUND and found is None:
            found = frame.f_locals.get("self")
        elif frame.f_code is _UNTIL and found is not None:
            yield Loop(found, thread, busy, frame.f_locals.get("future"))
            return
    if found is not None:
        yield Loop(found, thread, busy, None)


def _coroutines(loop: asyncio.AbstractEventLoop) -> list[Coroutine]:
    runs = asyncio.current_task(loop)
    found = []
    for task in steadily(lambda: asyncio.all_tasks(loop)):
        if task is not runs:
            frames = tuple(_frames(task.get_coro()))
            follows = next((each for each in frames if each.f_code is FOLLOWS), None)
            done = None if follows is None else follows.f_locals.get("done")
            makes = next((each for each in captured(done) if isinstance(each, Value)), None)
            found.append(Coroutine(task, frames, request_of(done), makes))
    return found


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Of a coroutine, and of what it awaits, and so on."""
    for _ in range(DEEPEST):
        if type(awaited) in (InItsOwnState, OnItsOwnStreams):
            awaited = awaited._steps
            continue
        if type(awaited) is CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif type(awaited) is GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            return
        if frame is None:
            return
        yield frame


# What they wait for.


def waits(subject: Subject, found: list[tuple[Loop, list[Coroutine]]], of_future: OfFuture) -> Iterator[WaitStatus]:
    """Yield what the coroutines of a worker wait for, and the threads that run its event loops."""
    for loop, coroutines in found:
        yield from _Waits(subject, loop, coroutines, of_future).all()


class _Waits:
    """Finds what the coroutines of one event loop wait for."""

    def __init__(self, subject: Subject, loop: Loop, coroutines: list[Coroutine], of_future: OfFuture) -> None:
        self._dispatch = subject.agent.dispatch
        self._name = subject.name
        self._loop = loop
        self._coroutines = coroutines
        self._of_future = of_future
        self._of_task = {id(each.task): each for each in coroutines}

    def all(self) -> Iterator[WaitStatus]:
        yield from self._of_tasks()
        if self._loop.busy and self._loop.thread.role == "event loop":
            yield from self._not_begun()

    def _not_begun(self) -> Iterator[WaitStatus]:
        """Coroutines that a loop which is blocked has not begun."""
        begun = {id(each.request) for each in self._coroutines}
        for request in copied(self._dispatch.serving).values():
            waits = id(request) not in begun and request is not self._loop.thread.request and not request.answered
            if waits and _is_async(request.function):
                yield self._for_loop(key_of(request))

    def _for_loop(self, serving: CallKey) -> WaitStatus:
        return WaitStatus(kind=WaitKind.LOOP, text="the event loop", serving=serving, holder=self._loop.thread.id)

    def _of_tasks(self) -> Iterator[WaitStatus]:
        awaited = {id(other) for each in self._coroutines for other in self._awaited_by(each)[0]}
        thread = self._loop.thread
        until = self._of_task.get(id(self._loop.until))
        if until is not None and not self._loop.busy:
            awaited.add(id(until.task))
            yield from (replace(each, thread=thread.id) for each in self._of(until))
        for each in self._coroutines:
            request = each.request
            if id(each.task) in awaited or (request is not None and request._dispatch is not self._dispatch):
                continue  # what awaits it says so, or it serves another worker of this process
            serving = None if request is None else key_of(request)
            yield from (replace(wait, serving=serving) for wait in self._of(each))
            if self._loop.busy and serving is not None:
                yield self._for_loop(serving)

    def _of(self, coroutine: Coroutine) -> list[WaitStatus]:
        """Return what one coroutine waits for; nothing if that is not known."""
        found: list[WaitStatus] = []
        ahead, seen = [(coroutine, False)], {id(coroutine.task)}
        while ahead and len(found) < MOST_OF_ONE:
            each, limited = ahead.pop()
            limited = limited or any(_is_for_a_while(frame) for frame in each.frames)
            own = self._itself(each)
            found += (replace(wait, limited=wait.limited or limited) for wait in own)
            others, timed = ([], False) if own else self._awaited_by(each)
            for other in others:
                if not isinstance(other, Future) and id(other) in self._of_task and id(other) not in seen:
                    seen.add(id(other))
                    ahead.append((self._of_task[id(other)], limited or timed))
        return found[:MOST_OF_ONE]

    def _itself(self, coroutine: Coroutine) -> list[WaitStatus]:
        if not coroutine.frames:
            return []
        last = coroutine.frames[-1]
        if last.f_code is Future.__await__.__code__:
            future = last.f_locals.get("self")
            found = self._of_future(future) if isinstance(future, Future) and not future._settled else None
            return [each for each in found or () if each.call is None or each.call.caller == self._name]
        return self._lock(coroutine, last.f_locals.get("self")) if last.f_code is _ACQUIRE else []

    def _lock(self, coroutine: Coroutine, lock: Any) -> list[WaitStatus]:
        """A lock of asyncio. It is known who holds it if that is inside an `async with`."""
        own = [each for each in coroutine.frames if each.f_code.co_filename != locks.__file__]
        if type(lock) is not locks.Lock or not own:
            return []
        holder = next((each for each in self._coroutines if self._holds(each, lock, coroutine)), None)
        call = None if holder is None or holder.request is None else key_of(holder.request)
        place = f"{own[-1].f_code.co_filename}:{own[-1].f_lineno}"
        return [WaitStatus(kind=WaitKind.LOCK, text=f"the lock {name_of_awaited(own[-1])} at {place}", call=call)]

    @staticmethod
    def _holds(holder: Coroutine, lock: Any, waiter: Coroutine) -> bool:
        return holder is not waiter and any(held_in(frame, lock) for frame in holder.frames)

    @staticmethod
    def _awaited_by(coroutine: Coroutine) -> tuple[list[Any], bool]:
        """The tasks that one waits for, as far as that is known; True if for a time only."""
        for frame in reversed(coroutine.frames):
            names: Any = frame.f_locals if frame.f_code in (_WAIT_FOR, _WAIT, _EXIT) else {}
            if frame.f_code is _WAIT_FOR and names.get("fut") is not None:
                return [names["fut"]], False
            if frame.f_code is _WAIT and names.get("return_when") == asyncio.ALL_COMPLETED:
                return list(names["fs"]), names.get("timeout") is not None
            if frame.f_code is _EXIT:
                return list(getattr(names.get("self"), "_tasks", ())), False
        waiter: Any = getattr(coroutine.task, "_fut_waiter", None)
        if type(waiter) is tasks._GatheringFuture:  # type: ignore[attr-defined]
            return list(waiter._children), False
        return [] if waiter is None else [waiter], False


def _is_for_a_while(frame: FrameType) -> bool:
    """Return True of a `wait_for`. (It waits for a task of its own or, since Python 3.12, for the thing itself.)"""
    return frame.f_code is _WAIT_FOR and frame.f_locals.get("timeout") is not None


def _is_async(function: Any) -> bool:
    function = function.__func__ if type(function) is MethodType else function
    return type(function) is FunctionType and bool(function.__code__.co_flags & CO_COROUTINE)


# Where they are.


def statuses(subject: Subject, found: list[tuple[Loop, list[Coroutine]]]) -> tuple[list[ThreadStatus], int]:
    """Return where the coroutines of a worker are, as if each were a thread, and how many more there are."""
    dispatch = subject.agent.dispatch
    everything = [each for _, coroutines in found for each in coroutines]
    own = [each for each in everything if each.request is None or each.request._dispatch is dispatch]
    return [_status(each) for each in own[:MOST_SHOWN]], max(len(own) - MOST_SHOWN, 0)


def _status(coroutine: Coroutine) -> ThreadStatus:
    name = _name(coroutine.task)
    return ThreadStatus(
        id=id(coroutine.task),
        name=f"coroutine {name}",
        role="coroutine",
        stack=stack_of(coroutine.frames),
        serving=None if coroutine.request is None else key_of(coroutine.request),
        task=name,
    )


def _name(task: Any) -> str:
    return str(task.get_name())[:200] if type(task) is asyncio.Task else "of the program"
