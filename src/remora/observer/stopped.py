"""Looks at a worker of this host that does not answer: whether its process is stopped, and where its threads
are. C code that holds the interpreter keeps every thread of Python from answering; `faulthandler`, in C itself, does not
need the interpreter, and writes the stacks when its signal comes (`remora.introspection.stack_signal`)."""

from __future__ import annotations

import os
import re
import time

from remora.observer import directory
from remora.observer.directory import WorkerEntry

MAX_STACKS = 256 << 10  # bytes that are read
TOO_LONG = 4 << 20  # a file of stacks that has become so long is emptied
PAUSE = 0.01
SETTLED = 0.05  # seconds for which the file has not grown: the process has written it
_ANSWERING = re.compile(r"introspection/visitors\.py\", line \d+ in _try\b")  # the thread that answers observers does so


def explain(entry: WorkerEntry | None, reason: str, end: float) -> tuple[str, str, str]:
    """Return the state of a worker that did not answer, the reason, and its stacks if they can be had before `end`."""
    if entry is None:
        return "silent", reason, ""
    if not directory.is_alive(entry):
        return "dead", f"its process (pid {entry.pid}) has ended", ""
    state = directory.state_of(entry.pid)
    if state in ("T", "t"):
        why = "a debugger holds it" if state == "t" else f"SIGSTOP or Ctrl-Z; kill -CONT {entry.pid} lets it go on"
        return "silent", f"its process (pid {entry.pid}) is stopped ({why})", ""
    stacks = _ask_for_stacks(entry, end)
    if not stacks:
        return "silent", reason, ""
    if _ANSWERING.search(stacks):
        what = "it was still making its answer: it or its host is busy, or C code may hold the interpreter"
    else:
        what = "its process lives: C code may hold the interpreter, or its host is overloaded"
    return "silent", f"{reason}: {what}", stacks


def _ask_for_stacks(entry: WorkerEntry, end: float) -> str:
    """Have the process write its stacks, and read what it wrote. The signal goes only to a process that handles it."""
    number, path = entry.stack_signal, entry.stacks_file
    if number is None or path is None or not _handles(entry.pid, number):
        return ""
    try:
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END) > TOO_LONG:
                file.truncate(0)
            before = file.seek(0, os.SEEK_END)
            if not directory.is_alive(entry):  # (looked at last: from here on the number could only be reused in no time)
                return ""
            os.kill(entry.pid, number)
            size, since = before, time.monotonic()
            while time.monotonic() < end and not (size > before and time.monotonic() - since > SETTLED):
                time.sleep(PAUSE)
                now = file.seek(0, os.SEEK_END)
                if now != size:
                    size, since = now, time.monotonic()
            file.seek(before)
            return file.read(MAX_STACKS).decode(errors="replace")
    except OSError:
        return ""


def _handles(pid: int, number: int) -> bool:
    """Return True if a process handles a signal now: without a handler it would end the process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
