"""From an arrived request to the handler for its type. Handlers register here; dispatch knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from remora.agent.calls.call import NEVER, NOTHING
from remora.agent.calls.call_context import CallContext, Header, pack_for
from remora.agent.calls.call_trace import LONGEST, tracing
from remora.agent.calls.pack_errors import explain_result
from remora.agent.calls.peer_info import Served
from remora.agent.channel.channel import Channel
from remora.agent.channel.delayed_flush import DelayedFlush
from remora.agent.channel.flow_control import OUTBOX_LIMIT
from remora.agent.channel.function_table import BARE_SIZE
from remora.agent.peers.peer import Peer
from remora.agent.runtime.clean_state import is_clean, make_clean
from remora.agent.runtime.pool import WorkerPool
from remora.agent.serving import argument_errors
from remora.errors import ProtocolError, SerializationError
from remora.names import name_parts
from remora.recorder import SERVED, Recorder
from remora.vocabulary.ids import WorkerInfo
from remora.vocabulary.messages import Message, MessageType
from remora.wire import exceptions
from remora.wire.enclosed import NOTHING_ENCLOSED, Missing
from remora.wire.frames import ASYNC, FAILED, RECORDED, TRACED, Frame
from remora.wire.message_codec import BEGUN, decode, from_value
from remora.wire.pack_scope import UnpackScope
from remora.wire.packed import Packed
from remora.wire.pickler import unpack

M = TypeVar("M", bound=Message)

EXCEPTION = int(MessageType.EXCEPTION)
PYTHON_CALL, PYTHON_RET = int(MessageType.PYTHON_CALL), int(MessageType.PYTHON_RET)
SCRIPT_RET = int(MessageType.SCRIPT_RET)
_ANSWERED_WITH_THE_VALUE = (  # to the caller, and to no other worker: others may wait for what remote() makes
    MessageType.PYTHON_CALL,
    MessageType.SCRIPT_CALL,
)
PROGRESS = int(MessageType.PROGRESS)
MOST_TOLD = 64  # requests at a time: of a flood that comes to nothing, a sample is enough
LARGE = 1 << 17
HURRY = 1.0  # who gave a call less time than this wants to know its outcome at once
AT_ONCE = 0.0  # what the kernel does not take now is copied: the function's result may be changed by the next function


class Request:
    """A request being served: what was asked, by whom, until when, and the way back."""

    __slots__ = (
        "_admitted", "_dispatch", "_handler", "answered", "began", "caller", "came", "cancelled", "channel", "context",
        "deadline", "frame", "function", "grad_enabled", "on_cancel", "parkable",
    )  # fmt: skip

    def __init__(
        self, dispatch: Dispatch, caller: Peer, channel: Channel, frame: Frame, handler: Handler, parkable: bool
    ) -> None:
        self._dispatch = dispatch
        self._handler = handler
        self.caller = caller
        self.channel = channel
        self.frame = frame
        clock = dispatch.now
        self.came = now = clock()
        self.began = 0.0  # when the function was called
        self.deadline = now + frame.timeout if frame.timeout > 0.0 else NEVER  # (nor if it is no number)
        # The thread that cancels says `cancelled` and then looks at `on_cancel`; the one that serves does it the other way
        # round (`cancel_by`). So the second of the two sees the first, and stops what runs.
        self.on_cancel: Callable[[], None] | None = None
        self.cancelled = False
        self.parkable = parkable  # it is the program's business, and may wait until its answer can leave
        self.context: CallContext | None = None  # to which the request belongs, if to any
        self.function: Any = None  # what is run, in words or as it is: for errors
        self.grad_enabled = True  # false if it called under no_grad
        self.answered = False  # written by the thread that answers: one at a time serves the request
        self._admitted = False  # it runs asynchronously, and counts as such until it is answered

    def __call__(self) -> None:
        """Serve it. The request itself is the job: one object less for each call that waits."""
        if self.cancelled:
            self.drop()
            return
        if self.frame.enclosed is not NOTHING_ENCLOSED:  # (not a variable here: the value alone keeps its memory)
            late = self.frame.enclosed.late
            if late is not None and not late.settled_or_later(self.deadline, self._submit if self.parkable else self):
                return
            late = None
        if self.parkable:
            outbox, flow_control = self.channel.outbox, self.channel.flow_control
            if (flow_control.parked or outbox.unsent_bytes() > OUTBOX_LIMIT) and not flow_control.room_for(self._submit):
                return
            if self.frame.flags & ASYNC and not self._may_run_asynchronously(self):
                return
        handler = self._handler
        try:
            handler(self)
        except BaseException as error:
            self.fail(error)

    def _submit(self) -> None:
        self._dispatch.pool.submit(self)

    def has_room(self, resume: Callable[..., None], *args: object) -> bool:
        """Return True if there is room for the answer; if not, `resume(self, *args)` is called when there is."""
        flow_control = self.channel.flow_control
        if not flow_control.parked and not flow_control.congested:
            return True
        return flow_control.room_for(partial(self._dispatch.pool.submit_system, partial(resume, self, *args)))

    # What holds no thread while it runs. There may be any number of it, so it begins when flow_control says so.

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start`, which begins something asynchronous: now, or when the caller is known to read its answers."""
        if self._may_run_asynchronously(partial(self._begin_late, start)):
            start()

    def _begin_late(self, start: Callable[[], None]) -> None:
        try:
            start()
        except BaseException as error:
            self.fail(error)

    def _may_run_asynchronously(self, otherwise: Callable[[], None]) -> bool:
        """Return True if it may run. If not, the pool is given `otherwise` to do when it may. What remote() makes is
        not sent to the caller."""
        if self._admitted or self.frame.kind not in _ANSWERED_WITH_THE_VALUE:
            return True
        self._admitted = True
        return self.channel.flow_control.admit(partial(self._dispatch.pool.submit, otherwise))

    @property
    def given_up(self) -> bool:
        """Return True if its caller has given it up: what has not begun need not."""
        return self.cancelled or (self.channel.closed and self.frame.kind in _ANSWERED_WITH_THE_VALUE)

    def cancel_by(self, stop: Callable[[], None]) -> None:
        """Note how to stop it, if its caller gives it up, or has done so already."""
        self.on_cancel = stop
        if self.given_up:
            stop()

    def unpack(self) -> object:
        """Return the body as a value."""
        frame = self.frame
        if not frame.flags & ~ASYNC and frame.enclosed is NOTHING_ENCLOSED:
            try:
                return unpack(frame.body)
            except MemoryError:
                raise argument_errors.too_large(frame, self._dispatch.me) from None
            except SerializationError as error:
                raise argument_errors.unreadable(self.caller.name, self._dispatch.me, error) from error
        buffers, _, landing, arrival, late = frame.enclosed
        if isinstance(buffers, Missing):
            raise argument_errors.missing(buffers, frame, self.caller.name, self._dispatch.me)
        problem = "" if late is None else late.wait(self.deadline)
        if problem:
            raise SerializationError(f"the arguments did not come: {problem}. It did not run: retry the call")
        scope = UnpackScope(self.caller, arrival, landing)
        try:
            value = unpack(frame.body, buffers, scope)
        except MemoryError:
            raise argument_errors.too_large(frame, self._dispatch.me) from None
        except SerializationError as error:
            raise argument_errors.unreadable(self.caller.name, self._dispatch.me, error) from error
        if buffers or landing is not None or late is not None:
            self.frame = frame.opened(frame.body, frame.size, NOTHING_ENCLOSED)  # the value keeps its memory
        value = self._joined(value, scope) if frame.flags & RECORDED else value
        return _without_trace(value, self) if frame.flags & TRACED else value

    def message(self, kind: type[M]) -> M:
        """The payload. ProtocolError if it is not what this type of message has."""
        if kind.of_program or self.frame.flags:
            return from_value(kind, self.unpack(), self.caller.name)
        return decode(kind, self.frame.body, self.caller.name)

    def target(self) -> Any:
        """Return what is to be run: the body as a value, with the function that it means in the place of a number."""
        frame, heard = self.frame, self.channel.heard
        number = heard.bare.get(bytes(frame.body)) if frame.size < BARE_SIZE and not frame.flags & ~ASYNC else None
        if number is not None:
            return heard.find(number), (), {}
        value: Any = self.unpack()
        if type(value) is int:
            value = (value, (), {})  # an unknown number, as will be said
        numbered = type(value[0]) is int  # it is (number, args, kwargs)
        if not (numbered and not value[1] and not value[2]) and not is_clean():
            make_clean()  # to unpickle may have imported a module of the program, or run other code of it
        return (heard.find(value[0]), *value[1:]) if numbered else value

    def _joined(self, recorded: tuple[object, Header], scope: UnpackScope) -> object:
        """Go on with the context of the caller: functions that serve this request, and its reply, belong to it."""
        value, header = recorded
        self.context = self._dispatch.find_context(header)
        self.context.received(self.caller, header, scope.links)
        self.grad_enabled = header[2]
        return value

    def answer(self, held: list[Any], error: BaseException | None) -> None:
        """Answer a call with what its function returned, which is taken out of the list; or with an error, if there is
        one."""
        if error is not None:
            self.fail(error)
        else:
            self.reply(PYTHON_RET if self.frame.kind == PYTHON_CALL else SCRIPT_RET, held.pop())

    def reply(self, kind: int, value: object) -> None:
        """Answer with a value; with an error, if it cannot be packed."""
        if self.channel.outbox.closed:
            self.drop()  # no caller hears it: do not hand out references in it
            return
        if value is None:  # (which has no history that a context would want to know of)
            self._send(kind, NOTHING, 0)
            return
        caller, context = self.caller, self.context if self.grad_enabled else None
        try:
            packed, flags = pack_for(caller, caller.routes.replies, value, context, detached=not self.grad_enabled)
        except BaseException as failure:
            explain_result(failure, caller, self.function, value, self._dispatch.me.name)
            self.fail(failure)
            return
        del value  # (not needed when it is packed, and copied)
        self._send(kind, packed, flags)

    def acknowledge(self, kind: int, then: Callable[..., None] | None = None, *args: object) -> None:
        """Answer with nothing but the fact, which the caller is in no hurry to know: it goes with the next message, which
        may be what `then(*args)` sends, or in a moment."""
        self.answered = True
        recorder, outbox = self._dispatch.recorder, self.channel.outbox
        if recorder is not None and self.began:
            number, clock = recorder.number_served, self._dispatch.now
            now = clock()
            if not number() & recorder.sampling or now - self.began > recorder.longest_served:
                self._remember_end(recorder, 0, now)
        outbox.enqueue(kind, self.frame.call, NOTHING.body)
        try:
            if then is not None:
                then(*args)
        finally:
            if self.frame.timeout and self.frame.timeout < HURRY:
                outbox.flush()
            elif outbox.batched:
                self._dispatch.delayed_flush.expect(self.channel)
            self._done()

    def fail(self, error: BaseException, stack: str | None = None) -> None:
        """Answer with an error. `stack`: where it was raised, if it does not know any more."""
        described = exceptions.describe(error, repr(self._dispatch.me), stack, self.caller.shares_main)
        self._send(EXCEPTION, Packed(exceptions.dump(described), [], [], []), FAILED)

    def _send(self, kind: int, packed: Packed, flags: int) -> None:
        if self.answered:
            return
        self.answered = True
        channel, dispatch = self.channel, self._dispatch
        nearly_done, recorder = dispatch.pool.nearly_done, dispatch.recorder
        now = nearly_done()
        if recorder is not None and self.began:
            number = recorder.number_served
            if not number() & recorder.sampling or now - self.began > recorder.longest_served or flags & FAILED:
                self._remember_end(recorder, flags, now)
        try:
            if not packed.buffers and len(packed.body) < LARGE:
                if dispatch.pool.user_tasks and self._is_followed():
                    channel.outbox.send_batched(kind, self.frame.call, packed.body, flags)
                else:
                    channel.outbox.send(kind, self.frame.call, packed.body, flags)
            else:
                self._send_large(kind, packed, flags)
        finally:
            dispatch.serving.pop((channel.session_id, self.frame.call), None)  # (`_done`)
            flow_control = channel.flow_control
            flow_control.served = next(flow_control.answers)
            if flow_control.paused:
                flow_control.limit_unanswered()
            if self._admitted:
                flow_control.ended()

    def _remember_end(self, recorder: Recorder, flags: int, now: float) -> None:
        """Have the recorder remember that its function has run. (Times, numbers and texts: nothing of the program lives
        longer for it.)"""
        function, frame = self.function, self.frame
        try:
            module, name = function.__module__, function.__qualname__
        except Exception:  # it is something else that can be called
            module, name = name_parts(function)
        recorder.remember((
            SERVED, self.caller.name, frame.call, module, name, self.came, self.began, now, get_ident(), flags, frame.size,
            None,
        ))  # fmt: skip

    def _is_followed(self) -> bool:
        """Return True if what is run next is for the same caller: the two answers can share a write then."""
        try:
            following = self._dispatch.pool.user_tasks[0]
        except IndexError:
            return False  # another thread took it
        return getattr(following, "channel", None) is self.channel

    def _send_large(self, kind: int, packed: Packed, flags: int) -> None:
        channel, call = self.channel, self.frame.call
        try:
            channel.send_packed(kind, call, packed, flags, 0.0, AT_ONCE)
        except SerializationError as error:  # it is on a device, and cannot be had from there; or cannot be copied
            if packed.undo:
                packed.undo.run()
            described = exceptions.describe(error, repr(self._dispatch.me), shares_main=self.caller.shares_main)
            channel.send(EXCEPTION, call, exceptions.dump(described), FAILED)

    def _done(self) -> None:
        self._dispatch.serving.pop((self.channel.session_id, self.frame.call), None)
        self.channel.flow_control.done()
        if self._admitted:
            self.channel.flow_control.ended()

    def cancel(self) -> None:
        """The caller does not wait any more: a function that has not begun never will, a coroutine is cancelled."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def abandon(self) -> None:
        """Stop what runs: no caller will hear the answer."""
        if self.on_cancel is not None:
            self.on_cancel()

    def drop(self) -> None:
        """Do not run it, and answer nothing: no caller waits."""
        self.answered = True
        self._done()


def _without_trace(value: Any, request: Request) -> object:
    """A call without the trace that it carries, of which the tracer is told."""
    if not (type(value) is tuple and value and type(value[0]) is str and len(value[0]) <= LONGEST):
        raise SerializationError(f"a call from {request.caller.name} is said to carry a trace, and has none")
    tracer = tracing.tracer
    if tracer is not None:
        tracer.arrived(request.caller.name, request.frame.call, value[0])
    return value[1:]


Handler = Callable[[Request], None]


def _refuse(request: Request) -> None:
    raise ProtocolError(f"{request.caller.name} sent a message of the unknown type {request.frame.kind:#x}")


_UNKNOWN: tuple[Handler, bool, bool] = (_refuse, False, True)


@dataclass(eq=False, repr=False)
class Dispatch:
    """The table of handlers, and the requests being served."""

    me: WorkerInfo
    pool: WorkerPool
    delayed_flush: DelayedFlush
    now: Callable[[], float]
    find_context: Callable[[Header], CallContext]
    recorder: Recorder | None  # is told of functions that have run; none, if it remembers nothing
    serving: dict[tuple[str, int], Request] = field(default_factory=dict)
    _handlers: dict[int, tuple[Handler, bool, bool]] = field(default_factory=dict)

    def on(self, kind: MessageType, handler: Handler, service: bool = False, inline: bool = False) -> None:
        """Have `handler` answer requests of this type. A service is our own work and is not held up by user code; what is
        inline runs on the thread that reads, in the order of arrival, and must be short."""
        self._handlers[int(kind)] = (handler, service, inline)

    def request(self, caller: Peer, channel: Channel, frame: Frame) -> None:
        """Queue an arrived request. Called by the thread that read it, which runs what is queued next."""
        handler, service, inline = self._handlers.get(frame.kind, _UNKNOWN)
        request = Request(self, caller, channel, frame, handler, not inline and not service)
        self.serving[channel.session_id, frame.call] = request
        if inline:
            request()
        elif frame.enclosed is not NOTHING_ENCLOSED and (arrival := frame.enclosed.arrival) is not None and arrival.pending:
            arrival.when_confirmed(partial(self.pool.submit, request))
        elif service:
            self.pool.call_soon(request)
        else:
            self.pool.user_tasks.append(request)

    def cancel(self, channel: Channel, call: int) -> None:
        """A caller gave a call up."""
        request = self.serving.get((channel.session_id, call))
        if request is not None:
            request.cancel()

    def forget(self, channel: Channel) -> None:
        """The caller on this channel is gone: no caller waits for its coroutines. What has begun or is queued
        runs, as it would if the caller had gone a moment later."""
        for key, request in list(self.serving.items()):
            if key[0] == channel.session_id and request.frame.kind in _ANSWERED_WITH_THE_VALUE:
                request.abandon()

    def tell_progress(self, now: float, until: float) -> None:
        """Tell the callers of requests whose deadline comes near whether their functions have begun. They cannot know, and
        want to when the deadline passes. What waits is told again at the next tick: it may begin."""
        told = 0
        for request in list(self.serving.values()):
            if now < request.deadline < until and request.parkable and not request.channel.closed:
                begun = request.function is not None
                request.channel.enqueue(PROGRESS, request.frame.call, BEGUN if begun else b"")
                self.delayed_flush.expect(request.channel)
                told += 1
                if told == MOST_TOLD:
                    return

    def served_until(self, deadline: float) -> Served | None:
        """Return the function, caller and allowance of the request with exactly this deadline: calls that its function
        makes inherit it."""
        for request in list(self.serving.values()):
            if request.deadline == deadline and request.function is not None:
                return request.function, request.caller.name, request.frame.timeout
        return None

    def counts(self) -> int:
        """Return the number of requests queued or running."""
        return len(self.serving)
