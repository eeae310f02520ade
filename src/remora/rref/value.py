"""A value on its owner: made already, or being made. A thread that needs it waits, or leaves a callback.

A value has no lock. `ready` is set after the value or the error; a callback is added to the list before `ready` is read. So
either the thread that settles the value finds the callback, or the thread that adds it sees that the value is ready. Both
may call `notify` at once: `list.pop` gives each callback to one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from remora.agent.calls.blocking import block_until
from remora.agent.calls.error_copies import chain, chained, fresh
from remora.devices import streams
from remora.names import Name
from remora.vocabulary.effects import RRefId
from remora.wire.exceptions import stack_of

log = logging.getLogger("remora")

_UNSET = object()


class Value:
    """Set once, to a value or an error. It keeps the identity of the object that it is given."""

    __slots__ = (
        "_stream_point", "_value", "_waiters", "error", "id", "made_at", "maker", "ready", "script", "site", "stack",
    )  # fmt: skip

    def __init__(self, id: RRefId, value: Any = _UNSET, script: bool = False) -> None:
        self.id = id
        self.script = script  # made by a torch operator or a TorchScript function
        self.made_at = time.time()
        self.maker: Name | None = None  # the function whose result it is
        self.site = ""  # where the reference was made, if that is recorded
        self._value = value
        self._stream_point = streams.stream_point() if streams.watched else None  # the point on streams at which it is there
        self.error: BaseException | None = None  # the reason for which it could not be made; see `_without_frames`
        self.stack: str | None = None  # the stack that raised it
        self.ready = value is not _UNSET  # there is a value, or an error; set last
        self._waiters: list[Callable[[], None]] = []

    def settle(self, value: Any, error: BaseException | None) -> None:
        """The value is made, or it could not be. A second settling is ignored: the first stays."""
        if not self.ready:
            if error is None:
                self._stream_point = streams.stream_point() if streams.watched else None
                self._value = value
            else:
                self.stack = stack_of(error)
                self.error = _without_frames(error)
            self.ready = True
            self.notify()

    def fail(self, error: BaseException) -> None:
        """Settle it with an error."""
        self.settle(None, error)

    def notify(self) -> None:
        """Call the waiters: there is a value or an error."""
        while self._waiters:
            try:
                waiter = self._waiters.pop()
            except IndexError:
                return
            try:
                waiter()
            except Exception:  # the other waiters must be called all the same
                log.exception("a callback that waited for %s failed", self.id)

    def when_ready(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when there is a value or an error; at once if there is."""
        if not self.add_waiter(waiter):
            self.notify()

    def add_waiter(self, waiter: Callable[[], None]) -> bool:
        """The same, but false if there is a value or an error already: then the caller has `notify` called on a thread on
        which `waiter` may run."""
        self._waiters.append(waiter)
        return not self.ready

    def waiting(self) -> list[Callable[[], None]]:
        """Return what will be called when there is a value or an error, for showing."""
        return self._waiters.copy()

    def join(self, other: Value) -> None:
        """Two were made for the same value: settling one settles the other."""
        self.when_ready(lambda: other.settle(self._value, self.error))
        other.when_ready(lambda: self.settle(other._value, other.error))

    def _when_ready(self, waiter: Callable[[object], None]) -> None:
        self.when_ready(lambda: waiter(self))

    def get(self) -> Any:
        """The value; waits until it is there, and raises the error that prevented it."""
        if not self.ready:
            block_until(self._when_ready, None, f"the value of {self.id}")
        if self.error is not None:
            raise fresh(self.error)
        if self._stream_point is not None:
            self._stream_point.join(self._value)
        return self._value

    def peek(self) -> Any:
        """The value if it is there, for showing; else None."""
        return None if self._value is _UNSET else self._value


def _without_frames(error: BaseException) -> BaseException:
    """A copy of an error, and of those that it came from, without their tracebacks. It is kept as long as the
    value is referenced, and tracebacks would keep the variables of the function: its arguments, and this value."""
    copies = {id(each): fresh(each) for each in chained(error)}
    for twin in copies.values():
        chain(twin, copies.get(id(twin.__cause__)), copies.get(id(twin.__context__)), twin.__suppress_context__)
        twin.with_traceback(None)  # (it has one if it cannot be copied)
    return copies[id(error)]
