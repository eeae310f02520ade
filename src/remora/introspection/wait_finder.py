"""Finds what the threads and coroutines of a worker wait for, by their frames.

Each function of Remora in which a thread waits for something remote has an entry in a table here, or registers itself
(`explains`): from its variables follows what it waits for. A thread that waits therefore notes nothing. For a thread of the
program that is in none of these, a lock that it may wait for is looked for (`remora.introspection.locks`).
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.thread import _WorkItem
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from remora.agent.agent import Agent
from remora.agent.calls.blocking import block_until
from remora.agent.calls.call import Call
from remora.agent.calls.collect import _Members
from remora.agent.calls.future import Future
from remora.agent.channel.outbox import Outbox
from remora.agent.channel.waiter_reads import WaiterReads
from remora.agent.peers import greeting
from remora.autograd.engine import Engine
from remora.introspection import coroutines
from remora.introspection.calls import copied, served
from remora.introspection.locks import blocked_at
from remora.introspection.reference_lists import id_text
from remora.introspection.subject import Subject
from remora.introspection.threads import FOLLOWS, Thread, captured, key_of, outward
from remora.names import LONGEST, function_name
from remora.observer.model import CallKey, Stage, ThreadStatus, WaitKind, WaitStatus
from remora.rref.handle import Handle
from remora.rref.handlers import RefHandlers, fetches_of
from remora.rref.ref_table import Table
from remora.rref.value import Value

MOST_OF_ONE = 16  # waits of one thread: it may wait for a collection of a thousand calls

Variables = dict[str, Any]  # of a frame
# None: it does not wait there, and frames further out may say more. Nothing: it is a thread of another worker.
Explanation = Callable[[Variables, Subject], list[WaitStatus] | None]

_EXPLANATIONS: dict[CodeType, Explanation] = {}
_MAKES = RefHandlers._make.__code__
_RUNS = _WorkItem.run.__code__


def explains(function: Any) -> Callable[[Explanation], Explanation]:
    """Decorate what says for which things a thread waits that is in `function`, which is Remora's."""

    def register(explanation: Explanation) -> Explanation:
        _EXPLANATIONS[function.__code__] = explanation
        return explanation

    return register


# What the frames say.


def for_call(call: Call, kind: WaitKind = WaitKind.CALL) -> WaitStatus:
    """A wait for a call of this worker."""
    peer = call.peer
    if kind is WaitKind.LINK:
        text = f"until {peer.name} has taken what was sent before"
    else:
        text = f"{function_name(call.target)} on {peer.name}"
    return WaitStatus(
        kind=kind,
        text=text,
        age=call.age,
        call=CallKey(caller=peer.me, id=call.id),
        workers=(peer.name,),
    )


