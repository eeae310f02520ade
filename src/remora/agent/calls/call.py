"""A call under way, as its caller sees it: what was asked, until when, and the answer. No threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any, Protocol

from remora.agent.calls import call_errors
from remora.agent.calls.call_context import CallContext
from remora.agent.calls.call_errors import DEFAULT, GIVEN, INHERITED, name_of
from remora.agent.calls.future import Future, Sleeper
from remora.agent.calls.peer_info import PeerInfo
from remora.agent.runtime.try_lock import GIVEN_UP_AFTER, may_be_struck
from remora.clock import SYSTEM, Clock
from remora.errors import CallNotSent, CallTimeout, SerializationError
from remora.names import name_parts
from remora.options import check_timeout
from remora.recorder import MADE, TIMED_OUT, Recorder
from remora.vocabulary.messages import MessageType
from remora.wire import exceptions
from remora.wire.enclosed import NOTHING_ENCLOSED, Missing
from remora.wire.frames import FAILED, RECORDED, Frame
from remora.wire.pack_scope import UnpackScope
from remora.wire.pickler import pack, unpack
from remora.wire.undo import Undo

NEVER = float("inf")
LIFETIME = 1e9  # seconds: no program waits longer than thirty years, and clocks do not count much further
UNSET_TIMEOUT = -1.0
A_LITTLE = 1e-9  # seconds, for a thread that has no time left: none at all would be for ever
CANCEL = int(MessageType.CANCEL)
NOTHING = pack(None)  # what functions return that return nothing
_NONE = NOTHING.body

next_call_id: Callable[[], int] = count(1).__next__

# The call that the current function serves: its deadline, which nested calls inherit, and its name (its caller, and its
# number there). No `Request`: the program may keep a context for long, and a request keeps its arguments.
# With a tracer (`call_trace`) it may say the span, too, in which the next call is made; then its caller may be empty.
Serving = tuple[float, str, int] | tuple[float, str, int, str]
current_serving: ContextVar[Serving | None] = ContextVar("remora_serving", default=None)


def _acquire(signal: threading.Lock, seconds: float | None) -> bool:
    return signal.acquire(timeout=GIVEN_UP_AFTER if seconds is None else min(seconds, GIVEN_UP_AFTER))


class ReplyChannel(Protocol):
    """The channel on which the reply comes, as far as a call and a thread that waits for its future need it."""

    pending: dict[int, Call]  # those that wait for a reply
    parked: set[Sleeper]  # threads that wait for futures, and do not read

    def flush(self) -> None: ...  # write the calls that wait to be written
    def attend(self, calls: Collection[Call], deadline: float, over: Callable[[], bool], thread: Sleeper) -> None: ...
    def look_up(self) -> None: ...  # have the thread that reads see whether its call is settled
    def notify(self, call: Call) -> None: ...  # see to it that the outcome is noticed though no thread waits for it
    def forget(self, call: Call) -> bool: ...  # take it off the list; False if it was answered meanwhile
    def send(self, kind: int, call: int, body: bytes) -> None: ...


class Call:
    """One call of this worker. It is settled once: by a reply, or by a failure.

    A burst of thousands of calls is common, and what the garbage collector has to look at is what costs then: a call is
    this one object, and a future if it is asynchronous.
    """

    __slots__ = (
        "asynchronous", "began", "context", "deadline", "failure", "future", "id", "notified", "on_settled", "parent",
        "peer", "progress", "reply", "reply_channel", "signal", "target", "timeout", "translate", "undo", "whose",
    )  # fmt: skip

    def __init__(self, peer: PeerInfo, target: Any, on_settled: Callable[[Call], None] | None = None) -> None:
        self.id = next_call_id()
        self.peer = peer
        self.target = target  # the function, or a word for what is asked
        self.began = 0.0  # when it was made; 0 before `limit`
        self.parent: Serving | None = None  # the call that was being served when it was made
        self.deadline = NEVER  # written by the caller alone, before the call is on the list of those that wait
        self.timeout = 0.0  # what was allowed, for messages to people
        self.whose = GIVEN  # … and by what
        self.progress: tuple[bool, float] | None = None  # whether the function had begun, and when the callee said so
        # One of the two is written, by the thread that took the call off that list, before it wakes the waiter.
        self.reply: Frame | None = None
        self.failure: BaseException | None = None
        self.asynchronous = on_settled is not None  # no thread waits: the pool passes the outcome on
        self.on_settled = on_settled
        self.future: Future[Any] | None = None  # in the place of on_settled, …
        self.reply_channel: ReplyChannel | None = None  # … and where its reply comes
        self.undo: Undo | None = None  # takes back what packing did, if the call is never sent
        self.context: CallContext | None = None  # what the call belongs to, and its reply with it
        self.translate: Callable[[BaseException], BaseException] | None = None  # errors, to the terms of the caller
        self.notified = False  # the program wants to hear of the outcome, and will not come to read it
        self.signal: threading.Lock | None = None  # synchronous calls: released when settled

    def fail(self, error: BaseException) -> None:
        """There will be no reply."""
        self.failure = error
        if isinstance(error, CallNotSent):
            self.rollback()

    def rollback(self) -> None:
        """It was never sent: what packing its arguments did (references handed on) did not happen."""
        if self.undo:
            self.undo.run()

    @property
    def what(self) -> str:
        """The call in words, for messages to people. Made when needed: most calls succeed."""
        return f"call of {name_of(self.target)} on {self.peer.name}"

    def value(self) -> Any:
        """Return the value in the reply, or raise the error in it."""
        if self.failure is not None:
            raise self.failure
        frame = self.reply
        assert frame is not None
        if not frame.flags and frame.enclosed is NOTHING_ENCLOSED:
            try:
                return None if frame.body == _NONE else unpack(frame.body)
            except MemoryError:
                raise call_errors.too_large(self.what, self.peer, frame) from None
            except SerializationError as error:
                raise call_errors.unreadable(self.what, self.peer, error) from error
        if frame.flags & FAILED:
            raise exceptions.load(bytes(frame.body), self.peer.name)
        buffers, _, landing, arrival, late = frame.enclosed
        if isinstance(buffers, Missing):
            raise call_errors.result_missing(self.what, self.peer, frame, buffers)
        problem = "" if late is None else late.wait(self.deadline)
        if problem:
            if self.deadline <= self.peer.now() and not self.peer.gone:
                raise self.timed_out()
            raise call_errors.tensors_missing(self.what, self.peer, problem)
        scope = UnpackScope(self.peer, arrival, landing)
        try:
            value = unpack(frame.body, buffers, scope)
        except MemoryError:
            raise call_errors.too_large(self.what, self.peer, frame) from None
        except SerializationError as error:
            raise call_errors.unreadable(self.what, self.peer, error) from error
        if frame.flags & RECORDED:
            value, header = value
            if self.context is not None:
                self.context.received(self.peer, header, scope.links)
        return value

    def error(self) -> BaseException | None:
        """The error of a settled call; None if it has a value. The value is not looked at."""
        frame = self.reply
        if self.failure is not None:
            return self.failure  # as it is: raised here, it would keep the frames of the caller
        if frame is not None and not frame.flags & FAILED:
            enclosed = frame.enclosed
            if enclosed is NOTHING_ENCLOSED or not isinstance(enclosed.buffers, Missing):
                return None
        try:
            self.value()
        except BaseException as error:
            return error
        return None

    def finish(self) -> None:
        """Pass the outcome of an asynchronous call on. May run code of the program. Of several threads that try, one
        does it; if that one is struck by an exception of a signal handler, another one can."""
        late = None if self.reply is None else self.reply.enclosed.late
        if late is not None and not late.settled_or_later(self.deadline, self.finish):
            return  # it is passed on when its tensors are there
        future, on_settled = self.future, self.on_settled
        self.future = self.on_settled = None  # (the interpreter does not switch threads between these two lines)
        try:
            if future is not None:
                note_end(self)
                self._pass_to(future)
            elif on_settled is not None:
                if type(self.target) is not str:  # (else it is our own business)
                    note_end(self)
                on_settled(self)
        except BaseException:
            if may_be_struck():
                self.future, self.on_settled = future, on_settled
            raise

    def _pass_to(self, future: Future[Any]) -> None:
        error, value = _outcome(self)
        if error is None:
            future._succeed(value)
        else:
            future._fail(error if self.translate is None else self.translate(error))
        # The program may keep the future, and the future keeps its call: what the call does not need any more goes now.
        self.reply = self.translate = None

    def cancel(self) -> bool:
        """The caller gives up. False if the call is settled."""
        channel = self.reply_channel
        if channel is None or not channel.forget(self):
            return False
        self.future = self.translate = None
        channel.send(CANCEL, self.id, b"")
        channel.look_up()
        return True

    def attend(self, future: Future[Any], timeout: float | None, thread: Sleeper) -> None:
        """Wait for the reply in a way that wakes no other thread, if there is one. There may be nothing to see after
        that: then `thread` sleeps, and must be woken, until it does `unpark`."""
        channel = self.channel
        if channel is not None:
            deadline = self.deadline if timeout is None else min(self.deadline, self.peer.now() + timeout)
            channel.attend((self,), deadline, lambda: self.id not in channel.pending, thread)

    def unpark(self, thread: Sleeper) -> None:
        """It waits no longer."""
        channel = self.reply_channel
        if channel is not None:
            channel.parked.discard(thread)

    def notify(self) -> None:
        """The program wants to hear of the outcome without waiting for it."""
        if not self.notified and self.reply_channel is not None:
            self.reply_channel.notify(self)

    @property
    def channel(self) -> ReplyChannel | None:
        """The channel on which a thread may read the reply; None under the clock of a test."""
        return self.reply_channel if self.peer.clock is SYSTEM else None

    @property
    def quiet(self) -> bool:
        """Return True if nothing of the program runs when the outcome is passed on."""
        return self.future is not None and not self.future.followed

    @property
    def has_nothing(self) -> bool:
        """Return True if the reply says that nothing was returned: there is nothing to unpickle, then."""
        frame = self.reply
        return frame is not None and frame.body == _NONE and not frame.flags

    @property
    def clock(self) -> Clock:
        """The clock that measures its deadline."""
        return self.peer.clock

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.failure is not None

    def settle(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Tell the waiter that a reply or a failure is there: wake its thread, or have `run` pass it on."""
        if self.asynchronous:
            run(self.finish)
        else:
            self.wake()

    def wake(self) -> None:
        """Let the thread that waits for this call look at it."""
        signal = self.signal
        if signal is not None:
            try:
                signal.release()
            except RuntimeError:
                pass  # it was awake already

    def sleep(self) -> bool:
        """Wait until the call is settled, or its deadline has passed; or for a while, then it is False. The lock is made
        first and the state looked at then, so that no settling falls between the two."""
        if self.signal is None:
            lock = threading.Lock()
            lock.acquire()
            self.signal = lock
        return self.settled or self.peer.clock.block(partial(_acquire, self.signal), self.deadline)

    def limit(self, timeout: float, default: float) -> float:
        """Start the clock. Unset: what is left to the call we serve, else the default; 0: never. How long it has, as
        the callee is told."""
        clock = self.peer.now
        self.began = now = clock()
        self.parent = serving = current_serving.get()
        if timeout == UNSET_TIMEOUT:
            if serving is not None and serving[0] != NEVER:
                self.deadline = inherited = serving[0]
                self.whose = INHERITED
                self.timeout = max(inherited - now, 0.0)
                return self.timeout or A_LITTLE
            timeout = default
            self.whose = DEFAULT
        elif type(timeout) is not float or not timeout >= 0:
            timeout = check_timeout(timeout, f"the timeout of the {self.what}")
        self.timeout = timeout
        if timeout == 0 or timeout >= LIFETIME:
            return 0.0
        self.deadline = now + timeout
        return max(timeout, A_LITTLE)

    def left(self) -> float:
        """Return the seconds it has left, as the callee is told."""
        return 0.0 if self.deadline == NEVER else max(self.deadline - self.peer.now(), A_LITTLE)

    @property
    def age(self) -> float:
        """Seconds since it was made, for messages to people; 0 before `limit`."""
        return max(self.peer.now() - self.began, 0.0) if self.began else 0.0

    def timed_out(self) -> CallTimeout:
        """The error for a call whose deadline passed."""
        error = call_errors.timed_out(self.what, self.peer, self.allowance(), self.progress)
        if self.peer.note is not None:
            self.peer.note(TIMED_OUT, self.peer.name, str(error))
        return error

    def allowance(self) -> tuple[float, str]:
        """Return the seconds it was allowed to take, and the origin of that limit, in words."""
        return call_errors.describe_allowance(self.peer, self.timeout, self.whose, self.deadline)


