"""Has this process write the stacks of all its threads to a file when a certain signal comes.

`faulthandler` does so in C, inside the signal handler, and needs no interpreter: it works while C code holds the interpreter
for ever. The handler belongs to the process, so workers of one process share the file of the first. It is set only if the
program has none of its own for that signal, which is a real-time signal that hardly a program uses.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from typing import IO

NUMBER: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None


class StackSignal:
    """The handler of this process, which is there as long as a worker uses it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards: the fields below
        self._users = 0
        self._file: IO[bytes] | None = None
        self._path = ""

    def take(self, path: str) -> tuple[int, str] | None:
        """Use the handler; return the signal and the file, `path` if it is the first. None if there can be none. Each
        call is undone by `release`."""
        if NUMBER is None:
            return None
        with self._lock:
            if self._file is None and not self._open(path):
                return None
            self._users += 1
            return NUMBER, self._path

    def _open(self, path: str) -> bool:
        """Set the handler. False if the program has one."""
        assert NUMBER is not None
        if signal.getsignal(NUMBER) is not signal.SIG_DFL:
            return False
        try:
            self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", buffering=0)  # noqa: SIM115
        except OSError:
            return False
        self._path = path
        faulthandler.register(NUMBER, file=self._file, all_threads=True, chain=False)
        return True

    def release(self) -> None:
        """A worker that used it has ended."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._close()
                with suppress(OSError):
                    os.unlink(self._path)

    def abandon(self) -> None:
        """In a forked child, whose stacks are not its parent's."""
        self._lock = threading.RLock()  # one of the parent's threads may have held the other one
        self._users = 0
        self._close()

    def _close(self) -> None:
        if self._file is not None and NUMBER is not None:
            faulthandler.unregister(NUMBER)
            self._file.close()
            self._file = None


process = StackSignal()
