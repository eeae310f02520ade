"""Frees memory later that the other process, or a stream of this one, may still use. `sweep` polls it."""

from __future__ import annotations

import threading
from collections.abc import Callable

LetGo = Callable[[bool], bool]  # takes True if the other process is gone, frees what it can; True: all of it

_lock = threading.RLock()  # guards: _left
_left: list[tuple[int, LetGo]] = []


def leave(process: int, let_go: LetGo) -> None:
    """Free what is shared with that process: now, or when `sweep` finds that it is not used any more."""
    with _lock:
        _left.append((process, let_go))
    sweep()


def sweep() -> None:
    """Free what is not used any more. Called periodically."""
    if not _left:
        return
    with _lock:
        _left[:] = [each for each in _left if not each[1](not is_running(each[0]))]


def is_running(process: int) -> bool:
    """Return True if there is such a process, and it is not a zombie."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def count() -> int:
    """Return the number of entries that are left."""
    return len(_left)
