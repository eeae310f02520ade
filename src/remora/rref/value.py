"""A value on its owner: there already, or being made. Whoever needs it waits, or leaves a callback."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from remora.agent.calls.future import block_until, chain, chained, fresh
from remora.devices import streams
from remora.vocabulary.effects import RRefId
from remora.wire.exceptions import stack_of

log = logging.getLogger("remora")

_UNSET = object()


class Value:
    """Set once, to a value or an error. It keeps the identity of what it is given."""

    __slots__ = ("_moment", "_value", "_watchers", "error", "id", "made_at", "ready", "script", "stack")

    def __init__(self, id: RRefId, value: Any = _UNSET, script: bool = False) -> None:
        self.id = id
        self.script = script  # made by a torch operator or a TorchScript function
        self.made_at = time.time()
        self._value = value
        self._moment = streams.moment() if streams.watched else None  # when it is there, on devices
        self.error: BaseException | None = None  # why it could not be made; see `_without_frames`
        self.stack: str | None = None  # where that was raised
        self.ready = value is not _UNSET  # there is a value, or an error
        self._watchers: list[Callable[[], None]] = []

    def settle(self, value: Any, error: BaseException | None) -> None:
        """The value is made, or it could not be. A second settling is ignored: the first stays."""
        if not self.ready:
            if error is None:
                self._moment = streams.moment() if streams.watched else None
                self._value = value
            else:
                self.stack = stack_of(error)
                self.error = _without_frames(error)
            self.ready = True
            self.tell()

    def fail(self, error: BaseException) -> None:
        """It could not be made."""
        self.settle(None, error)

    def tell(self) -> None:
        """Call whoever waits: there is a value or an error."""
        while self._watchers:
            try:
                watcher = self._watchers.pop()
            except IndexError:
                return
            try:
                watcher()
            except Exception:  # the others must hear of it all the same
                log.exception("somebody who waited for %s failed", self.id)

    def when_ready(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` when there is a value or an error; at once if there is."""
        if not self.watch(watcher):
            self.tell()

    def watch(self, watcher: Callable[[], None]) -> bool:
        """The same, but if there is one already, this is false, and `tell` is to be called where `watcher` may run."""
        self._watchers.append(watcher)
        return not self.ready

    def join(self, other: Value) -> None:
        """Two were made for the same value: what becomes of one becomes of the other."""
        self.when_ready(lambda: other.settle(self._value, self.error))
        other.when_ready(lambda: self.settle(other._value, other.error))

    def _when_ready(self, watcher: Callable[[object], None]) -> None:
        self.when_ready(lambda: watcher(self))

    def get(self) -> Any:
        """The value; waits until it is there, and raises the error that prevented it."""
        if not self.ready:
            block_until(self._when_ready, None, f"the value of {self.id}")
        if self.error is not None:
            raise fresh(self.error)
        if self._moment is not None:
            self._moment.join(self._value)
        return self._value

    def peek(self) -> Any:
        """The value if it is there, for showing; else None."""
        return None if self._value is _UNSET else self._value


def _without_frames(error: BaseException) -> BaseException:
    """A copy of an error, and of those that it came from, without their tracebacks. It is kept for as long as somebody has a
    reference to the value, and those keep what the function had in hand: its arguments, and this value."""
    copies = {id(each): fresh(each) for each in chained(error)}
    for twin in copies.values():
        chain(twin, copies.get(id(twin.__cause__)), copies.get(id(twin.__context__)), twin.__suppress_context__)
        twin.with_traceback(None)  # (it has one if it cannot be copied)
    return copies[id(error)]
