"""The future of a remote call: a torch.futures.Future that can be awaited, cancelled and interrupted, and that reports a
failure which the program never saw."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

import torch

from remora.agent.calls.blocking import block_until, going_down
from remora.agent.calls.call_context import recorded
from remora.agent.calls.error_copies import chained
from remora.agent.calls.stdlib_futures import Standing
from remora.agent.calls.unseen_failures import Failure, Origin
from remora.agent.runtime.clean_state import run_clean
from remora.agent.runtime.current import blocking_region, current_clock
from remora.clock import Clock
from remora.devices import streams
from remora.errors import CallCancelled
from remora.options import check_timeout
from remora.wire.exceptions import stack_of

T = TypeVar("T")
S = TypeVar("S")
Watcher = Callable[[Any], None]

_Base: Any = torch._C.Future


class Cancellable(Protocol):
    """The work behind a future, which can be cancelled."""

    @property
    def what(self) -> str: ...  # in words
    def cancel(self) -> bool: ...  # give it up; False if it is settled


class Sleeper:
    """A thread, for as long as it waits for one future."""

    __slots__ = ("awake",)

    def __init__(self) -> None:
        self.awake = False  # it waits no longer, though it may still be on a list


class Future(torch.futures.Future[T]):
    """The future that `rpc_async` returns."""

    __slots__ = ("_failure", "_of", "_origin", "_settled", "_stream_point", "_value", "_watchers", "followed")

    def __init__(self, of: Cancellable | str = "", origin: Origin | None = None) -> None:
        _Base.__init__(self, [])  # (torch's own does the same in three steps)
        self._of = of  # the call, or a few words
        self._origin = origin
        self.followed = False  # the program has callbacks on it
        # The thread that settles it writes the value or the failure first, then `_settled`, then looks at `_watchers`.
        # A thread that waits adds its watcher, then looks at `_settled`: so the second of the two sees the first.
        self._failure: Failure | None = None
        self._settled = False
        self._value: T | None = None
        self._stream_point: streams.StreamPoint | None = None  # when the value is there, on devices
        self._watchers: list[Watcher] | None = None

    @property
    def what(self) -> str:
        """The call in words."""
        return self._of if isinstance(self._of, str) else self._of.what

    # Settling, once: by the thread that takes the call out of the table of pending calls.

    # To do it again finishes what a thread began that was struck by an exception.

    def _succeed(self, value: T) -> None:
        if not self._settled:
            if streams.watched:
                self._stream_point = streams.stream_point()
            self._value = value
        self._announce()
        if not _Base.done(self):
            _Base.set_result(self, value)

    def _fail(self, error: BaseException) -> None:
        # Their tracebacks would lead back here through the frames that raised them, where no collector can follow.
        for each in chained(error):
            each.with_traceback(None)
        if not self._settled:
            failure = self._failure = Failure(error, self.what, self._origin)
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
        if self._settled and not self._watchers:  # (else a thread that was to tell them may have been struck)
            watcher(self)
            return
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
        """Return True if there is a value or an error."""
        if not self._settled:
            self.notify()
        return self._settled

    def notify(self) -> None:
        """Have the outcome noticed soon: the program wants to hear of it without waiting."""
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
        if self._stream_point is not None:
            self._stream_point.join(self._value)
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

    _condition = property(attrgetter("_standing.condition"))
    _state = property(attrgetter("_standing.state"))
    _waiters = property(attrgetter("_standing.waiters"))

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
        """Return True if `cancel` ended it."""
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