@explains(WaiterReads.await_reply)
def _reply(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    call = variables.get("call")
    return [for_call(call)] if isinstance(call, Call) and not call.settled else None


@explains(Outbox.wait_for_room)
def _room(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    call = variables.get("call")
    return [for_call(call, WaitKind.LINK)] if isinstance(call, Call) else None


@explains(Future._await_outcome)
def _future(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    future = variables.get("self")
    found = None if future is None or future._settled else of_future(future)
    return found and [replace(each, limited=variables.get("timeout") is not None) for each in found]


def of_future(future: Future[Any]) -> list[WaitStatus] | None:
    """Explain what settles a future. None if only the code that made it knows."""
    of = future._of
    if isinstance(of, Call):
        return [for_call(of)]
    if isinstance(of, _Members):
        found: list[WaitStatus] = []
        for each in of._futures:
            if isinstance(each, Future) and not each._settled:
                found += of_future(each) or []
            if len(found) >= MOST_OF_ONE:
                break
        return found[:MOST_OF_ONE] or None
    return None


@explains(Handle.wait_for_own)
def _value(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    handle, value = variables.get("self"), variables.get("value")
    if handle is None or value is None or value.ready:
        return None
    if handle.references is not subject.references:
        return []
    return [_for_value(value, subject)]


def _for_value(value: Value, subject: Subject) -> WaitStatus:
    rref = id_text(value.id)
    return WaitStatus(kind=WaitKind.REFERENCE, text=f"the value {rref}", reference=rref, workers=(subject.name,))


@explains(Engine._outcome)
def _pass(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    this = variables.get("this")
    if this is None or variables.get("self") is not subject.autograd:
        return None if this is None else []
    workers = tuple(sorted({*this.owes(), *this.awaits()} - {subject.name}) or sorted(peer.name for peer in list(this.told)))
    text = f"backward pass {this.number} in context {this.context.id}"
    return [WaitStatus(kind=WaitKind.BACKWARD, text=text, context=this.context.id, workers=workers)]


@explains(Agent.idle)
def _idle(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    if variables.get("self") is not subject.agent:
        return []
    busy = tuple(peer.name for peer in subject.agent.peers.all() if peer.outgoing.pending)
    callers = tuple(request.caller.name for request in copied(subject.agent.dispatch.serving).values())
    text = "until no call is under way"
    return [WaitStatus(kind=WaitKind.SHUTDOWN, text=text, workers=tuple(dict.fromkeys(busy + callers)))]


@explains(Table.delete_all)
def _references(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    mine = variables.get("self") is subject.references.table
    return [WaitStatus(kind=WaitKind.SHUTDOWN, text="until all references are settled")] if mine else []


@explains(greeting._await_call_of)
def _greeting(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    peer = variables.get("peer")
    if peer is None or variables.get("agent") is not subject.agent:
        return None if peer is None else []
    return [WaitStatus(kind=WaitKind.JOIN, text=f"{peer.name} to greet this worker", workers=(peer.name,))]


@explains(threading.Thread.join)
def _joined(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    thread = variables.get("self")
    limited = variables.get("timeout") is not None
    return None if thread is None else [_for_thread(thread, "thread {} to end", limited)]


@explains(concurrent.futures.Future.result)
@explains(concurrent.futures.Future.exception)
def _of_executor(variables: Variables, subject: Subject) -> list[WaitStatus] | None:
    future = variables.get("self")
    known = threading._active.copy()  # type: ignore[attr-defined]
    for ident, frame in sys._current_frames().items():
        if ident in known and any(each.f_locals["self"].future is future for each in outward(frame) if each.f_code is _RUNS):
            return [_for_thread(known[ident], "what thread {} runs", variables.get("timeout") is not None)]
    return None  # it has not begun, or no thread runs it


def _for_thread(thread: threading.Thread, text: str, limited: bool) -> WaitStatus:
    """A wait for a thread. Its class may be the program's: none of its properties is asked."""
    fields = object.__getattribute__(thread, "__dict__")
    name = str(fields.get("_name", "?"))[:LONGEST]
    return WaitStatus(kind=WaitKind.THREAD, text=text.format(name), holder=fields.get("_ident"), limited=limited)


# All of a worker.


@dataclass(frozen=True)
class Seen:
    """The present work of a worker's threads."""

    waits: list[WaitStatus]
    serving: dict[int, CallKey]  # by thread
    waiting: dict[int, int]  # by the number of a call of ours: the thread that waits for it
    coroutines: list[ThreadStatus]
    coroutines_left_out: int  # they are too many to be looked at one by one
    makes: dict[CallKey, str]  # by call that is served: the value that it makes


def look(subject: Subject, threads: list[Thread], everything: bool = True) -> Seen:
    """Return what the threads wait for and serve. `everything`: also which locks of the program they wait for, and which
    fetches wait for values, both of which take a while to find out."""
    waits: list[WaitStatus] = []
    serving: dict[int, CallKey] = {}
    waiting: dict[int, int] = {}
    dispatch = subject.agent.dispatch
    for thread in threads:
        request = thread.request
        own = request is not None and request._dispatch is dispatch
        if request is not None and own:
            serving[thread.id] = key_of(request)
        for wait in _waits_of(thread, subject, threads, everything):
            if request is not None and not own:
                continue  # it serves another worker of this process
            waits.append(replace(wait, thread=thread.id, serving=serving.get(thread.id)))
    found = coroutines.look([each for each in threads if each.request is None or each.request._dispatch is dispatch])
    waits += coroutines.waits(subject, found, of_future)
    waits += _for_slots(subject, serving)
    if everything:
        waits += _of_fetches(subject)
    for wait in waits:
        if wait.thread is not None and wait.call is not None and wait.call.caller == subject.name:
            waiting.setdefault(wait.call.id, wait.thread)
    return Seen(waits, serving, waiting, *coroutines.statuses(subject, found), _values(serving, threads, found))


def _values(
    serving: dict[int, CallKey], threads: list[Thread], found: list[tuple[coroutines.Loop, list[coroutines.Coroutine]]]
) -> dict[CallKey, str]:
    """The values that are made, by the call that makes each."""
    makes: dict[CallKey, str] = {}
    for thread in threads:
        for frame in thread.frames:
            variables = frame.f_locals if frame.f_code in (_MAKES, FOLLOWS) else {}
            made = [variables.get("value"), *captured(variables.get("done"))]
            value = next((each for each in made if isinstance(each, Value)), None)
            if value is not None and thread.id in serving:
                makes[serving[thread.id]] = id_text(value.id)
    for _, each in found:
        makes |= {key_of(one.request): id_text(one.makes.id) for one in each if one.request and one.makes}
    return makes


def _waits_of(thread: Thread, subject: Subject, threads: list[Thread], locks: bool) -> list[WaitStatus]:
    otherwise: list[WaitStatus] = []
    for frame in thread.frames:
        if frame.f_code is block_until.__code__:
            otherwise = _something(frame.f_locals)
        explanation = _EXPLANATIONS.get(frame.f_code)
        if explanation is not None:
            found = explanation(frame.f_locals, subject)
            if found is not None:
                calls_of_others = [each for each in found if each.call is not None and each.call.caller != subject.name]
                return [] if calls_of_others else found
    if otherwise:
        return otherwise
    if not locks or (thread.role not in ("main", "program") and thread.request is None):
        return []
    blocked = blocked_at(thread, threads)
    if blocked is None:
        return []
    text = f"the lock {blocked.expression} at {blocked.place}"
    return [WaitStatus(kind=WaitKind.LOCK, text=text, holder=blocked.holder, limited=blocked.limited)]


def _something(variables: Variables) -> list[WaitStatus]:
    """Return what a thread waits for that is in none of the functions above, in the words of the code that waits."""
    clock, began = variables.get("clock"), variables.get("began")
    age = None if clock is None or began is None else max(clock.now() - began, 0.0)
    limited = variables.get("timeout") is not None
    return [WaitStatus(kind=WaitKind.FUTURE, text=str(variables.get("what", ""))[:LONGEST], age=age, limited=limited)]


def _for_slots(subject: Subject, serving: dict[int, CallKey]) -> Iterator[WaitStatus]:
    """Requests that wait for a slot of the pool."""
    pool = subject.agent.pool
    _, _, running = pool.counts()
    if running < pool.limit:
        return
    text = f"a slot of the pool: {running} functions run, and {pool.limit} may"
    for call in served(subject, {key: thread for thread, key in serving.items()}):
        if call.stage is Stage.QUEUED:
            yield WaitStatus(kind=WaitKind.POOL, text=text, age=call.age, serving=call.key, workers=(subject.name,))


def _of_fetches(subject: Subject) -> Iterator[WaitStatus]:
    """Requests that wait for a value which is being made. They hold no thread."""
    now = subject.agent.clock.now()
    for value in copied(subject.references.table.state.values).values():
        for request in [] if value.ready else fetches_of(value):
            yield replace(_for_value(value, subject), age=max(now - request.came, 0.0), serving=key_of(request))
