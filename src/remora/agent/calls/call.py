"""A call under way, as its caller sees it: what was asked, until when, and the answer. No threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

from remora.agent.calls.future import Future, Origin, Sleeper
from remora.agent.runtime.try_lock import GIVEN_UP_AFTER, may_be_struck
from remora.clock import SYSTEM, Clock
from remora.errors import CallNotSent, CallOutcomeUnknown, CallTimeout, RemoraError, SerializationError, WorkerLost
from remora.options import check_timeout
from remora.vocabulary.messages import MessageType
from remora.wire import exceptions
from remora.wire.frames import FAILED, RECORDED, SHARED, Frame
from remora.wire.pack_scope import UnpackScope
from remora.wire.pickler import pack, unpack
from remora.wire.undo import Undo

if TYPE_CHECKING:
    from remora.agent.calls.call_context import CallContext
    from remora.agent.channel.channel import Channel
    from remora.agent.peers.manager import Peer

NEVER = float("inf")
LIFETIME = 1e9  # seconds: nobody waits longer than thirty years, and clocks do not count much further
UNSET_TIMEOUT = -1.0
GIVEN, DEFAULT, INHERITED = "given", "default", "inherited"  # where a deadline comes from
A_LITTLE = 1e-9  # seconds, for who has no time left: none at all would be for ever
CANCEL = int(MessageType.CANCEL)
NOTHING = pack(None)  # what functions return that return nothing
_NONE = NOTHING.body

next_call_id: Callable[[], int] = count(1).__next__

# The deadline of the call that the current function serves; nested calls inherit it.
current_deadline: ContextVar[float | None] = ContextVar("remora_deadline", default=None)


def name_of(target: object) -> str:
    """How people call a function."""
    if isinstance(target, str):
        return target
    try:
        name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
        module = getattr(target, "__module__", None)
    except Exception:  # of the program
        name = module = None
    if name is None:  # not its `repr`, which is the program's: this may be the thread of the timers
        name, module = type(target).__qualname__, type(target).__module__
    name = str(name).removeprefix("_VariableFunctionsClass.")  # where torch keeps its functions
    return f"{module}.{name}" if module else name


class Call:
    """What a caller waits for. Settled once: by a reply, or by a failure.

    A burst of thousands of calls is common, and what the garbage collector has to look at is what costs then: a call is
    this one object, and a future if it is asynchronous.
    """

    __slots__ = (
        "_began", "asynchronous", "deadline", "failure", "future", "heeded", "id", "on_settled", "peer", "progress",
        "recording", "reply", "signal", "target", "timeout", "translate", "undo", "whose",
    )  # fmt: skip

    def __init__(self, peer: Peer, target: object, on_settled: Callable[[Call], None] | None = None) -> None:
        self.id = next_call_id()
        self.peer = peer
        self.target = target  # the function, or a word for what is asked
        self.deadline = NEVER
        self.timeout = 0.0  # what was allowed, for messages to people
        self.whose = GIVEN  # … and by what
        self.progress: tuple[bool, float] | None = None  # whether the function had begun, and when the callee said so
        self.reply: Frame | None = None
        self.failure: BaseException | None = None
        self.asynchronous = on_settled is not None  # no thread waits: the pool passes the outcome on
        self.on_settled = on_settled
        self.future: Future[Any] | None = None  # in the place of on_settled
        self.undo: Undo | None = None  # takes back what packing did, if the call is never sent
        self.recording: CallContext | None = None  # what the call belongs to, and its reply with it
        self.translate: Callable[[BaseException], BaseException] | None = None  # errors, to the terms of whoever called
        self.heeded = False  # somebody wants to hear of the outcome, and will not come to read it
        self.signal: threading.Lock | None = None  # synchronous calls: released when settled

    def make_future(self, origin: Origin | None) -> Future[Any]:
        """Make the call asynchronous, with a future of its value."""
        future: Future[Any] = Future(self, origin)
        self.future = future
        self.asynchronous = True
        return future

    def fail(self, error: BaseException) -> None:
        """There will be no reply."""
        self.failure = error
        if isinstance(error, CallNotSent):
            self.take_back()

    def take_back(self) -> None:
        """It was never sent: what packing its arguments did (references handed on) did not happen."""
        if self.undo:
            self.undo.run()

    @property
    def what(self) -> str:
        """The call in words, for messages to people. Made when needed: most calls succeed."""
        return f"call of {name_of(self.target)} on {self.peer.name}"

    def value(self) -> Any:
        """What the reply says: a value, or an error, raised."""
        if self.failure is not None:
            raise self.failure
        frame = self.reply
        assert frame is not None
        if not frame.flags and frame.buffers == ():
            try:
                return None if frame.body == _NONE else unpack(frame.body)
            except MemoryError:
                raise self._too_large(frame) from None
            except SerializationError as error:
                raise self._makes_no_sense(error) from error
        if frame.flags & FAILED:
            raise exceptions.load(bytes(frame.body), self.peer.name)
        if frame.buffers is None:
            raise self._without_result(frame)
        problem = "" if frame.filling is None else frame.filling.wait(self.deadline)
        if problem:
            raise self._without_answer(problem)
        scope = UnpackScope(self.peer, frame.arrival, frame.landing)
        try:
            value = unpack(frame.body, frame.buffers, scope)
        except MemoryError:
            raise self._too_large(frame) from None
        except SerializationError as error:
            raise self._makes_no_sense(error) from error
        if frame.flags & RECORDED:
            value, header = value
            if self.recording is not None:
                self.recording.received(self.peer, header, scope.links)
        return value

    def _without_answer(self, problem: str) -> RemoraError:
        """The reply is here, and its tensors are not."""
        if self.peer.gone:
            return WorkerLost(f"{self.what}: it was answered, but its tensors did not come: {problem}")
        if self.deadline <= self.peer.now():
            return self.timed_out()
        return CallOutcomeUnknown(f"{self.what}: it ran and was answered, but its tensors did not come: {problem}")

    def _without_result(self, frame: Frame) -> RemoraError:
        if frame.flags & SHARED:
            return WorkerLost(
                f"{self.what}: it was answered, but the answer is in memory of {self.peer.name} that cannot be had any more"
            )
        return self._too_large(frame)

    def _makes_no_sense(self, error: SerializationError) -> SerializationError:
        return SerializationError(
            f"{self.what}: it was answered, but the result makes no sense: {error}. The function ran; the fault is in "
            f"{self.peer.name} or on the way from it to {self.peer.me}"
        )

    def _too_large(self, frame: Frame) -> SerializationError:
        return SerializationError(
            f"{self.what}: the result ({frame.size} bytes) does not fit into the memory of {self.peer.me}, the caller"
        )

    def error(self) -> BaseException | None:
        """The error of a settled call; None if it has a value. The value is not looked at."""
        frame = self.reply
        if self.failure is not None:
            return self.failure  # as it is: raised here, it would keep the frames of whoever asks
        if frame is not None and frame.buffers is not None and not frame.flags & FAILED:
            return None
        try:
            self.value()
        except BaseException as error:
            return error
        return None

    def finish(self) -> None:
        """Pass the outcome of an asynchronous call on. May run code of the program. Of several threads that try, one
        does it; if that one is struck by an exception of a signal handler, another one can."""
        late = None if self.reply is None else self.reply.filling
        if late is not None and not late.settled_or_later(self.deadline, self.finish):
            return  # it is passed on when its tensors are there
        future, on_settled = self.future, self.on_settled
        self.future = self.on_settled = None  # (the interpreter does not switch threads between these two lines)
        try:
            if future is not None:
                self._pass_to(future)
            elif on_settled is not None:
                on_settled(self)
        except BaseException:
            if may_be_struck():
                self.future, self.on_settled = future, on_settled
            raise

    def _pass_to(self, future: Future[Any]) -> None:
        error, value = self._outcome()
        if error is None:
            future._succeed(value)
        else:
            future._fail(error if self.translate is None else self.translate(error))
        # The program may keep the future, and the future keeps its call: what the call does not need any more goes now.
        self.reply = self.translate = None

    def _outcome(self) -> tuple[BaseException | None, Any]:
        """The error and the value. An exception that strikes this thread meanwhile is neither, and is raised."""
        try:
            if self.failure is None and self.reply is not None and self.reply.flags & FAILED:
                return exceptions.load(bytes(self.reply.body), self.peer.name), None
            return None, self.value()
        except Exception as error:
            return error, None
        except BaseException as error:
            if self.failure is None and may_be_struck():
                raise
            return error, None

    def cancel(self) -> bool:
        """The caller gives up. False if the call is settled."""
        channel = self.peer.outgoing
        if not channel.forget(self):
            return False
        self.future = self.translate = None
        channel.send(CANCEL, self.id, b"")
        channel.look_up()
        return True

    def attend(self, future: Future[Any], timeout: float | None, thread: Sleeper) -> None:
        """Wait for the reply in a way that saves waking anybody, if there is one. There may be nothing to see after
        that: then `thread` sleeps, and must be woken, until it does `unpark`."""
        channel = self.channel
        if channel is not None:
            deadline = self.deadline if timeout is None else min(self.deadline, self.peer.now() + timeout)
            channel.attend((self,), deadline, lambda: self.id not in channel.pending, thread)

    def unpark(self, thread: Sleeper) -> None:
        """It waits no longer."""
        self.peer.outgoing.parked.discard(thread)

    def notify(self) -> None:
        """Somebody wants to hear of the outcome without waiting for it."""
        if not self.heeded:
            self.peer.outgoing.notify(self)

    @property
    def channel(self) -> Channel | None:
        """Where a thread may read the reply; None if clocks are a test's, and waiting is not a matter of reading."""
        return self.peer.outgoing if self.peer.clock is SYSTEM else None

    @property
    def quiet(self) -> bool:
        """Whether nothing of the program runs when the outcome is passed on."""
        return self.future is not None and not self.future.followed

    @property
    def has_nothing(self) -> bool:
        """Whether the reply says that nothing was returned: there is nothing to unpickle, then."""
        frame = self.reply
        return frame is not None and frame.body == _NONE and not frame.flags

    @property
    def clock(self) -> Clock:
        """What its deadline is measured by."""
        return self.peer.clock

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.failure is not None

    def settle(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Tell whoever waits that a reply or a failure is there: wake its thread, or have `run` pass it on."""
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
        return self.settled or self.clock.block(self._await_signal, self.deadline)

    def _await_signal(self, seconds: float | None) -> bool:
        assert self.signal is not None
        return self.signal.acquire(timeout=GIVEN_UP_AFTER if seconds is None else min(seconds, GIVEN_UP_AFTER))

    def limit(self, timeout: float, default: float) -> float:
        """Start the clock. Unset: what is left to the call we serve, else the default; 0: never. How long it has, as
        the callee is told."""
        if timeout == UNSET_TIMEOUT:
            inherited = current_deadline.get()
            if inherited is not None and inherited != NEVER:
                self.deadline = inherited
                self.whose = INHERITED
                self.timeout = max(inherited - self.peer.now(), 0.0)
                return self.timeout or A_LITTLE
            timeout = default
            self.whose = DEFAULT
        elif type(timeout) is not float or not timeout >= 0:
            timeout = check_timeout(timeout, f"the timeout of the {self.what}")
        self.timeout = timeout
        if timeout == 0 or timeout >= LIFETIME:
            self._began = self.peer.now()  # (no deadline says it)
            return 0.0
        self.deadline = self.peer.now() + timeout
        return max(timeout, A_LITTLE)

    def left(self) -> float:
        """How long it has now, as the callee is told."""
        return 0.0 if self.deadline == NEVER else max(self.deadline - self.peer.now(), A_LITTLE)

    @property
    def age(self) -> float:
        """Seconds since it was made, for messages to people; 0 before `limit`."""
        began: float | None = getattr(self, "_began", None) if self.deadline == NEVER else self.deadline - self.timeout
        return 0.0 if began is None else max(self.peer.now() - began, 0.0)

    def timed_out(self) -> CallTimeout:
        """The error for a call whose deadline passed. The words are those programs match on."""
        allowed, whose = self.allowance()
        return CallTimeout(
            f"RPCErr:1:RPC ran for more than set timeout ({allowed * 1000:g} ms) and will now be marked with an error: "
            f"{self.what}. {whose}{self._begun()} Pass a longer timeout, or 0 to wait for ever."
            + (f" ({self.peer.name} is suspected: {self.peer.doubt})" if self.peer.doubt else "")
        )

    def allowance(self) -> tuple[float, str]:
        """How long it was allowed to take, in seconds, and who said so."""
        if self.whose is GIVEN:
            return self.timeout, ""
        if self.whose is DEFAULT:
            return self.timeout, "That is the default of this worker (rpc_timeout). "
        served = self.peer.served_until(self.deadline)
        left = f"of which {self.timeout * 1000:.0f} ms were left when this call began. "
        if served is None:
            return self.timeout, f"It had the deadline of the call that it was made for, {left}"
        function, caller, allowed = served
        outer = f"{name_of(function)}, which {caller} called with {allowed * 1000:.0f} ms"
        return allowed, f"It had the deadline of {outer}, {left}"

    def _begun(self) -> str:
        """What the callee said about it, as the deadline came near."""
        if self.progress is None:
            return f"Whether it had begun on {self.peer.name} is not known."
        begun, at = self.progress
        if begun:
            return f"It had begun on {self.peer.name}, and may still be running."
        ago = max(self.peer.now() - at, 0.0)
        return f"It had not begun on {self.peer.name} {ago:.1f} s before: it waited for a thread there."
