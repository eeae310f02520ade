"""The handlers of messages about references: calls that make values, fetches, fork requests, goodbyes, acceptances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remora.agent.channel.function_table import BARE_SIZE
from remora.agent.serving.dispatch import Request
from remora.agent.serving.execution import Held
from remora.errors import ProtocolError, RemoraError
from remora.names import name_parts
from remora.rref.codec import Arrival
from remora.rref.references import References
from remora.rref.value import Value
from remora.vocabulary.effects import RRefId
from remora.vocabulary.messages import (
    MessageType,
    PythonRRefFetchCall,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
    ScriptRRefFetchCall,
)
from remora.wire.frames import ASYNC, REFERENCES
from remora.wire.id_codec import ID_SIZE, unpack_id

_OF_A_NUMBER = REFERENCES | ASYNC  # the flags that such a request may have
RREF_ACK = int(MessageType.RREF_ACK)
REMOTE_RET = int(MessageType.REMOTE_RET)
FETCH_RET, SCRIPT_FETCH_RET = int(MessageType.PYTHON_RREF_FETCH_RET), int(MessageType.SCRIPT_RREF_FETCH_RET)


class RefHandlers:
    """Answers for the references of one worker. Inline handlers run on the thread that reads, in order of arrival."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._owned, self._held = references.table.owned, references.table.held
        agent = self._agent = references.agent
        on = agent.dispatch.on
        on(MessageType.PYTHON_REMOTE_CALL, partial(self._make, agent.execution.run_function, 0))
        on(MessageType.SCRIPT_REMOTE_CALL, partial(self._make, agent.execution.run_script, 1))
        for fetch in (PythonRRefFetchCall, ScriptRRefFetchCall):
            on(fetch.type, partial(self._fetch, fetch), inline=True)  # a goodbye behind it must not come first
        on(MessageType.RREF_FORK_REQUEST, self._fork_request, inline=True)
        on(MessageType.RREF_USER_DELETE, self._user_delete, inline=True)
        on(MessageType.RREF_CHILD_ACCEPT, self._child_accept, inline=True)

    def _make(self, run: Callable[..., None], place: int, request: Request) -> None:
        """Run the function whose result becomes a value here; answer when it is there. `place`: that of its name
        in the target."""
        arrival = request.frame.enclosed.arrival
        if not isinstance(arrival, Arrival) or arrival.created is None:
            request.unpack()  # raises, if what the message says of its references makes no sense
            raise ProtocolError(f"{request.caller.name} asked for a value, and sent no reference to it")
        value = arrival.created

        def finish(held: Held, error: BaseException | None) -> None:
            result = held.pop() if held else None
            # The value settles in between: the worker that waits for it is often the caller, and both share a write.
            request.acknowledge(REMOTE_RET, value.settle, result, error)

        frame, heard = request.frame, request.channel.heard
        plain = len(frame.body) < BARE_SIZE and not frame.flags & ~_OF_A_NUMBER
        try:
            number = heard.bare.get(bytes(frame.body)) if plain else None  # of a function without arguments
            target = request.target() if number is None else (heard.find(number), (), {})
        except BaseException as error:
            value.fail(error)
            raise
        value.maker = name_parts(target[place])
        run(request, target, finish)

    def _fetch(self, kind: type[PythonRRefFetchCall], request: Request) -> None:
        frame = request.frame
        plain = len(frame.body) == ID_SIZE and not frame.flags  # most are
        rref = unpack_id(frame.body) if plain else request.message(kind).rref
        value = self._owned.find(rref)
        if value is not None:
            self._fetch_value(request, rref, value)
        else:
            self._owned.when_known(rref, partial(self._fetch_value, request, rref))

    def _fetch_value(self, request: Request, rref: RRefId, value: Value | None) -> None:
        if value is None:
            request.fail(RemoraError(f"{rref} is not known to its owner {self._references.me.info}"))
            return
        kind = SCRIPT_FETCH_RET if value.script else FETCH_RET
        if not value.add_waiter(partial(self._answer, request, kind, value)):
            self._agent.pool.submit_system(value.notify)  # not here: to pack the value may run code of the program

    def _answer(self, request: Request, kind: int, value: Value) -> None:
        if not request.has_room(self._answer, kind, value):
            return  # the caller does not read its answers
        if value.error is not None:
            request.fail(value.error, value.stack)
        else:
            request.reply(kind, value.get())

    def _fork_request(self, request: Request) -> None:
        asked = request.message(RRefForkRequest)
        self._owned.count(asked.rref, asked.fork, request.caller.key)
        request.reply(RREF_ACK, None)

    def _user_delete(self, request: Request) -> None:
        deleted = request.message(RRefUserDelete)
        self._owned.delete_all(list(deleted.ids), never_made=deleted.never_made)
        request.acknowledge(RREF_ACK)

    def _child_accept(self, request: Request) -> None:
        self._held.accepted(request.message(RRefChildAccept).fork)
        request.acknowledge(RREF_ACK)


def fetches_of(value: Value) -> list[Request]:
    """Return the fetches that wait for a value, for showing."""
    answers = [each for each in value.waiting() if isinstance(each, partial)]
    return [each.args[0] for each in answers if getattr(each.func, "__func__", None) is RefHandlers._answer]
