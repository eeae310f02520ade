"""The calls under way at this worker: those it made, and those it serves. Tables are copied, no lock is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from remora.agent.calls.call import NEVER, Call
from remora.agent.channel.channel import Channel
from remora.agent.peers.peer import Peer
from remora.agent.serving.dispatch import Request
from remora.introspection.reference_lists import id_text
from remora.introspection.subject import Subject
from remora.introspection.threads import key_of
from remora.names import function_name
from remora.observer.model import CallKey, CallStatus, Stage
from remora.rref.handle import TO_HERE
from remora.rref.value import Value
from remora.vocabulary.messages import MESSAGES, MessageType
from remora.wire.frames import HEADER

FETCHES = (int(MessageType.PYTHON_RREF_FETCH_CALL), int(MessageType.SCRIPT_RREF_FETCH_CALL))

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def kind_name(kind: int) -> str:
    """Return the name of a type of message."""
    known = MESSAGES.get(kind)  # type: ignore[call-overload]
    return str(kind) if known is None else known.type.name


def steadily(look: Callable[[], T]) -> T:
    """Return what a look at a table says that other threads change: the look is repeated if the table changed meanwhile."""
    for _ in range(1000):
        try:
            return look()
        except RuntimeError:
            continue
    return look()


def copied(table: dict[K, V]) -> dict[K, V]:
    """Return a copy of a table that other threads change."""
    return steadily(table.copy)


def made(subject: Subject, threads: dict[int, int]) -> Iterator[CallStatus]:
    """Yield the calls that this worker made. `threads`: by the number of a call, the thread that waits for it."""
    for peer in subject.agent.peers.all():
        channel = peer.outgoing
        pending = copied(channel.pending)
        if pending:
            unsent = _unwritten(channel)
            kept = _kept(channel)
            for call in pending.values():
                if call.began:  # else it is being made at this moment
                    yield _status(subject, peer, call, unsent, kept, threads.get(call.id))


def _status(
    subject: Subject,
    peer: Peer,
    call: Call,
    unsent: set[int],
    kept: dict[int, tuple[int, int]],
    thread: int | None,
) -> CallStatus:
    now = subject.agent.clock.now()
    kind, size = kept.get(call.id, (0, 0))
    parent = call.parent
    begun = call.progress is not None and call.progress[0]
    away = call.id in unsent or (peer.outgoing.link is None and call.id in kept)
    return CallStatus(
        key=CallKey(caller=subject.name, id=call.id),
        callee=peer.name,
        function=function_name(call.target),
        kind=kind_name(kind) if kind else "",
        stage=Stage.UNSENT if away else Stage.BEGUN if begun else Stage.SENT,
        age=max(now - call.began, 0.0),
        left=None if call.deadline == NEVER else call.deadline - now,
        bytes=size,
        asynchronous=call.asynchronous,
        thread=thread,
        parent=None if parent is None else CallKey(caller=parent[1], id=parent[2]),
    )


def _unwritten(channel: Channel) -> set[int]:
    """The numbers of calls that wait to be written."""
    return {entry[2] for entry in steadily(lambda: list(channel.outbox.batched))}


def _kept(channel: Channel) -> dict[int, tuple[int, int]]:
    """By the number of a call: type and size of its message, if the peer has not acknowledged it yet."""
    found: dict[int, tuple[int, int]] = {}
    before = channel.session.acked_bytes
    for _, total, message in steadily(lambda: list(channel.session.kept)):
        first: Any = message if isinstance(message, bytes) else message.parts[0]
        fields = HEADER.unpack_from(first)
        found[fields[5]] = (fields[KIND_AT], max(total - before, 0))
        before = total
    return found


KIND_AT = 2  # in the fields of a header


def served(subject: Subject, threads: dict[CallKey, int], makes: dict[CallKey, str] | None = None) -> Iterator[CallStatus]:
    """Yield the calls that this worker serves. `threads`: by call, the thread that runs it; `makes`: the value that it
    makes, of those that have begun."""
    now = subject.agent.clock.now()
    for request in copied(subject.agent.dispatch.serving).values():
        key = key_of(request)
        frame = request.frame
        yield CallStatus(
            key=key,
            callee=subject.name,
            function=_function_of(request),
            kind=kind_name(frame.kind),
            stage=stage_of(request, key in threads),
            age=max(now - request.came, 0.0),
            left=None if request.deadline == NEVER else request.deadline - now,
            bytes=frame.size,
            asynchronous=False,
            thread=threads.get(key),
            makes=_made_by(request) if makes is None or key not in makes else makes[key],
        )


def _made_by(request: Request) -> str | None:
    """The value that a request makes which has not been unpacked."""
    created = getattr(request.frame.enclosed.arrival, "created", None)
    return id_text(created.id) if isinstance(created, Value) else None


def _function_of(request: Request) -> str:
    """The name of what is run; nothing if that is known only when it begins."""
    if request.function is not None:
        return function_name(request.function)
    return str(TO_HERE.__qualname__) if request.frame.kind in FETCHES else ""


def stage_of(request: Request, on_thread: bool) -> Stage:
    """Return how far a request has come. What is Remora's own business waits for no slot: it began when it came."""
    if request.answered:
        return Stage.ANSWERING
    begun = request.function is not None or on_thread or not request.parkable
    return Stage.RUNNING if begun else Stage.QUEUED
