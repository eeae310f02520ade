"""The future of a remote call: a torch.futures.Future that can be awaited, cancelled, interrupted and held to
account."""

from __future__ import annotations

import asyncio
import atexit
import copy
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from types import CodeType
from typing import Any, Protocol, TypeVar, cast

import torch

from remora.agent.calls.call_context import recorded
from remora.agent.calls.stdlib_futures import Standing, Waiter
from remora.agent.runtime.clean_state import run_clean
from remora.agent.runtime.current import blocking_region, current_clock
from remora.agent.runtime.try_lock import GIVEN_UP_AFTER, blocks_itself, explain_block
from remora.clock import NEVER, SYSTEM, Clock
from remora.devices import streams
from remora.errors import CallCancelled, CallOutcomeUnknown, NotInitialized
from remora.long_wait import LongWait
from remora.options import check_timeout
from remora.wire.exceptions import stack_of

log = logging.getLogger("remora")

TOGETHER = 0.5  # seconds in which forgotten failures are collected for one line of the log

T = TypeVar("T")
S = TypeVar("S")
Watcher = Callable[[Any], None]
Origin = tuple[CodeType, int]  # where something was started: a function, and how far it had come

_Base: Any = torch._C.Future


class Cancellable(Protocol):
    """What a future is a future of."""

    @property
    def what(self) -> str:
        """In words."""

    def cancel(self) -> bool:
        """Give it up. False if it is settled."""


class Forgotten:
    """Failures at which no thread looked, collected for a moment: hundreds that are dropped together are one line of the
    log.

    Destructors add to it, on any thread and under any lock, so `add` is one `append`. A worker calls `report` when `due`,
    on a thread of its pool. Where no worker runs that would, `add` reports the first at once, and those that come within a
    moment of it go with a later one, or are reported when the program ends.
    """

    def __init__(self) -> None:
        self._failures: deque[tuple[str, Origin | None, BaseException]] = deque()
        self._since = NEVER  # when the oldest of them was added, in real time
        self._alone = -NEVER  # when `add` last reported
        self.reporters = 0  # workers that run (changed by their own threads alone, one at a time each)

    def add(self, what: str, origin: Origin | None, error: BaseException) -> None:
        """No thread will ever look at this one."""
        if not self._failures:
            self._since = time.monotonic()
        self._failures.append((what, origin, error))
        if not self.reporters and time.monotonic() - self._alone >= TOGETHER:
            self._alone = time.monotonic()
            self.report()

    def __len__(self) -> int:
        """How many failures wait to be reported."""
        return len(self._failures)

    @property
    def due(self) -> bool:
        """Whether it is time to report: those that came within a moment of the first are together."""
        return bool(self._failures) and time.monotonic() - self._since >= TOGETHER

    def report(self) -> None:
        """Say in one line what has been collected. Two threads that report at once share what there is."""
        count, first = 0, None
        while self._failures:
            try:
                failure = self._failures.popleft()
            except IndexError:
                break  # another thread had the last one
            count, first = count + 1, first or failure
        if first is not None:
            what, origin, error = first
            where = "an unknown place" if origin is None else "{}:{}".format(*_place(origin))
            calls = "call" if count == 2 else "calls"
            others = f" ({count - 1} more {calls} failed and nobody looked; this was the first)" if count > 1 else ""
            log.error("%s, started at %s, failed and nobody looked: %r%s", what, where, error, others)


forgotten = Forgotten()
atexit.register(forgotten.report)


class _Failure:
    """The error of a future, and whether the program saw it. It ends with the future, and tells if the program did not.
    Apart from the future: torch holds it in a way that the garbage collector cannot follow, so it must not lead back to
    the future."""

    __slots__ = ("error", "origin", "seen", "what")

    def __init__(self, error: BaseException, what: str, origin: Origin | None) -> None:
        self.error = error
        self.what = what
        self.origin = origin
        self.seen = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.seen and not is_finalizing():  # (then there may be no globals any more, and no log)
            forgotten.add(self.what or "a call", self.origin, self.error)

    def show(self, _value: object = None) -> Any:
        """Raise the error. A copy of it: what is raised gets a traceback, with the frames and all variables of whoever
        looked, and torch would keep those for ever."""
        self.seen = True
        raise fresh(self.error)


def going_down(what: str) -> NotInitialized:
    """The error for what would have to wait, or to lock, while the interpreter goes down: no other thread runs any
    more, and those that are gone may have held any lock."""
    return NotInitialized(f"{what}: the interpreter is going down")