class Counting:
    """Counts the outcome of a call (`Call.on_settled`). A thread that is struck would count it twice, or never, so a thread
    that may be struck leaves it to the pool. (What is done with the outcome of our other calls may be done again.)"""

    __slots__ = ("_count",)

    def __init__(self, count: Callable[[Call], None]) -> None:
        self._count = count

    def __call__(self, call: Call) -> None:
        self._count(call)


def note_end(call: Call, waited: bool = False) -> None:
    """Have the recorder note that a call is over, for which this thread `waited`, or none."""
    recorder, reply, clock = call.peer.recorder, call.reply, call.peer.now
    if recorder is None:
        return
    now, number = clock(), recorder.number_made
    if (
        not number() & recorder.sampling
        or now - call.began > recorder.longest_made
        or reply is None
        or reply.flags & FAILED
    ):
        remember_end(recorder, call, now, get_ident() if waited else 0)


def remember_end(recorder: Recorder, call: Call, now: float, thread: int) -> None:
    """Have the recorder remember that a call is over. (Times, numbers and texts: nothing of the program lives longer for
    it.)"""
    target: Any = call.target
    reply: Any = call.reply
    name = call.peer.name
    try:
        recorder.remember((
            MADE, name, call.id, target.__module__, target.__qualname__, 0.0, call.began, now, thread, reply.flags, 0,
            call.parent,
        ))  # fmt: skip
    except Exception:  # there was no reply, or what was called is no function
        flags = FAILED if reply is None else reply.flags
        module, function = name_parts(target)
        recorder.remember((MADE, name, call.id, module, function, 0.0, call.began, now, thread, flags, 0, call.parent))


def _outcome(call: Call) -> tuple[BaseException | None, Any]:
    """The error and the value. An exception that strikes this thread meanwhile is neither, and is raised."""
    try:
        if call.failure is None and call.reply is not None and call.reply.flags & FAILED:
            return exceptions.load(bytes(call.reply.body), call.peer.name), None
        return None, call.value()
    except Exception as error:
        return error, None
    except BaseException as error:
        if call.failure is None and may_be_struck():
            raise
        return error, None
