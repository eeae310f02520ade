"""A call under way, as its caller sees it: what was asked, until when, and the answer. No threads of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count

from remora.errors import CallTimeout
from remora.wire.frames import Frame

NEVER = float("inf")
UNSET_TIMEOUT = -1.0

next_call_id: Callable[[], int] = count(1).__next__

# The deadline of the call that the current function serves; nested calls inherit it.
current_deadline: ContextVar[float | None] = ContextVar("remora_deadline", default=None)


def name_of(target: object) -> str:
    """How people call a function."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or str(target)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module and not isinstance(target, str) else str(name)


class Call:
    """What a caller waits for. Settled once: by a reply, or by a failure."""

    __slots__ = ("_signal", "callee", "deadline", "failure", "id", "on_settled", "reply", "target", "timeout")

    def __init__(self, callee: str, target: object, on_settled: Callable[[Call], None] | None = None) -> None:
        self.id = next_call_id()
        self.callee = callee
        self.target = target  # the function, or a word for what is asked
        self.deadline = NEVER
        self.timeout = 0.0  # what was allowed, for messages to people
        self.reply: Frame | None = None
        self.failure: BaseException | None = None
        self.on_settled = on_settled  # asynchronous calls: run by the crew, or by whoever makes the call fail
        self._signal: threading.Lock | None = None  # synchronous calls: released when settled

    @property
    def what(self) -> str:
        """The call in words, for messages to people. Made when needed: most calls succeed."""
        return f"call of {name_of(self.target)} on {self.callee}"

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.failure is not None

    def remaining(self) -> float | None:
        """Seconds left; None if it may take for ever."""
        return None if self.deadline == NEVER else self.deadline - time.monotonic()

    def settle(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Tell whoever waits that a reply or a failure is there: wake its thread, or have `run` call it back."""
        notify = self.on_settled
        if notify is None:
            self.wake()
        else:
            run(lambda: notify(self))

    def wake(self) -> None:
        """Let the thread that waits for this call look at it."""
        signal = self._signal
        if signal is not None:
            try:
                signal.release()
            except RuntimeError:
                pass  # it was awake already

    def sleep(self, seconds: float | None) -> None:
        """Wait until somebody settles the call, or for `seconds`. The lock is made first and the state looked at then,
        so that no settling falls between the two."""
        if self._signal is None:
            lock = threading.Lock()
            lock.acquire()
            self._signal = lock
        if not self.settled:
            self._signal.acquire(timeout=-1 if seconds is None else max(seconds, 0.0))

    def limit(self, timeout: float, default: float) -> None:
        """Start the clock. Unset: what is left to the call we serve, else the default; 0: never."""
        if timeout == UNSET_TIMEOUT:
            inherited = current_deadline.get()
            if inherited is not None and inherited != NEVER:
                self.deadline = inherited
                self.timeout = max(inherited - time.monotonic(), 0.0)
                return
            timeout = default
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout != 0 else NEVER

    def timed_out(self) -> CallTimeout:
        """The error for a call whose deadline passed. The words are those programs match on."""
        return CallTimeout(
            f"RPCErr:1:RPC ran for more than set timeout ({self.timeout * 1000:g} ms) and will now be marked with an error: "
            f"{self.what}. It may still be running there; pass a longer timeout, or 0 to wait for ever."
        )