def _place(origin: Origin) -> tuple[str, int]:
    """File and line. Looked up when needed: most calls succeed."""
    code, at = origin
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return code.co_filename, next(lines, code.co_firstlineno)


def fresh(error: BaseException) -> BaseException:
    """A copy of an error that is kept, to be raised: the one that is kept collects no traceback, and so keeps
    nothing."""
    try:
        twin = _copied(error)
        if type(twin) is not type(error) or twin.args != error.args:
            return error
    except Exception:  # (tensors, for example, cannot be compared like that)
        return error
    chain(twin, error.__cause__, error.__context__, error.__suppress_context__)
    return twin


def _copied(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:  # its constructor wants other arguments than it passed on, or it cannot be changed
        if any(vars(cls).get("__slots__") for cls in type(error).__mro__):
            raise
        twin = type(error).__new__(type(error), *error.args)
        vars(twin).update(vars(error))
        return twin


def chained(error: BaseException) -> list[BaseException]:
    """An error, and those that it came from."""
    found = [error]
    for each in found:  # which grows
        for origin in (each.__cause__, each.__context__):
            if origin is not None and all(origin is not known for known in found):
                found.append(origin)
    return found


def chain(
    error: BaseException, cause: BaseException | None, context: BaseException | None, suppress_context: bool
) -> None:
    """Say what an error came from. (It may be a frozen dataclass.)"""
    for name, value in ("__cause__", cause), ("__context__", context), ("__suppress_context__", suppress_context):
        object.__setattr__(error, name, value)


class Sleeper:
    """A thread, for as long as it waits for one future."""

    __slots__ = ("awake",)

    def __init__(self) -> None:
        self.awake = False  # it waits no longer, though it may still be on a list


class Future(torch.futures.Future[T]):
    """What `rpc_async` returns."""

    __slots__ = ("_failure", "_moment", "_of", "_origin", "_settled", "_value", "_watchers", "followed")

    def __init__(self, of: Cancellable | str = "", origin: Origin | None = None) -> None:
        _Base.__init__(self, [])  # (torch's own does the same in three steps)
        self._of = of  # the call, or a few words
        self._origin = origin
        self.followed = False  # the program has callbacks on it
        self._failure: _Failure | None = None
        self._settled = False
        self._value: T | None = None
        self._moment: streams.StreamPoint | None = None  # when the value is there, on devices
        self._watchers: list[Watcher] | None = None

    @property
    def what(self) -> str:
        """The call in words."""
        return self._of if isinstance(self._of, str) else self._of.what

    # Settling, once; who may do it is decided by the table of pending calls.

    # To do it again finishes what a thread began that was struck by an exception.

    def _succeed(self, value: T) -> None:
        if not self._settled:
            if streams.watched:
                self._moment = streams.moment()
            self._value = value
        self._announce()
        if not _Base.done(self):
            _Base.set_result(self, value)

    def _fail(self, error: BaseException) -> None:
        # Their tracebacks would lead back here through the frames that raised them, where no collector can follow.
        for each in chained(error):
            each.with_traceback(None)
        if not self._settled:
            failure = self._failure = _Failure(error, self.what, self._origin)
            self._set_unwrap_func(failure.show)
        self._announce()
        if not _Base.done(self):
            super().set_result(cast(T, error))

    def set_result(self, result: T) -> None:
        self._check_unsettled()
        self._succeed(result)

    def set_exception(self, result: T) -> None:
        assert isinstance(result, BaseException), f"{result!r} is not an exception"
        self._check_unsettled()
        self._fail(result)

    def _check_unsettled(self) -> None:
        """Raise in torch's words. (torch itself may not know yet: a thread that waits is woken first.)"""
        if self._settled:
            raise RuntimeError(
                "Future can only be marked completed once: it has its value, or an error (see `done()`), and keeps it"
            )

    def _announce(self) -> None:
        """Wake the threads that wait. Before torch knows: that runs the program's callbacks, which may take their
        time."""
        self._settled = True
        if self._watchers:
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        """A watcher is called before it is taken off the list, so that it is called whatever strikes this thread. Twice
        does no harm."""
        watchers = self._watchers
        while watchers:
            try:
                watcher = watchers[0]
            except IndexError:
                break  # another thread tells them, too
            watcher(self)
            try:
                watchers.remove(watcher)
            except ValueError:
                pass

    def _when_settled(self, watcher: Watcher) -> None:
        """Call `watcher(self)` soon after the future is settled (at once if it is). It must not block, and may be
        called twice."""
        alone = [watcher]  # made before we look: no lock is needed, as the interpreter does not switch threads in between
        if self._watchers is None:
            self._watchers = alone
        else:
            self._watchers.append(watcher)
        if self._settled:  # after it is on the list: a thread that settles the future either sees it there, or is seen here
            self._tell_watchers()

    def _forget(self, watcher: Watcher) -> None:
        """It does not want to be called any more."""
        try:
            if self._watchers is not None:
                self._watchers.remove(watcher)
        except ValueError:
            pass

    # Looking.

    def done(self) -> bool:
        """Whether there is a value or an error."""
        if not self._settled:
            self.notify()
        return self._settled

    def notify(self) -> None:
        """The program wants to hear of the outcome without waiting for it: see to it that it is noticed."""
        notify = None if self._settled else getattr(self._of, "notify", None)
        if notify is not None:
            notify()

    def wait(self, timeout: float | None = None) -> T:
        """The value, or the call's error. With a timeout (seconds), TimeoutError if it takes longer: the call goes
        on."""
        if timeout is not None:
            check_timeout(timeout, f"the timeout of wait() for {self.what}")
        if not self._settled:
            self._await_outcome(timeout)
        if self._failure is not None:
            self._failure.show()
        if self._moment is not None:
            self._moment.join(self._value)
        return self._value  # type: ignore[return-value]

    def _await_outcome(self, timeout: float | None) -> None:
        if sys.is_finalizing():
            raise going_down(self.what)
        clock: Clock = getattr(self._of, "clock", None) or current_clock()
        began = clock.now()
        of: Any = self._of
        if not hasattr(of, "attend"):
            block_until(self._when_settled, timeout, self.what, clock, began, self._forget)
            return
        thread = Sleeper()
        try:
            with blocking_region():
                of.attend(self, timeout, thread)  # calls can be waited for in a better way
            if not self._settled:
                block_until(self._when_settled, timeout, self.what, clock, began, self._forget)
        finally:
            thread.awake = True  # (no call: nothing can strike before it)
            of.unpark(thread)

    def result(self, timeout: float | None = None) -> T:
        """Like `wait`: the name that futures of the standard library have for it."""
        return self.wait(timeout)

    def value(self) -> T:
        """The value of a settled future, or its error."""
        if not self._settled:
            return super().value()  # raises, in torch's words
        return self.wait()

    def exception(self) -> BaseException | None:
        """The error of a settled future; None if it has a value, or is not settled."""
        if self._failure is None:
            return None
        self._failure.seen = True
        return self._failure.error

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what `callback(self)` returns, or of what it raises."""
        if not callable(callback):
            return super().then(callback)  # raises, in torch's words
        result: Future[S] = Future(f"what follows {self.what}", self._origin)

        def run(_: object) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                result._fail(_as_runtime_error(error))
            else:
                result._succeed(value)

        follow = partial(run_clean, recorded(run))

        to_be_run = {0: follow}  # the thread that takes it out runs it

        def settle(_: object) -> None:
            try:
                taken = to_be_run.pop(0, None)
                if taken is not None:
                    taken(self)
            except BaseException as error:  # of a signal handler: `run` raises nothing itself
                if not result._settled:
                    result._fail(_as_runtime_error(error))
                raise

        if not self._settled or not _Base.done(self):
            self.followed = True
            self.notify()
            super().add_done_callback(settle)
        if _Base.done(self):
            settle(self)  # not by torch, which swallows the exception of a signal handler
        return result

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call `callback(self)` when the future is settled, in a clean state on whichever thread (see docs/calls.md).
        Calls that it makes belong to what is recorded now."""
        self.followed = True
        self.notify()
        super().add_done_callback(partial(run_clean, recorded(callback)))

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def announce() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def from_any_thread(_: object) -> None:
            try:
                loop.call_soon_threadsafe(announce)
            except RuntimeError:
                pass  # the loop is closed: no coroutine waits

        self._when_settled(from_any_thread)
        self.notify()
        try:
            yield from arrived
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait()

    # For `concurrent.futures.as_completed` and `wait`: see `remora.agent.calls.stdlib_futures`.

    @property
    def _standing(self) -> Standing:
        known = vars(self)
        if "standing" not in known:
            mine = Standing()
            if known.setdefault("standing", mine) is mine:  # (atomic: one thread has it told of the outcome)
                self.add_done_callback(_tell_standing)
        found: Standing = known["standing"]
        return found

    @property
    def _condition(self) -> threading.Condition:
        return self._standing.condition

    @property
    def _state(self) -> str:
        return self._standing.state

    @property
    def _waiters(self) -> list[Waiter]:
        return self._standing.waiters

    # Giving up.

    def cancel(self) -> bool:
        """Give the call up: it fails with CallCancelled here; the callee is asked to stop if it can. False if
        settled."""
        if self._settled or isinstance(self._of, str) or not self._of.cancel():
            return False
        self._fail(CallCancelled(f"{self.what} was cancelled by its caller"))
        assert self._failure is not None
        self._failure.seen = True
        return True

    def cancelled(self) -> bool:
        """Whether `cancel` ended it."""
        return self._failure is not None and isinstance(self._failure.error, CallCancelled)

    def __repr__(self) -> str:
        if not self._settled:
            state = "pending"
        elif self._failure is None:
            state = f"done with a value of type {type(self._value).__name__}"  # not the value, which may be large
        else:  # to be shown here does not count as having been seen
            state = "cancelled" if self.cancelled() else f"failed with {self._failure.error!r}"
        return f"<Future of {self.what or 'a value'}: {state}>"


def _tell_standing(future: Future[Any]) -> None:
    future._standing.tell(future, future._failure is not None)


def _as_runtime_error(error: BaseException) -> BaseException:
    """Programs catch RuntimeError around callbacks, because torch turns every error into one."""
    if isinstance(error, RuntimeError):
        return error
    shown = RuntimeError(f"Got the following error when running the callback: {type(error).__name__}: {error}")
    shown.add_note(f"It was raised here:\n{stack_of(error)}")  # a future keeps no tracebacks
    shown.__cause__ = error
    return shown


def block_until(
    subscribe: Callable[[Callable[[object], None]], None],
    timeout: float | None,
    what: str,
    clock: Clock | None = None,
    began: float | None = None,
    unsubscribe: Callable[[Callable[[object], None]], None] | None = None,
) -> None:
    """Block this thread until the callback given to `subscribe` is called. Ctrl-C works, and other threads run. If it
    was in vain, the callback is given to `unsubscribe`: there will often be another wait."""
    if sys.is_finalizing():
        raise going_down(what)
    clock = clock or current_clock()
    began = clock.now() if began is None else began
    signal = threading.Lock()
    signal.acquire()

    def wake(_: object) -> None:
        try:
            signal.release()
        except RuntimeError:
            pass  # it has been called before

    subscribe(wake)

    def wait(seconds: float | None) -> bool:
        left = threading.TIMEOUT_MAX if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        if left <= GIVEN_UP_AFTER:
            return signal.acquire(timeout=left)
        if signal.acquire(timeout=GIVEN_UP_AFTER):
            return True
        if blocks_itself():
            raise CallOutcomeUnknown(explain_block(what))
        return signal.acquire(timeout=left - GIVEN_UP_AFTER)

    came = False
    try:
        with blocking_region():
            came = clock.block(wait, NEVER if timeout is None else began + max(timeout, 0.0))
    finally:
        if not came and unsubscribe is not None:
            unsubscribe(wake)
    if not came:
        raise TimeoutError(f"{what} is not done after waiting for {timeout} s")


def when_done(future: torch.futures.Future[Any], watcher: Watcher) -> None:
    """Call `watcher(future)` when any torch future is done, on whatever thread completes it."""
    if isinstance(future, Future):
        future._when_settled(watcher)
        future.notify()
    else:
        future.add_done_callback(lambda _: watcher(future))


def failure_of(future: torch.futures.Future[Any]) -> BaseException | None:
    """The error of a future that is done."""
    if isinstance(future, Future):
        return future.exception()
    try:
        future.value()
    except BaseException as error:
        return error
    return None


def wait_until(
    ready: Callable[[], bool],
    deadline: float,
    clock: Clock = SYSTEM,
    pause: float = 0.005,
    report: LongWait | None = None,
) -> bool:
    """Look again and again until `ready` says so or the deadline passes. For the slow paths of joining and leaving.
    `report` says what is waited for, if that takes long."""

    def look(seconds: float | None) -> bool:
        end = time.monotonic() + (NEVER if seconds is None else seconds)
        while not ready():
            if (left := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            if report is not None:
                report.look()
        return True

    with blocking_region():
        return clock.block(look, deadline)
