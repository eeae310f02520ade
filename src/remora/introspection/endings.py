"""Hears when this process ends with an error, or is sent SIGUSR2, for the workers of this process that want to know.

An error ends a process through `sys.excepthook`, or, in a process of multiprocessing, through a handler of that library,
which runs what `multiprocessing.util.Finalize` registered while the error is on its way. Both are chained: what the program
put there runs, too. SIGUSR2 is heard only if the program has no handler of its own. The hooks are there as long as a worker
needs them.
"""

from __future__ import annotations

import multiprocessing.util
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

from remora.observer.dump import Cause

SIGNAL: Any = getattr(signal, "SIGUSR2", None)


class Witness(Protocol):
    """Wants to hear of the end: `AutomaticDumps`."""

    def tell(self, cause: Cause, text: str) -> None: ...

    def last_words(self, error: BaseException) -> None: ...


class Endings:
    """The hooks of this process."""

    def __init__(self) -> None:
        self._witnesses: list[Witness] = []
        self._chained: Any = None  # the program's `sys.excepthook`, while ours is in its place
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._has_signal = False
        self._said: BaseException | None = None  # of this error the dumps speak already

    def add(self, witness: Witness) -> None:
        """Have `witness` hear of the end."""
        self._witnesses.append(witness)
        if len(self._witnesses) == 1:
            self._chained, sys.excepthook = sys.excepthook, self._raised
            # Before everything that multiprocessing finalizes: queues and managers of the program still work.
            self._finalizer = multiprocessing.util.Finalize(None, self._finalized, exitpriority=1_000_000)
            if self._may_take_signal() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
                signal.signal(SIGNAL, self._signalled)
                self._has_signal = True

    def remove(self, witness: Witness) -> None:
        """Undo `add`. Harmless if done twice."""
        if witness in self._witnesses:
            self._witnesses.remove(witness)
            if not self._witnesses:
                self._take_out()

    def abandon(self) -> None:
        """In a forked child, whose end is no business of its parent's workers."""
        if self._witnesses:
            self._witnesses.clear()
            self._take_out()

    def _take_out(self) -> None:
        if sys.excepthook == self._raised:  # else the program put one in front, which calls ours
            sys.excepthook, self._chained = self._chained, None
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._finalizer = None
        # On another thread ours is left behind: it has no witness, and does nothing.
        if self._has_signal and self._may_take_signal():
            if signal.getsignal(SIGNAL) == self._signalled:
                signal.signal(SIGNAL, signal.SIG_DFL)
            self._has_signal = False

    def _may_take_signal(self) -> bool:
        """Handlers can be set on the main thread only."""
        return SIGNAL is not None and threading.current_thread() is threading.main_thread()

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._speak(error)
        (self._chained or sys.__excepthook__)(kind, error, trace)

    def _finalized(self) -> None:
        """A process of multiprocessing ends: the error is the one that is being handled."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:  # torch.multiprocessing reports the error and exits
            error = error.__context__
        if error is not None:
            self._speak(error)

    def _speak(self, error: BaseException) -> None:
        if error is not self._said and not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._said = error
            for witness in list(self._witnesses):
                witness.last_words(error)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        for witness in list(self._witnesses):
            witness.tell(Cause.SIGNAL, signal.Signals(number).name)


process = Endings()
