"""Many futures in one: what `torch.futures.collect_all` and `wait_all` rest on.

torch's own look at C++ state that Python cannot set (an error does not end them early), so `teach_torch` puts a version
under them that knows our futures and leaves all others to the original.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, cast

import torch

from remora.agent.calls.call import ReplyChannel
from remora.agent.calls.future import Future, Sleeper, failure_of, when_done
from remora.agent.runtime.try_lock import TryLock
from remora.clock import NEVER

_collect_all = torch._C._collect_all
_is_complete: Callable[[Any], bool] = torch._C.Future.done  # also as far as torch knows


class _Members:
    """The futures of a collection."""

    what = "a collection of futures"

    def __init__(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._futures = futures
        self._reading: dict[int, ReplyChannel] = {}  # the threads that read, to wait for all of them, and what
        self._channels: set[ReplyChannel] = set()  # all that threads have come to
        self._told = False  # we will be, when all is settled

    def cancel(self) -> bool:
        """There is nothing to give up: the members are others'."""
        return False

    def attend(self, everything: Future[Any], timeout: float | None, thread: Sleeper) -> None:
        """Read the replies of members, on one channel after the other: the pool does so on the rest. One that fails on
        another channel, or without a reply, ends it."""
        deadline = NEVER if timeout is None else time.monotonic() + timeout
        channels = self._by_channel()
        if not channels:
            return
        reader = get_ident()
        if not self._told:
            self._told = True
            everything._when_settled(self._look_up)
        for channel in channels:
            channel.flush()  # it takes a while until we come to the last
        try:
            for channel, calls in channels.items():
                self._reading[reader] = channel
                self._channels.add(channel)
                until = min(deadline, min(call.deadline for call in calls))  # a peer that does not answer wakes no thread
                channel.attend(calls, until, partial(_is_over, everything, list(calls)), thread)
        finally:
            self._reading.pop(reader, None)

    def unpark(self, thread: Sleeper) -> None:
        """A thread waits no longer."""
        for channel in list(self._channels):
            channel.parked.discard(thread)

    def notify(self) -> None:
        """The program wants to hear of it without waiting for it."""
        for future in self._futures:
            if isinstance(future, Future):
                future.followed = True  # the callbacks of a collection run when its last member is settled
                future.notify()

    def _by_channel(self) -> dict[ReplyChannel, set[Any]]:
        channels: dict[ReplyChannel, set[Any]] = {}
        before: ReplyChannel | None = None
        for future in self._futures:
            if isinstance(future, Future) and not future._settled:
                channel: ReplyChannel | None = getattr(future._of, "channel", None)
                if channel is not None:
                    if channel is not before:  # (most go where the one before them goes)
                        calls, before = channels.setdefault(channel, set()), channel
                    calls.add(future._of)
        return channels

    def _look_up(self, _: object) -> None:
        for reader, channel in list(self._reading.items()):
            if reader != get_ident():
                channel.look_up()


def _is_over(everything: Future[Any], calls: list[Any]) -> bool:
    """Take the settled calls off the list, and return True if none is left."""
    while calls and calls[-1].settled:
        calls.pop()
    return not calls or everything._settled


class _Collection:
    """Many futures on their way into one."""

    def __init__(self, futures: list[torch.futures.Future[Any]]) -> None:
        self.futures = futures
        self.everything: Future[list[torch.futures.Future[Any]]] = Future(_Members(futures))
        self._missing = set(map(id, futures))  # those that have no value yet
        self._concluding = TryLock()  # guards: the end of the collection, which one thread tells

    def one_is_done(self, future: torch.futures.Future[Any]) -> None:
        """May be called more than once for one future: a thread that is struck by an exception is followed by another."""
        error = None if getattr(future, "_failure", self) is None else failure_of(future)  # (most of ours have none)
        if error is None:
            self._missing.discard(id(future))
        if (error is not None or not self._missing) and not _is_complete(self.everything) and self._concluding.take():
            try:
                if error is None:
                    self.everything._succeed(self.futures)
                else:
                    self.everything._fail(error)
            finally:
                self._concluding.free[0] = True


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """A future of all of them; it fails as soon as one of them does."""
    collection = _Collection(list(futures))
    if not any([isinstance(future, Future) for future in collection.futures]):  # noqa: C419 (a generator that is given up
        # is closed by a destructor, in which an exception of a signal handler is lost)
        return cast("torch.futures.Future[Any]", _collect_all(cast("list[Any]", collection.futures)))
    watcher = collection.one_is_done
    for future in collection.futures:
        if isinstance(future, Future):
            future._when_settled(watcher)
        else:
            when_done(future, watcher)
    return collection.everything


def teach_torch() -> None:
    """Make `torch.futures.collect_all` and `wait_all` do right by our futures: both rest on this one function."""
    torch._C._collect_all = cast(Any, collect_all)
